"""Sums over many tensors in fp64: the square of 1e30 overflows fp32, and fp32 sums lose digits."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_BLOCK = 1 << 17
"""Elements that are converted to fp64 at a time on a CPU, so that they stay in cache."""
_TOGETHER = 1 << 16
"""Elements of small tensors that are stacked for that."""


def sum_of_powers(tensors: Sequence[Tensor], power: float, device: torch.device) -> Tensor:
    """The sum of |x| ** power over all elements.

    Args:
        tensors: Floating-point tensors on any devices.
        power: Above 0, finite.
        device: Of the result.

    Returns:
        An fp64 scalar.
    """
    if power == 2 and all(each.is_cpu for each in tensors):
        return _stacked(list(_squares_on_cpu(tensors)), device).sum()
    return _stacked(_norms(tensors, power), device).pow(power).sum()  # few operations: on a GPU each is a launch


def largest(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The largest |x|, as an fp64 scalar. A NaN counts as infinity: not every backend's MAX brings it over."""
    highest = _stacked(_norms([each for each in tensors if each.numel()], math.inf), device)
    return torch.nan_to_num(highest, nan=math.inf, posinf=math.inf).amax() if highest.numel() else highest.sum()


def _norms(tensors: Sequence[Tensor], order: float) -> list[Tensor]:
    return list(torch._foreach_norm(list(tensors), order, dtype=torch.float64)) if tensors else []


def _stacked(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    """Scalars as a vector; an empty one if there are none."""
    moved = [part if part.device == device else part.to(device) for part in parts]
    return torch.stack(moved) if moved else torch.zeros(0, dtype=torch.float64, device=device)


def _squares_on_cpu(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Partial sums of squares. torch's norm with another dtype converts element by element there, and is 10x slower."""
    alike: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        alike[tensor.shape].append(tensor)
    elements = sum(shape.numel() * len(each) for shape, each in alike.items())
    scratch = torch.empty(min(_BLOCK, elements), dtype=torch.float64)
    for shape, each in alike.items():
        for flat in _flattened(shape.numel(), each):
            wide = scratch[: flat.numel()]
            wide.copy_(flat)
            yield wide.dot(wide)


def _flattened(numel: int, alike: list[Tensor]) -> Iterator[Tensor]:
    """The elements of tensors of one shape, flat, as many as fit into a cache at a time."""
    if numel > _TOGETHER:
        for tensor in alike:
            yield from tensor.reshape(-1).split(_BLOCK)
        return
    count = _TOGETHER // max(numel, 1)
    for first in range(0, len(alike), count):  # to stack them is one call, and each needs no view of its own
        yield torch.stack(alike[first : first + count]).view(-1)
