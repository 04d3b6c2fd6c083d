"""Sums over many tensors in fp64: the square of 1e30 overflows fp32, and fp32 sums lose digits."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .._torch_private import foreach_norm

_BLOCK = 1 << 17
"""Number of elements that a CPU converts to fp64 at a time, so that they stay in its cache."""
_TOGETHER = 1 << 16
"""Number of elements up to which tensors of one shape are stacked and converted together."""


def sum_of_powers(tensors: Sequence[Tensor], power: float, device: torch.device) -> Tensor:
    """Return the sum of |x| ** power over all elements.

    Args:
        tensors: Floating-point tensors on any devices.
        power: The exponent, above 0 and finite.
        device: Device of the result.

    Returns:
        An fp64 scalar.
    """
    if power == 2 and all(tensor.is_cpu for tensor in tensors):
        return _stacked(list(_squares_on_cpu(tensors)), device).sum()
    return _stacked(_norms(tensors, power), device).pow(power).sum()  # few operations: on a GPU each is a launch


def largest(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the largest |x| as an fp64 scalar. A NaN counts as infinity, because some backends' MAX drops NaNs."""
    maxima = _stacked(_norms([tensor for tensor in tensors if tensor.numel()], math.inf), device)
    # A maximum over nothing raises an error, but a rank without gradients must still bring a 0 to the all-reduce.
    return torch.nan_to_num(maxima, nan=math.inf, posinf=math.inf).amax() if maxima.numel() else maxima.sum()


def _norms(tensors: Sequence[Tensor], order: float) -> list[Tensor]:
    """Return the norm of each tensor in fp64, on its own device."""
    found: dict[int, Tensor] = {}
    # A kernel takes tensors of one device, and an optimizer that is offloaded in part has gradients on two.
    for device in dict.fromkeys(tensor.device for tensor in tensors):
        numbers = [number for number, tensor in enumerate(tensors) if tensor.device == device]
        norms = foreach_norm([tensors[number] for number in numbers], order, dtype=torch.float64)
        found.update(zip(numbers, norms, strict=True))
    return [found[number] for number in range(len(tensors))]


def _stacked(scalars: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return fp64 scalars as a vector on one device; an empty vector for no scalars."""
    moved = [scalar if scalar.device == device else scalar.to(device) for scalar in scalars]
    return torch.stack(moved) if moved else torch.zeros(0, dtype=torch.float64, device=device)


def _squares_on_cpu(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield partial sums of squares. torch's norm in another dtype converts element by element, and is 10x slower."""
    by_shape: defaultdict[torch.Size, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_shape[tensor.shape].append(tensor)
    elements = sum(shape.numel() * len(alike) for shape, alike in by_shape.items())
    # One scratch buffer serves all tensors, so that it stays in the cache.
    scratch = torch.empty(min(_BLOCK, elements), dtype=torch.float64)
    for shape, alike in by_shape.items():
        for flat in _flattened(shape.numel(), alike):
            wide = scratch[: flat.numel()]
            wide.copy_(flat)
            yield wide.dot(wide)


def _flattened(numel: int, alike: list[Tensor]) -> Iterator[Tensor]:
    """Yield the elements of tensors of one shape, flat, as many at a time as fit into a cache."""
    if numel > _TOGETHER:
        for tensor in alike:
            yield from tensor.reshape(-1).split(_BLOCK)
        return
    count = _TOGETHER // max(numel, 1)
    for first in range(0, len(alike), count):  # one call stacks many, where each would need a view of its own
        yield torch.stack(alike[first : first + count]).view(-1)
