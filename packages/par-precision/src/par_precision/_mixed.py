"""`mixed`: one call gives a module and its optimizer a precision."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from par_groups import check_owned

from ._checks import ATTRIBUTE, check, check_all, check_cut, is_own, lack_of_layers, recorded
from ._float8 import convert_to_float8_, float8_layers
from ._masters import Masters
from ._optimizer import Clip, MixedOptimizer
from ._policy import Policy
from ._precisions import Precision, precision_of
from ._weights import Own, Rounded, Weights
from .norm.clip import check_max_norm
from .norm.norm import device_of
from .norm.ownership import Ownership, tensors_in
from .rounding.step import StochasticStep
from .scale.scale import DynamicScale
from .scale.scaling import Scaling


@dataclass(frozen=True, kw_only=True)
class MixedOptions:
    """What else can be chosen. Each field may be given to `mixed` as a keyword.

    Args:
        replicas: The ranks on which parameters that say nothing of ranks are copies of each other.
        clip_norm: The norm of all gradients together is brought down to this; None: never.
        clip_value: Each element of the gradients is brought down to this; None: never.
        scale: Of the loss, for fp16: a `DynamicScale`, or a number that stays. None: `DynamicScale()` for fp16.
        max_skipped: So many skipped steps in a row end the run. A scale needs 32 to come down from 2**32 to 1.
        accumulate_fp32: Whether gradients of half-precision weights are added up over microbatches in fp32. Not under
            DDP.
        output_dtype: Of what the module returns in half precision, so that a loss of it is exact; None leaves it.
        bucket: Bytes of fp32 gradients that a step with masters makes at a time. The optimizer steps once each, hooks
            included; one that counts steps by param group, not by parameter, needs one that holds all.
        moments: Of "bf16-sr": torch.bfloat16 for 8 bytes a parameter in all, torch.float32 for 12.
        seed: Of stochastic rounding, the same on all ranks.

    Raises:
        ValueError, TypeError: A value that makes no sense.
    """

    replicas: dist.ProcessGroup | None = None
    clip_norm: float | None = None
    clip_value: float | None = None
    scale: DynamicScale | float | None = None
    max_skipped: int = 50
    accumulate_fp32: bool = False
    output_dtype: torch.dtype | None = torch.float32
    bucket: int = 1 << 28
    moments: torch.dtype = torch.bfloat16
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("clip_norm", self.clip_norm), ("clip_value", self.clip_value)):
            if value is not None:
                check_max_norm(value, name)
        if self.clip_norm is not None and self.clip_value is not None:
            raise ValueError(f"clip_norm={self.clip_norm} and clip_value={self.clip_value}: give one of them")
        if not isinstance(self.scale, DynamicScale | int | float | None):
            raise TypeError(f"scale is a {type(self.scale).__name__}; give a number above 0, or a DynamicScale")
        if isinstance(self.scale, int | float) and not 0 < self.scale < float("inf"):
            raise ValueError(f"scale is {self.scale}; give a number above 0, or a DynamicScale")
        for name, number in (("max_skipped", self.max_skipped), ("bucket", self.bucket)):
            if number < 1:
                raise ValueError(f"{name} is {number}; give 1 or more")
        if self.output_dtype is not None and not getattr(self.output_dtype, "is_floating_point", False):
            raise ValueError(f"output_dtype is {self.output_dtype!r}; give a floating-point torch.dtype, or None")
        StochasticStep(seed=self.seed, moments=self.moments)  # says what is wrong with them


def mixed(
    module: nn.Module,
    optimizer: Optimizer,
    precision: str,
    *,
    group: dist.ProcessGroup | None = None,
    **keywords: Any,
) -> tuple[nn.Module, MixedOptimizer]:
    """Gives a module and its optimizer a precision, in place. Collective over the group.

    The module stays the object that it is, and so do the optimizer's group dicts; only `params` in them may come to
    hold fp32 masters. If they hold fp32 tensors that are not the module's own already, as under par-zero, those are
    the masters.

    Args:
        module: On its device. Plain, of DTensors, under FSDP2, of par-layers, or sharded by par-zero. Where it has no
            forward, as a ModuleDict of an actor and a critic has none, its children's forward runs in the precision.
        optimizer: Of its parameters. `fused=True` spares the host a wait in each step.
        precision: "fp32", "tf32", "bf16" or "fp16" (weights in it, fp32 masters), "bf16-amp" or "fp16-amp" (autocast),
            "bf16-sr" (bf16 weights without masters, rounded stochastically), "fp8" (as "bf16", and linear layers
            multiply float8 numbers).
        group: The ranks among which gradients are cut or differ: those that share the model, and those that share its
            gradients. They agree on norm, scale and skips. None: every rank has all of them, as under DDP.
        keywords: Fields of `MixedOptions`.

    Returns:
        The module (a new one only if it is itself an nn.Linear, under "fp8"), and the optimizer to use from now on.

    Raises:
        ValueError, TypeError, RuntimeError: What cannot be mixed, and what differs between the ranks; on all of them.
    """
    problem: Exception | None = None
    lack = ""
    options, chosen, ownership = MixedOptions(), Precision(), Ownership(group)
    try:
        options, chosen = MixedOptions(**keywords), precision_of(precision)
        ownership = Ownership(group, options.replicas)
        check(module, optimizer, precision, accumulate_fp32=options.accumulate_fp32)
        check_cut(optimizer, ownership)
        lack = lack_of_layers(module, precision)
    except (ValueError, TypeError, RuntimeError) as error:
        problem = error
    check_all(problem, _described(precision, options), lack, group)
    if group is not None:
        check_owned(recorded(module, optimizer), group)
    device = device_of(list(module.parameters()), group)
    scaling = Scaling(_scale(chosen, options), options.max_skipped, device)
    policy = Policy(chosen, device.type, options.output_dtype, takes_gradients=options.accumulate_fp32)
    module, weights = _prepared(module, optimizer, chosen, options, ownership)
    policy.attach(module)
    clip = Clip(norm=options.clip_norm, value=options.clip_value)
    returned = MixedOptimizer(optimizer, weights, scaling, clip=clip, policy=policy, group=group, device=device)
    optimizer.__dict__[ATTRIBUTE] = returned
    return module, returned


def _prepared(
    module: nn.Module, optimizer: Optimizer, precision: Precision, options: MixedOptions, ownership: Ownership
) -> tuple[nn.Module, Weights]:
    """Casts the module, and says what the optimizer steps."""
    foreign = not is_own(module, optimizer)
    if precision.weights is None:
        return module, Own(optimizer, ownership)
    masters = None
    if precision.masters and not foreign:
        held = list(tensors_in(optimizer))
        masters = Masters(
            module, optimizer, ownership, accumulate=options.accumulate_fp32, bucket=options.bucket
        )  # of the numbers before they are rounded
        for parameter, master in zip(held, tensors_in(optimizer), strict=True):
            if master is parameter:
                continue
            parameter.__dict__[ATTRIBUTE] = id(parameter)  # a saved or copied one has another
            if parameter in optimizer.state:  # Adagrad's constructor fills it
                state = optimizer.state.pop(parameter)
                optimizer.state[master] = {k: v.float() if isinstance(v, Tensor) else v for k, v in state.items()}
    if not foreign:
        module.to(precision.weights)
    if precision.float8 and float8_layers(module):
        module = convert_to_float8_(module)
    if masters is not None:
        masters.watch()
        return module, masters
    if precision.rounded:
        names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
        return module, Rounded(
            optimizer, ownership, StochasticStep(seed=options.seed, names=names, moments=options.moments)
        )
    return module, Own(optimizer, ownership)


def _scale(precision: Precision, options: MixedOptions) -> DynamicScale | None:
    if isinstance(options.scale, int | float):
        return DynamicScale.static(float(options.scale))
    return DynamicScale() if options.scale is None and precision.scaled else options.scale


def _described(precision: str, options: MixedOptions) -> str:
    """What all ranks must have alike."""
    scale = options.scale.state_dict() if isinstance(options.scale, DynamicScale) else options.scale
    fields = (options.clip_norm, options.clip_value, options.max_skipped, options.accumulate_fp32, options.moments)
    return repr((precision, scale, *fields, options.seed))
