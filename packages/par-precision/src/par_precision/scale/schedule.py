"""An lr scheduler that knows of skipped steps."""

from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler


class SkipAwareScheduler(LRScheduler):
    """lr scheduler that does not advance if the optimizer has skipped every step since the scheduler's last call.

    It is an instance of LRScheduler, as trainers require, and has the attributes of the wrapped scheduler.

    Args:
        scheduler: Scheduler of the mixed optimizer or of the user's optimizer.

    Attributes:
        scheduler: Wrapped scheduler.
    """

    def __init__(self, scheduler: LRScheduler) -> None:
        self.scheduler = scheduler  # LRScheduler's own constructor would take a first step
        self._skipped: Tensor | None = None  # whether all steps since the last call were skipped; None: there were none
        self._stands_still = False  # what the last call has decided

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: Any, **keywords: Any) -> None:
        """Advance the scheduler, unless all steps since the last call were skipped. This waits for the device.

        Args:
            *args: Arguments of the wrapped scheduler's `step`, such as the metric of ReduceLROnPlateau.
            **keywords: Keyword arguments of the wrapped scheduler's `step`.
        """
        # Without a step since the last call, the earlier decision holds.
        if self._skipped is not None:
            self._stands_still, self._skipped = bool(self._skipped), None
        if not self._stands_still:
            self.scheduler.step(*args, **keywords)

    def note(self, skipped: Tensor) -> None:
        """Record a step of the optimizer, without waiting for the device.

        Args:
            skipped: Whether the step was skipped, a bool scalar.
        """
        self._skipped = skipped if self._skipped is None else self._skipped & skipped

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the wrapped scheduler."""
        return self.scheduler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state into the wrapped scheduler."""
        self.scheduler.load_state_dict(state)

    def get_lr(self) -> list[Any]:
        """Return the learning rates that the wrapped scheduler computes for the next step."""
        return self.scheduler.get_lr()

    def get_last_lr(self) -> list[Any]:
        """Return the last learning rates of the wrapped scheduler, one for each param group."""
        return self.scheduler.get_last_lr()
