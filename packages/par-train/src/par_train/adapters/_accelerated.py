"""The parts of a `ParAccelerator`: its optimizer and lr scheduler, its collectives, and its unsupported methods."""

import math
import os
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.optim import Optimizer

from par_precision import DeferredClipping, MixedOptimizer

from ..strategy.strategy import Strategy

REFUSED = {
    "deepspeed_plugin": "strategy=dict(zero=...), and memory= for what leaves the device",
    "deepspeed_plugins": "strategy=dict(zero=...), and an accelerator for each model",
    "fsdp_plugin": "strategy=dict(zero=3)",
    "megatron_lm_plugin": "strategy=dict(parallel=dict(tensor=..., pipeline=...))",
    "torch_tp_plugin": "strategy=dict(parallel=dict(tensor=dict(size=..., mode='1d')))",
    "parallelism_config": "strategy=dict(parallel=...)",
    "dynamo_backend": "a plugin of the strategy that compiles modules",
    "dynamo_plugin": "a plugin of the strategy that compiles modules",
    "kwargs_handlers": "strategy=dict(precision=dict(precision=..., scale=...)); find_unused_parameters needs nothing",
}
"""Arguments of `Accelerator` that a strategy replaces, and the option to use instead."""

_LAUNCHED = {
    "ACCELERATE_USE_DEEPSPEED": REFUSED["deepspeed_plugin"],
    "ACCELERATE_USE_FSDP": REFUSED["fsdp_plugin"],
    "ACCELERATE_USE_MEGATRON_LM": REFUSED["megatron_lm_plugin"],
    "ACCELERATE_USE_PARALLELISM_CONFIG": REFUSED["parallelism_config"],
}
"""Variables by which `accelerate launch` sets the same arguments."""


def check_keywords(accelerator: Any) -> None:
    """Remove the arguments that a strategy replaces, and check that neither they nor variables set anything.

    Raises:
        ValueError: One of them sets something; the message names the option to use instead.
    """
    for name, instead in REFUSED.items():
        if accelerator.pop(name, None) is not None:
            raise ValueError(f"ParAccelerator was given {name}; leave it out and give {instead}")
    for name, instead in _LAUNCHED.items():
        if os.environ.get(name, "false").lower() in ("true", "1"):
            raise ValueError(f"the environment has {name}; launch without that and give ParAccelerator {instead}")
    if getattr(accelerator.get("dataloader_config"), "dispatch_batches", None):
        raise ValueError(
            "dispatch_batches=True has rank 0 read for all; leave it out: data ranks read their own samples"
        )


class ParOptimizer(AcceleratedOptimizer):  # type: ignore[misc]  # accelerate has no types
    """The optimizer of a strategy as an optimizer of Accelerate, which does not step while gradients accumulate.

    Args:
        optimizer: The optimizer that `Strategy.initialize` returned.
        trained: The ids of the parameters that the optimizer trains and that are on this rank.
        clip_norm: The `clip_norm` of the strategy.
    """

    def __init__(self, optimizer: Optimizer, trained: set[int], clip_norm: float | None) -> None:
        super().__init__(optimizer, device_placement=False)
        self.trained = trained
        self.clipping = DeferredClipping(optimizer, clip_norm, self.accelerator_state.device)

    @property
    def scaling(self) -> Any:
        """The state of the loss scale, which can be saved; None without a loss scale."""
        optimizer = self.optimizer
        return optimizer.scaling if isinstance(optimizer, MixedOptimizer) and optimizer.scaling.scale else None

    @property
    def step_was_skipped(self) -> bool:
        """Whether gradients overflowed in the last step. Without a loss scale it does not wait for the device."""
        return self.scaling is not None and self.optimizer.last is not None and bool(self.optimizer.last.skipped)


class ParScheduler(AcceleratedScheduler):  # type: ignore[misc]  # accelerate has no types
    """An lr scheduler as a scheduler of Accelerate, which counts the steps of all data ranks.

    Args:
        scheduler: The scheduler of the user.
        optimizers: The prepared optimizers.
        step_with_optimizer: Whether the scheduler steps only if the optimizers step.
        times: Number of steps of the scheduler for each step of the optimizers.
    """

    def __init__(self, scheduler: Any, optimizers: Any, *, step_with_optimizer: bool, times: int) -> None:
        # With this flag Accelerate steps once for each call, and `step` below counts the data ranks. Accelerate itself
        # would count all ranks, also those that share a replica.
        super().__init__(scheduler, optimizers, step_with_optimizer, split_batches=True)
        self._times = times

    def step(self, *args: Any, **keywords: Any) -> None:
        """Step once for each data rank, since each has had a batch."""
        steps = self._times if self.step_with_optimizer and self.gradient_state.sync_gradients else 1
        total = getattr(self.scheduler, "total_steps", math.inf)
        for _ in range(steps):
            if not self.step_with_optimizer or self.scheduler._step_count <= total:  # as Accelerate ends a OneCycle
                super().step(*args, **keywords)


