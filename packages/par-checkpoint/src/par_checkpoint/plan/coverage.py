"""Whether boxes cover a whole tensor. Pure arithmetic on all boxes at once: there may be thousands."""

import itertools
import math
import operator
from collections.abc import Sequence

import torch

_CELLS = 1 << 20  # of a grid; more are looked at slab by slab


def is_covered(shape: Sequence[int], starts: torch.Tensor, sizes: torch.Tensor) -> bool:
    """Whether every element of a tensor lies in one of the boxes at least.

    Args:
        shape: Of the tensor.
        starts: int64 (boxes, dims).
        sizes: int64 (boxes, dims).
    """
    numel = math.prod(shape)
    if numel == 0:
        return True
    if len(starts) == 0 or int(sizes.prod(1).sum()) < numel:
        return False
    if len(shape) == 0:
        return True
    strides = torch.tensor(row_major(shape), device="cpu")
    first = (starts * strides).sum(1)
    last = ((starts + sizes - 1) * strides).sum(1)
    if bool((last - first + 1 == sizes.prod(1)).all()):
        return _no_gap(first, last, numel)
    return _grid_covered(shape, starts, sizes)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor of that shape, in elements."""
    steps = list(itertools.accumulate(reversed(shape), operator.mul, initial=1))
    return tuple(reversed(steps[:-1]))


def _no_gap(first: torch.Tensor, last: torch.Tensor, numel: int) -> bool:
    """Whether flat ranges, ends included, cover 0 .. numel - 1."""
    order = first.argsort()
    first, reached = first[order], last[order].cummax(0).values
    return int(first[0]) == 0 and int(reached[-1]) == numel - 1 and bool((first[1:] <= reached[:-1] + 1).all())


def _grid_covered(shape: Sequence[int], starts: torch.Tensor, sizes: torch.Tensor) -> bool:
    """The same for any boxes: their edges cut the tensor into a grid of cells, each of which must lie in a box."""
    stops = starts + sizes
    ends = torch.tensor([(0, n) for n in shape], device="cpu")
    edges = [torch.cat([starts[:, d], stops[:, d], ends[d]]).unique() for d in range(len(shape))]
    cells = [len(each) - 1 for each in edges]
    if math.prod(cells) > _CELLS and len(shape) > 1:
        return _slabs_covered(shape, starts, sizes, edges[0])
    low = [torch.searchsorted(each, starts[:, d].contiguous()) for d, each in enumerate(edges)]
    high = [torch.searchsorted(each, stops[:, d].contiguous()) for d, each in enumerate(edges)]
    count = torch.zeros([n + 1 for n in cells], dtype=torch.int32, device="cpu")
    for corner in itertools.product((0, 1), repeat=len(shape)):  # +1 where a box begins, -1 where it has ended
        index = tuple(high[d] if end else low[d] for d, end in enumerate(corner))
        sign = torch.full((len(starts),), (-1) ** sum(corner), dtype=torch.int32, device="cpu")
        count.index_put_(index, sign, accumulate=True)
    for d in range(len(shape)):
        count = count.cumsum(d)
    return bool((count[tuple(slice(n) for n in cells)] > 0).all())


def _slabs_covered(shape: Sequence[int], starts: torch.Tensor, sizes: torch.Tensor, edges: torch.Tensor) -> bool:
    """Slab by slab of the first dim: within one, the other dims decide."""
    stops = starts[:, 0] + sizes[:, 0]
    for edge in edges[:-1].tolist():
        inside = (starts[:, 0] <= edge) & (stops > edge)
        if not is_covered(shape[1:], starts[inside, 1:], sizes[inside, 1:]):
            return False
    return True
