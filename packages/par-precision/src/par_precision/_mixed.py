"""`mixed`: one call gives a module and its optimizer a precision."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from par_groups import check_owned

from ._checks import check, check_all, check_cut, is_own, lack_of_layers, recorded
from ._float8 import convert_to_float8_
from ._float8 import float8_layers as layers_of
from ._kept import cast_
from ._masters import Masters
from ._optimizer import Clip, MixedOptimizer
from ._policy import Policy
from ._precisions import Precision, precision_of
from ._weights import OwnWeights, RoundedWeights, Weights
from .norm.clip import check_limit
from .norm.norm import device_of
from .norm.ownership import Ownership
from .rounding.step import StochasticStep
from .scale.scale import DynamicScale
from .scale.scaling import Scaling


def mixed(
    module: nn.Module,
    optimizer: Optimizer,
    precision: str,
    *,
    group: dist.ProcessGroup | None = None,
    replicas: dist.ProcessGroup | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    scale: DynamicScale | float | None = None,
    max_skipped: int = 50,
    accumulate_fp32: bool = False,
    output_dtype: torch.dtype | None = torch.float32,
    bucket: int = 1 << 28,
    moments: torch.dtype = torch.bfloat16,
    seed: int = 0,
    float8_layers: Callable[[str, nn.Linear], bool] | None = None,
) -> tuple[nn.Module, MixedOptimizer]:
    """Gives a module and its optimizer a precision, in place. Collective over the group.

    The module stays the object that it is, and so do the optimizer's group dicts; only `params` in them may come to
    hold fp32 masters. If they hold fp32 tensors that are not the module's own already, as under par-zero, those are
    the masters.

    Args:
        module: On its device. Plain, of DTensors, under FSDP2, of par-layers, or sharded by par-zero. If it has no
            forward, as a ModuleDict of an actor and a critic has none, its children's forward runs in the precision.
        optimizer: The optimizer of its parameters. `fused=True` spares the host a wait in each step.
        precision: "fp32", "tf32", "bf16" or "fp16" (weights in it, fp32 masters), "bf16-amp" or "fp16-amp" (autocast),
            "bf16-sr" (bf16 weights without masters, rounded stochastically), "fp8" (as "bf16", and linear layers
            multiply float8 numbers).
        group: The ranks among which gradients are cut or differ: those that share the model, and those that share its
            gradients. They agree on norm, scale and skips. None: every rank has all of them, as under DDP.
        replicas: The ranks on which parameters that say nothing of ranks are copies of each other. None: such
            parameters are each rank's own.
        clip_norm: Largest norm that all gradients together keep. None: they are not clipped by norm.
        clip_value: Largest absolute value that an element of a gradient keeps. None: no element is clipped.
        scale: The loss scale: a `DynamicScale`, or a number that stays. None: `DynamicScale()` for "fp16" and
            "fp16-amp", and no scale for others.
        max_skipped: Number of skipped steps in a row that ends the run. A scale needs 32 to come down from 2**32 to 1.
        accumulate_fp32: Whether gradients of half-precision weights are added up over microbatches in fp32. Not under
            DDP.
        output_dtype: dtype of what the module returns in half precision, so that a loss of it is exact. None leaves it.
        bucket: Bytes of fp32 gradients that a step with masters makes at a time. The optimizer's `step`, hooks
            included, runs once for each bucket; one that counts steps by param group, not by parameter, needs a bucket
            that holds all.
        moments: dtype of the moments under "bf16-sr": torch.bfloat16 makes 8 bytes a parameter in all, torch.float32
            makes 12.
        seed: Seed of stochastic rounding, the same on all ranks.
        float8_layers: Under "fp8": called with the name of a linear layer and the layer, says whether it multiplies
            float8 numbers. None: all do whose sizes are multiples of 16, but for the head of a language model, see
            `convert_to_float8_`.

    Returns:
        The module (a new one only if it is itself an nn.Linear, under "fp8"), and the optimizer to use from now on.

    Raises:
        ValueError, TypeError, RuntimeError: What cannot be mixed, and what differs between the ranks; on all of them.
    """
    problem: Exception | None = None
    lack = ""
    options, chosen, ownership = MixedOptions(), Precision(), Ownership(group)
    try:
        options = MixedOptions(
            replicas=replicas,
            clip_norm=clip_norm,
            clip_value=clip_value,
            scale=scale,
            max_skipped=max_skipped,
            accumulate_fp32=accumulate_fp32,
            output_dtype=output_dtype,
            bucket=bucket,
            moments=moments,
            seed=seed,
            float8_layers=float8_layers,
        )
        chosen, ownership = precision_of(precision), Ownership(group, replicas)
        check(module, optimizer, precision, accumulate_fp32=accumulate_fp32)
        check_cut(optimizer, ownership)
        lack = lack_of_layers(module, precision, float8_layers)
    except (ValueError, TypeError, RuntimeError) as error:  # raised below, by all ranks
        problem = error
    check_all(problem, _described(precision, options), lack, group)
    if group is not None:
        check_owned(recorded(module, optimizer), group)
    device = device_of(list(module.parameters()), group)
    scaling = Scaling(_scale(chosen, options), max_skipped, device)
    policy = Policy(chosen, device.type, output_dtype, takes_gradients=accumulate_fp32)
    module, weights = _prepared(module, optimizer, chosen, options, ownership)
    policy.attach(module)
    clip = Clip(norm=clip_norm, value=clip_value)
    return module, MixedOptimizer(optimizer, weights, scaling, clip=clip, policy=policy, group=group, device=device)


@dataclass(frozen=True, kw_only=True)
class MixedOptions:
    """The options of `mixed` that are not its objects, frozen and checked. Each field is the keyword of that name.

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
    float8_layers: Callable[[str, nn.Linear], bool] | None = None

    def __post_init__(self) -> None:
        for name, value in (("clip_norm", self.clip_norm), ("clip_value", self.clip_value)):
            if value is not None:
                check_limit(value, name)
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


def _scale(precision: Precision, options: MixedOptions) -> DynamicScale | None:
    if isinstance(options.scale, int | float):
        return DynamicScale.static(float(options.scale))
    return DynamicScale() if options.scale is None and precision.scaled else options.scale


def _prepared(
    module: nn.Module, optimizer: Optimizer, precision: Precision, options: MixedOptions, ownership: Ownership
) -> tuple[nn.Module, Weights]:
    """Casts the module, and says what the optimizer steps."""
    if precision.weights is None:
        return module, OwnWeights(optimizer, ownership)
    own = is_own(module, optimizer)
    masters = None
    if precision.masters and own:  # made of the numbers before they are rounded
        masters = Masters(module, optimizer, ownership, accumulate=options.accumulate_fp32, bucket=options.bucket)
    if own:
        cast_(module, precision.weights)
    if precision.float8 and layers_of(module, options.float8_layers):
        module = convert_to_float8_(module, options.float8_layers)
    if masters is not None:
        masters.watch(module)
        return module, masters
    if precision.rounded:
        names: dict[Tensor, str] = {parameter: name for name, parameter in module.named_parameters()}
        rounding = StochasticStep(seed=options.seed, names=names, moments=options.moments)
        return module, RoundedWeights(optimizer, ownership, rounding)
    return module, OwnWeights(optimizer, ownership)


def _described(precision: str, options: MixedOptions) -> str:
    """What all ranks must have alike."""
    scale = options.scale.state_dict() if isinstance(options.scale, DynamicScale) else options.scale
    fields = (options.clip_norm, options.clip_value, options.max_skipped, options.accumulate_fp32, options.moments)
    return repr((precision, scale, *fields, options.seed))
