"""Whether the boxes that ranks hold cover every element of a tensor."""

import itertools
import math
import operator
from collections.abc import Iterable, Sequence

import torch

from par_groups import GlobalTensor

from .claims import name_of

Shape = tuple[int, ...]

_CELLS = 1 << 20  # number of grid cells that are checked at once; a finer grid is checked slab by slab


def check_covered(tensors: Iterable[GlobalTensor]) -> None:
    """Check that some rank holds every element of every tensor.

    Raises:
        ValueError: A tensor has gaps. The message names such tensors.
    """
    covered: dict[tuple[Shape, int], bool] = {}  # layers of one shape usually share their boxes, and one check suffices
    gaps = []
    for tensor in tensors:
        boxes = tensor.boxes
        geometry = tensor.shape, id(boxes)
        if geometry not in covered:
            covered[geometry] = is_covered(tensor.shape, boxes.starts, boxes.sizes)
        if not covered[geometry]:
            gaps.append(tensor)
    if gaps:
        named = ", ".join(
            f"{name_of(gap.key)!r} {gap.shape} ({int(gap.boxes.sizes.prod(1).sum())} held)" for gap in gaps[:5]
        )
        raise ValueError(
            f"no rank of the group holds some elements of {named}{' and others' if len(gaps) > 5 else ''}; pass the "
            "group of all ranks that hold the model, or correct the records or `layout`"
        )


def is_covered(shape: Sequence[int], starts: torch.Tensor, sizes: torch.Tensor) -> bool:
    """Return whether the boxes, of which there may be thousands, cover every element of a tensor.

    Args:
        shape: The tensor's shape.
        starts: int64 (boxes, dims).
        sizes: int64 (boxes, dims).
    """
    numel = math.prod(shape)
    if numel == 0:
        return True
    # Fewer elements than the tensor has cannot cover it, which answers most faulty cases at once.
    if len(starts) == 0 or int(sizes.prod(1).sum()) < numel:
        return False
    if len(shape) == 0:
        return True
    strides = torch.tensor(row_major(shape), device="cpu")
    first = (starts * strides).sum(1)
    last = ((starts + sizes - 1) * strides).sum(1)
    # A box is contiguous in row-major order if the distance of its ends equals its number of elements.
    if not bool((last - first + 1 == sizes.prod(1)).all()):
        return _is_grid_covered(shape, starts, sizes)
    # Each box is one run of elements. Sorted by their first element, the runs cover the tensor if no gap is between
    # two.
    order = first.argsort()
    first, reached = first[order], last[order].cummax(0).values
    return int(first[0]) == 0 and int(reached[-1]) == numel - 1 and bool((first[1:] <= reached[:-1] + 1).all())


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of a given shape, in elements."""
    steps = list(itertools.accumulate(reversed(shape), operator.mul, initial=1))
    return tuple(reversed(steps[:-1]))


def _is_grid_covered(shape: Sequence[int], starts: torch.Tensor, sizes: torch.Tensor) -> bool:
    """Return whether boxes of any form cover a tensor: some box must contain each cell of the grid of their edges."""
    stops = starts + sizes
    ends = torch.tensor([(0, n) for n in shape], device="cpu")
    edges = [torch.cat([starts[:, d], stops[:, d], ends[d]]).unique() for d in range(len(shape))]
    cells = [len(edge) - 1 for edge in edges]
    if math.prod(cells) > _CELLS and len(shape) > 1:
        for edge in edges[0][:-1].tolist():  # within a slab of the first dim, the other dims decide
            inside = (starts[:, 0] <= edge) & (stops[:, 0] > edge)
            if not is_covered(shape[1:], starts[inside, 1:], sizes[inside, 1:]):
                return False
        return True
    low = [torch.searchsorted(edge, starts[:, d].contiguous()) for d, edge in enumerate(edges)]
    high = [torch.searchsorted(edge, stops[:, d].contiguous()) for d, edge in enumerate(edges)]
    count = torch.zeros([n + 1 for n in cells], dtype=torch.int32, device="cpu")
    # Each box adds +1 and -1 at its corners. The cumulative sum along every dim then counts the boxes over each cell,
    # without a loop over the boxes.
    for corner in itertools.product((0, 1), repeat=len(shape)):
        index = tuple(high[d] if end else low[d] for d, end in enumerate(corner))
        sign = torch.full((len(starts),), (-1) ** sum(corner), dtype=torch.int32, device="cpu")
        count.index_put_(index, sign, accumulate=True)
    for d in range(len(shape)):
        count = count.cumsum(d)
    return bool((count[tuple(slice(n) for n in cells)] > 0).all())
