"""An lr scheduler that knows of skipped steps."""

from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import LRScheduler


class Schedule(LRScheduler):
    """An lr scheduler that stands still where the optimizer's last step was skipped.

    It is an LRScheduler for whoever asks, such as a trainer, and has the attributes of the scheduler inside.

    Args:
        scheduler: A scheduler of the mixed optimizer or of the one inside.
        skipped: Says whether the last step was skipped; it may wait for the device.

    Attributes:
        scheduler: The scheduler inside.
    """

    def __init__(self, scheduler: LRScheduler, skipped: Callable[[], bool]) -> None:
        self.scheduler, self._skipped = scheduler, skipped  # LRScheduler's own constructor would take a first step

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: Any, **keywords: Any) -> None:
        """Advances the scheduler, unless the last step was skipped. Reading that waits for the device.

        Args:
            *args: What the scheduler's own `step` takes, such as the metric of ReduceLROnPlateau.
            **keywords: What the scheduler's own `step` takes.
        """
        if not self._skipped():
            self.scheduler.step(*args, **keywords)

    def state_dict(self) -> dict[str, Any]:
        """The state of the scheduler inside."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a state into the scheduler inside."""
        self.scheduler.load_state_dict(state)

    def get_lr(self) -> list[Any]:
        """What the scheduler inside computes for the next step."""
        return self.scheduler.get_lr()

    def get_last_lr(self) -> list[Any]:
        """The last learning rates of the scheduler inside, one for each param group."""
        return self.scheduler.get_last_lr()
