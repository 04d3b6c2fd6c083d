"""`mixed`: one call gives a module and its optimizer a precision."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from par_groups import check_owned, kept_tensors, original_name

from ._checks import check, check_all, check_cut, is_own, lack_of_layers, recorded
from ._float8 import convert_to_float8_
from ._float8 import float8_layers as layers_of
from ._masters import Masters, MastersHook
from ._optimizer import Clip, MixedOptimizer
from ._policy import Policy
from ._precisions import Precision, precision_of
from ._torch_private import apply_
from ._weights import OwnWeights, RoundedWeights, Weights
from .norm.clip import check_limit
from .norm.norm import device_of
from .norm.ownership import Ownership
from .rounding.step import StochasticStep
from .scale.scale import DynamicScale
from .scale.scaling import Scaling


@dataclass(frozen=True, kw_only=True)
class MasterWeights:
    """Options for fp32 master weights of half-precision parameters.

    Args:
        accumulate: Whether each backward pass adds its gradients in fp32, for 4 more bytes per element. Not under DDP.
            A step drops the sums. `parameter.grad` then holds a placeholder, and `parameter.grad = None` drops its sum.
            Under FSDP2 it holds None, and only the optimizer's `zero_grad` drops sums. Default: False.
        bucket: Size of the fp32 gradients that a step makes at a time, in bytes. The optimizer's `step`, hooks
            included, runs once for each bucket. An optimizer that counts steps by param group instead of by parameter
            needs a bucket that holds all gradients.

    Raises:
        ValueError: The bucket is empty.
    """

    accumulate: bool = False
    bucket: int = 1 << 28

    def __post_init__(self) -> None:
        if self.bucket < 1:
            raise ValueError(f"bucket={self.bucket}: a bucket has at least 1 byte; pass a larger number")


@dataclass(frozen=True, kw_only=True)
class StochasticRounding:
    """Options for rounding the steps of bf16 weights without fp32 masters.

    Args:
        seed: Seed of the random bits, equal on all ranks.
        moments: dtype of the optimizer's moments. With torch.bfloat16, weights, gradients and state take 8 bytes per
            parameter in total; with torch.float32, 12.

    Raises:
        ValueError: The dtype of moments is not supported.
    """

    seed: int = 0
    moments: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        StochasticStep(seed=self.seed, moments=self.moments)  # raises for a dtype that it cannot round


DEFAULT_MASTERS, DEFAULT_ROUNDING = MasterWeights(), StochasticRounding()


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
    masters: MasterWeights = DEFAULT_MASTERS,
    rounding: StochasticRounding = DEFAULT_ROUNDING,
    output_dtype: torch.dtype | None = torch.float32,
    float8_layers: Callable[[str, nn.Linear], bool] | None = None,
) -> tuple[nn.Module, MixedOptimizer]:
    """Apply mixed precision to a module and its optimizer, in place. Collective over the group.

    The module and the optimizer's group dicts stay the same objects; `params` in these dicts may contain fp32 masters
    afterwards. If they contain fp32 tensors that are not the module's parameters, as under par-zero, these tensors are
    the masters.

    Args:
        module: Module on its device: plain, of DTensors, under FSDP2, of par-layers, or sharded by par-zero. If it has
            no forward, like a ModuleDict of an actor and a critic, its children's forward runs in the precision.
        optimizer: Optimizer of the parameters. With `fused=True`, the host does not wait in each step.
        precision: Name of the precision: "fp32", "tf32", "bf16" or "fp16" (weights in this dtype, fp32 masters),
            "bf16-amp" or "fp16-amp" (autocast), "bf16-sr" (bf16 weights without masters, rounded stochastically), "fp8"
            ("bf16" with float8 matmuls in linear layers).
        group: Ranks over which the model or its gradients are sharded, or on which gradients differ. They agree on
            norm, scale and skips. None: every rank has all gradients, as under DDP.
        replicas: Ranks on which parameters without sharding metadata are replicas. None: only this rank has such
            parameters.
        clip_norm: Largest norm of all gradients together. None: no clipping by norm.
        clip_value: Largest absolute value of an element of a gradient. None: no clipping by value.
        scale: Loss scale: a `DynamicScale`, or a constant number. Default: `DynamicScale()` for "fp16" and "fp16-amp",
            and no scale for other precisions.
        masters: Options for fp32 master weights, for precisions with masters.
        rounding: Options for stochastic rounding, for "bf16-sr".
        output_dtype: dtype for half-precision outputs of the module, so that the loss is exact. None: no cast. Default:
            torch.float32.
        float8_layers: Function of a linear layer's name and the layer that selects layers for float8 matmuls, for
            "fp8". Default: all layers with sizes that are multiples of 16, except for the head of a language model; see
            `convert_to_float8_`.

    Returns:
        The module (a new module only for an nn.Linear under "fp8"), and the optimizer to use from now on.

    Raises:
        ValueError, TypeError, RuntimeError: An argument is not supported, or differs between the ranks; raised on all
            ranks.
    """
    problem: Exception | None = None
    lack = ""
    # These stand in if a check below raises: the error must reach the collective that all ranks take part in.
    chosen, ownership, loss_scale = Precision(), Ownership(group), None
    try:
        if clip_norm is not None and clip_value is not None:
            raise ValueError(f"clip_norm={clip_norm} and clip_value={clip_value}: give one of them")
        for name, value in (("clip_norm", clip_norm), ("clip_value", clip_value)):
            if value is not None:
                check_limit(value, name)
        if output_dtype is not None and not getattr(output_dtype, "is_floating_point", False):
            raise ValueError(f"output_dtype is {output_dtype!r}; give a floating-point torch.dtype, or None")
        chosen, ownership = precision_of(precision), Ownership(group, replicas)
        loss_scale = _scale_of(chosen, scale)
        check(module, optimizer, precision, accumulates=masters.accumulate)
        check_cut(optimizer, ownership)
        lack = lack_of_layers(module, precision, float8_layers)
    except (ValueError, TypeError, RuntimeError) as error:  # raised below, by all ranks
        problem = error
    # What all ranks must be given alike; a rank that differs is named before anything is changed.
    alike = (precision, loss_scale and loss_scale.state_dict(), clip_norm, clip_value, masters.accumulate, rounding)
    check_all(problem, repr(alike), lack, group)
    if group is not None:
        # An element that no rank counts, or that two count, would make the norm wrong without an error.
        check_owned(recorded(module, optimizer), group)
    device = device_of(list(module.parameters()), group)
    scaling = Scaling(loss_scale, device)
    module, weights = _prepared(
        module, optimizer, chosen, ownership, masters=masters, rounding=rounding, float8_layers=float8_layers
    )
    policy = Policy(
        chosen,
        device.type,
        output_dtype,
        takes_gradients=masters.accumulate,
        before=MastersHook(weights, "publish_written") if isinstance(weights, Masters) else None,
        at_backward=MastersHook(weights, "take_stand_ins")
        if isinstance(weights, Masters) and masters.accumulate
        else None,
    )
    policy.attach(module)
    clip = Clip(norm=clip_norm, value=clip_value)
    return module, MixedOptimizer(optimizer, weights, scaling, clip=clip, policy=policy, group=group, device=device)


def _cast_(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point parameters and buffers in place, except for `kept_tensors`."""
    kept = {id(tensor) for tensor in kept_tensors(module, dtype).values()}

    def cast(tensor: Tensor) -> Tensor:
        if id(tensor) in kept:  # a buffer stays the same object; a parameter takes over the data of what is returned
            return tensor.detach() if isinstance(tensor, nn.Parameter) else tensor
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    apply_(module, cast)