class OverDataRanks:
    """The collectives of a `ParAccelerator`. They run over data ranks, so that the ranks of a replica count once."""

    strategy: Strategy
    gradient_state: Any
    flag_tensor: Tensor | None  # Accelerate's own, which `set_trigger` sets

    @property
    def num_processes(self) -> int:
        """The number of data ranks."""
        return self.strategy.groups.size(self.strategy.data_axes)

    @property
    def process_index(self) -> int:
        """The index of this rank among the data ranks."""
        return self.strategy.groups.rank(self.strategy.data_axes)

    def gather(self, tensor: Any) -> Any:
        """Concatenate the tensors of all data ranks along dim 0, as `Accelerator.gather`."""
        return recursively_apply(self._gathered, tensor, error_on_other_type=True)

    def _gathered(self, tensor: Tensor) -> Tensor:
        if self.num_processes == 1:
            return tensor
        mine = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach().contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.num_processes)]
        dist.all_gather(parts, mine, group=self.strategy.groups[self.strategy.data_axes])
        return torch.cat(parts)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather as `Accelerator.gather_for_metrics`, over the data ranks."""
        try:
            # Accelerate decides in this way whether it gathers tensors or objects.
            recursively_apply(lambda tensor: tensor, input_data, error_on_other_type=True)
        except TypeError:
            use_gather_object = True
        if not use_gather_object:
            return super().gather_for_metrics(input_data)  # type: ignore[misc]
        parts: list[Any] = [None] * self.num_processes
        dist.all_gather_object(parts, input_data, group=self.strategy.groups[self.strategy.data_axes])
        # The last batch of an epoch repeats samples until all data ranks have as many; the remainder is without them.
        every, state = [each for part in parts for each in part], self.gradient_state
        return every[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else every

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return sums or means over the data ranks, as `Accelerator.reduce`."""

        def reduced(one: Tensor) -> Tensor:
            total = one.detach().clone()
            dist.all_reduce(total, group=self.strategy.groups[self.strategy.data_axes])
            return total / self.num_processes * scale if reduction == "mean" else total * scale

        return tensor if reduction == "none" else recursively_apply(reduced, tensor, error_on_other_type=True)

    def check_trigger(self) -> bool:
        """Return whether any rank has called `set_trigger`, identically on all ranks. Collective over the world."""
        flag = torch.zeros((), dtype=torch.int64, device=self.strategy.device)
        if self.flag_tensor is not None:
            flag += self.flag_tensor
        if self.strategy.environment.world_size > 1:
            dist.all_reduce(flag)
        self.flag_tensor = None
        return bool(flag)


def _refused(name: str, instead: str) -> Callable[..., NoReturn]:
    """Return a method that raises ValueError, because a strategy has another way for what it does."""

    def method(self: object, *args: object, **keywords: object) -> NoReturn:
        del self, args, keywords
        raise ValueError(f"{name} was called on a ParAccelerator; give {instead}")

    return method


_TO_CHECKPOINTING = "register_for_checkpointing() what is yours: no rank has whole weights"


class Refusing:
    """The methods of an `Accelerator` that a strategy does not support. Each raises ValueError with the alternative."""

    unscale_gradients = _refused("unscale_gradients", "clip_grad_norm_ the largest norm: step() unscales, then clips")
    join_uneven_inputs = _refused(
        "join_uneven_inputs", "the data loader drop_last=True, or DataLoaderConfiguration even_batches=True"
    )
    split_between_processes = _refused(
        "split_between_processes", "prepare() a data loader, which shares samples out over the data ranks"
    )
    get_state_dict = _refused("get_state_dict", "save_model() a folder: no rank need have the whole model")
    register_save_state_pre_hook = _refused("register_save_state_pre_hook", _TO_CHECKPOINTING)
    register_load_state_pre_hook = _refused("register_load_state_pre_hook", _TO_CHECKPOINTING)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> NoReturn:
        """Raise ValueError."""
        instead = f"ParAccelerator strategy=dict(precision=dict(clip_value={clip_value})), which step() heeds"
        _refused("clip_grad_value_", instead)(self, parameters)
