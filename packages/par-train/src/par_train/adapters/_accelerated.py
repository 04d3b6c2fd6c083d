"""What a `ParAccelerator` makes of an optimizer and of an lr scheduler, and what it refuses."""

import math
from typing import Any, NoReturn

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch.optim import Optimizer

from par_precision import MixedOptimizer

from ._clip import Clipping


class ParOptimizer(AcceleratedOptimizer):  # type: ignore[misc]  # accelerate has no types
    """The optimizer of a strategy as Accelerate's, which steps where gradients are not being accumulated.

    Args:
        optimizer: What `Strategy.initialize` gave.
        trained: The ids of the parameters that it was given and that are on this rank.
        clip_norm: The strategy's own.
    """

    def __init__(self, optimizer: Optimizer, trained: set[int], clip_norm: float | None) -> None:
        super().__init__(optimizer, device_placement=False)
        self.trained = trained
        self.clipping = Clipping(optimizer, clip_norm, self.accelerator_state.device)

    @property
    def scaling(self) -> Any:
        """What can be saved of a loss scale; None: there is none."""
        optimizer = self.optimizer
        return optimizer.scaling if isinstance(optimizer, MixedOptimizer) and optimizer.scaling.scale else None

    @property
    def step_was_skipped(self) -> bool:
        """Whether gradients overflowed in the last step; without a loss scale nobody waits for the answer."""
        return self.scaling is not None and self.optimizer.last is not None and bool(self.optimizer.last.skipped)


class ParScheduler(AcceleratedScheduler):  # type: ignore[misc]  # accelerate has no types
    """An lr scheduler as Accelerate's, which counts the steps of all data ranks.

    Args:
        scheduler: The user's.
        optimizers: The prepared optimizers, in whose steps it steps.
        step_with_optimizer: Whether it does.
        times: How often it steps for each step of theirs.
    """

    def __init__(self, scheduler: Any, optimizers: Any, *, step_with_optimizer: bool, times: int) -> None:
        super().__init__(scheduler, optimizers, step_with_optimizer, split_batches=True)
        self._times = times

    def step(self, *args: Any, **keywords: Any) -> None:
        """Steps, as often as there are data ranks that have each had a batch."""
        steps = self._times if self.step_with_optimizer and self.gradient_state.sync_gradients else 1
        total = getattr(self.scheduler, "total_steps", math.inf)
        for _ in range(steps):
            if not self.step_with_optimizer or self.scheduler._step_count <= total:  # as Accelerate ends a OneCycle
                super().step(*args, **keywords)


class Refusing:
    """The methods of an `Accelerator` that have no meaning on a strategy, each with what has."""

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> NoReturn:
        """Refuses."""
        del parameters
        _refuse(
            "clip_grad_value_", f"ParAccelerator strategy=dict(mixed=dict(clip_value={clip_value})), which step() heeds"
        )

    def unscale_gradients(self, optimizer: Any = None) -> NoReturn:
        """Refuses."""
        del optimizer
        _refuse("unscale_gradients", "clip_grad_norm_ the largest norm: step() unscales, then clips")

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> NoReturn:
        """Refuses."""
        del joinables, even_batches
        _refuse("join_uneven_inputs", "the data loader drop_last=True, or DataLoaderConfiguration even_batches=True")

    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> NoReturn:
        """Refuses."""
        del inputs, apply_padding
        _refuse("split_between_processes", "prepare() a data loader, which shares samples out over the data ranks")

    def get_state_dict(self, model: Any, unwrap: bool = True) -> NoReturn:
        """Refuses."""
        del model, unwrap
        _refuse("get_state_dict", "save_model() a folder: no rank need have the whole model")

    def register_save_state_pre_hook(self, hook: Any) -> NoReturn:
        """Refuses."""
        del hook
        _refuse("register_save_state_pre_hook", "register_for_checkpointing() what is yours: no rank has whole weights")

    def register_load_state_pre_hook(self, hook: Any) -> NoReturn:
        """Refuses."""
        del hook
        _refuse("register_load_state_pre_hook", "register_for_checkpointing() what is yours: no rank has whole weights")


def _refuse(called: str, instead: str) -> NoReturn:
    raise ValueError(f"{called} was called on a ParAccelerator; give {instead}")
