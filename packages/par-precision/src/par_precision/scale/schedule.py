"""An lr scheduler that knows of skipped steps."""

from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import LRScheduler

if TYPE_CHECKING:
    from .._optimizer import MixedOptimizer


class Schedule:
    """Stands still where the optimizer's last step was skipped; else it is the scheduler.

    Args:
        scheduler: Of the mixed optimizer or of the one inside.
        optimizer: The mixed optimizer.
    """

    def __init__(self, scheduler: LRScheduler, optimizer: "MixedOptimizer") -> None:
        self.scheduler, self._optimizer = scheduler, optimizer

    def step(self, *args: Any, **keywords: Any) -> None:
        """Advances the schedule, unless the last step was skipped. Reading that waits for the device."""
        last = self._optimizer.last
        if last is None or not bool(last.skipped):
            self.scheduler.step(*args, **keywords)

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The scheduler's."""
        self.scheduler.load_state_dict(state)

    def get_last_lr(self) -> list[Any]:
        """The scheduler's."""
        return self.scheduler.get_last_lr()
