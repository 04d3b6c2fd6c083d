"""Clipping that is the same on every rank."""

import math
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

from .._dtensor import local_gradients
from .norm import check_order, device_of, held_gradients, total_norm
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
    """Scales gradients down so that their norm over all ranks of a group is `max_norm` at most.

    Args:
        params: As for `grad_norm`.
        max_norm: Above 0.
        group: As for `grad_norm`.
        replicas: As for `grad_norm`.
        norm_type: As for `grad_norm`.
        error_if_nonfinite: Whether a norm that is not finite is an error, which costs a wait for the device. Otherwise
            it spoils the gradients, as in torch.

    Returns:
        The norm before, an fp64 scalar, the same on all ranks of the group.

    Raises:
        ValueError: max_norm is not above 0; and as for `grad_norm`.
        RuntimeError: A norm that is not finite, on all ranks of the group, gradients unchanged.
    """
    check_max_norm(max_norm, "max_norm")
    check_order(norm_type)
    tensors = list(tensors_in(params))
    held = held_gradients(tensors, Ownership(group, replicas))
    norm = total_norm(held, group, device_of(tensors, group), norm_type)
    if error_if_nonfinite and not math.isfinite(norm):
        raise RuntimeError(f"the norm of the gradients is {norm.item()}; look for the layer whose output overflows")
    multiply_([gradient for _, gradient in held], clip_coefficient(norm, max_norm))
    return norm


@torch.no_grad()
def clip_grad_value_(params: Parameters, clip_value: float) -> None:
    """Clips every element of the gradients to -clip_value .. clip_value. No communication.

    Args:
        params: As for `grad_norm`.
        clip_value: Above 0.

    Raises:
        ValueError: Another clip_value.
    """
    check_max_norm(clip_value, "clip_value")
    clamp_(local_gradients(tensors_in(params)), clip_value)


def clip_coefficient(norm: Tensor, max_norm: float) -> Tensor:
    """What gradients of that norm are multiplied with: 1 at most."""
    return (max_norm / norm).clamp(max=1.0)


_SINGLE = {torch.float32, torch.bfloat16, torch.float16}


def multiply_(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiplies in place with a scalar tensor."""
    if factor.is_cpu and factor == 1:  # a look at it is free there
        return
    groups = _group_tensors_by_device_and_dtype([list(gradients)]) if gradients else {}
    for (device, dtype), ((here,), _) in groups.items():
        by = factor.to(device, torch.float64 if dtype == torch.float64 else torch.float32)
        if device.type == "cpu" and dtype in _SINGLE:  # where GradScaler's kernel takes half as long for the same bits
            torch._amp_foreach_non_finite_check_and_unscale_(cast("list[Tensor]", here), torch.zeros(()), by)
        else:
            torch._foreach_mul_(cast("list[Tensor]", here), by)


def clamp_(gradients: Sequence[Tensor], limit: float) -> None:
    """Clips each element in place."""
    if gradients:
        torch._foreach_clamp_min_(list(gradients), -limit)
        torch._foreach_clamp_max_(list(gradients), limit)


def check_max_norm(value: float, name: str) -> None:
    """Raises unless it is a limit."""
    if not value > 0:
        raise ValueError(f"{name} is {value}; give a number above 0, or leave clipping away")