def _scale_of(precision: Precision, scale: DynamicScale | float | None) -> DynamicScale | None:
    """Return the loss scale that the user's number, scale or None stands for.

    Raises:
        TypeError: It is none of them.
        ValueError: The number is not positive and finite.
    """
    if scale is None:
        return DynamicScale() if precision.scaled else None
    if isinstance(scale, DynamicScale):
        return scale
    if not isinstance(scale, int | float):
        raise TypeError(f"scale is a {type(scale).__name__}; give a number above 0, or a DynamicScale")
    if not 0 < scale < float("inf"):
        raise ValueError(f"scale is {scale}; give a number above 0, or a DynamicScale")
    return DynamicScale.static(float(scale))


def _prepared(
    module: nn.Module,
    optimizer: Optimizer,
    precision: Precision,
    ownership: Ownership,
    *,
    masters: MasterWeights,
    rounding: StochasticRounding,
    float8_layers: Callable[[str, nn.Linear], bool] | None,
) -> tuple[nn.Module, Weights]:
    """Cast the module, and return it with what the optimizer steps."""
    if precision.weights is None:
        return module, OwnWeights(optimizer, ownership)
    own = is_own(module, optimizer)
    copies = None
    if precision.masters and own:  # copied before the cast, so that the masters keep all digits
        copies = Masters(module, optimizer, ownership, accumulate=masters.accumulate, bucket=masters.bucket)
    if own:
        _cast_(module, precision.weights)
    # Converted after the cast: a Float8Linear shares the parameters of the layer that it replaces.
    if precision.float8 and layers_of(module, float8_layers):
        module = convert_to_float8_(module, float8_layers)
    if copies is not None:
        copies.watch(module)
        return module, copies
    if precision.rounded:
        names: dict[Tensor, str] = {tensor: original_name(name) for name, tensor in module.named_parameters()}
        step = StochasticStep(seed=rounding.seed, names=names, moments=rounding.moments)
        return module, RoundedWeights(optimizer, ownership, step)
    return module, OwnWeights(optimizer, ownership)
