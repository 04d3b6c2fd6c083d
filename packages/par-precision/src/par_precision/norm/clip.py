"""Clipping that is the same on every rank."""

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from .._dtensor import local_gradients
from .._torch_private import (
    foreach_clamp_max_,
    foreach_clamp_min_,
    foreach_mul_,
    foreach_unscale_,
    grouped_by_device_and_dtype,
)
from .norm import as_real, checked_order, counted_gradients, device_of, total_norm
from .ownership import Ownership, Parameters, tensors_in


@torch.no_grad()
def clip_grad_norm_(
    params: Parameters,
    max_norm: float,
    group: dist.ProcessGroup | None,
    *,
    replicas: dist.ProcessGroup | None = None,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale gradients down so that their norm over all ranks of a group is at most `max_norm`.

    The tensors' sharding metadata determines which rank counts which element; see `grad_norm`. Communication: one
    all-reduce of one number over the group.

    Args:
        params: Parameters, a module or an optimizer. Under par-zero an optimizer, since that is where gradients live.
        max_norm: Largest norm that gradients keep, above 0.
        group: The ranks that sum: those that share the model and its gradients. None: this rank alone.
        replicas: The ranks on which tensors that say nothing of ranks are copies of each other.
        norm_type: Order of the norm, above 0; math.inf for the largest absolute value.
        error_if_nonfinite: Whether a norm that is not finite is an error, which costs a wait for the device. Otherwise
            such a norm spoils the gradients, as in torch.

    Returns:
        The norm before clipping, an fp64 scalar, the same on all ranks of the group.

    Raises:
        ValueError: A max_norm or norm_type that is not above 0; or tensors that are cut over ranks, and no group.
        TypeError: A sparse gradient.
        RuntimeError: With error_if_nonfinite a norm that is not finite, on all ranks of the group. Gradients are then
            unchanged.
    """
    check_limit(max_norm, "max_norm")
    norm_type = checked_order(norm_type)
    tensors = list(tensors_in(params))
    gradients = counted_gradients(tensors, Ownership(group, replicas))
    norm = total_norm(gradients, group, device_of(tensors, group), norm_type)
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(f"the norm of the gradients is {norm.item()}; look for the layer whose output overflows")
    multiply_([gradient for _, gradient in gradients], clip_coefficient(norm, max_norm))
    return norm


@torch.no_grad()
def clip_grad_value_(params: Parameters, clip_value: float) -> None:
    """Clips every element of the gradients to -clip_value .. clip_value. No communication.

    Args:
        params: Parameters, a module or an optimizer. Under par-zero an optimizer, since that is where gradients live.
        clip_value: Largest absolute value that an element keeps, above 0. The real and the imaginary part of a complex
            number are clipped separately.

    Raises:
        ValueError: A clip_value that is not above 0.
    """
    check_limit(clip_value, "clip_value")
    clamp_(local_gradients(tensors_in(params)), clip_value)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """Return the factor, at most 1, that reduces gradients of this norm to the norm `max_norm` or less."""
    # A norm of 0 gives infinity, which becomes 1 here. A norm that is NaN stays NaN, and spoils the gradients as in
    # torch.
    return (max_norm / norm).clamp(max=1.0)


_SINGLE = {torch.float32, torch.bfloat16, torch.float16}


def multiply_(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies gradients of any devices and dtypes, in place, with a scalar tensor."""
    if factor.is_cpu and factor == 1:  # on a GPU this look would wait
        return
    groups = grouped_by_device_and_dtype([[as_real(gradient) for gradient in gradients]]) if gradients else {}
    for (device, dtype), ((alike,), _) in groups.items():
        by = factor.to(device, torch.float64 if dtype == torch.float64 else torch.float32)
        if device.type == "cpu" and dtype in _SINGLE:  # the quicker of the two there, with the same bits
            foreach_unscale_(cast("list[Tensor]", alike), torch.zeros(()), by)
        else:
            foreach_mul_(cast("list[Tensor]", alike), by)


def clamp_(gradients: Sequence[Tensor], limit: float) -> None:
    """Clips each element of gradients to -limit .. limit, in place."""
    if gradients:
        parts = [as_real(gradient) for gradient in gradients]
        foreach_clamp_min_(parts, -limit)
        foreach_clamp_max_(parts, limit)


def check_limit(value: float, name: str) -> None:
    """Raise ValueError unless a number is a limit for gradients."""
    if not value > 0:
        raise ValueError(f"{name} is {value}; give a number above 0, or leave clipping away")
