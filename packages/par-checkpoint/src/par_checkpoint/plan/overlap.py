"""Who holds how much of a stretch of a tensor. Pure arithmetic on many boxes at once: a plan asks it of every block."""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from .claims import GlobalTensor, row_major

Shape = tuple[int, ...]
Rectangle = tuple[Shape, Shape]
"""Start and size of a rectangle of a tensor."""

_FEW = 16  # boxes that are sooner looked at one by one than as tensors


class BoxIndex:
    """The boxes of one tensor, ready to be asked who holds how much of a stretch of it.

    Everything is computed when it is first asked for: most tensors are one box that all ranks hold, and cost little.

    Args:
        tensor: The tensor.
        rank: The rank whose own boxes are wanted again and again.
    """

    def __init__(self, tensor: GlobalTensor, rank: int) -> None:
        self.tensor = tensor
        self.is_one_box = len(tensor) == 1 and tuple(tensor.sizes[0].tolist()) == tensor.shape
        self.strides = row_major(tensor.shape)
        self._rank = rank
        self._corners: dict[int, tuple[list[int], list[int]]] = {}

    def within(self, start: int, stop: int) -> "Overlap":
        """The boxes that reach into the row-major elements start .. stop - 1."""
        low, high = 0, 1
        if not self.is_one_box:  # outside of low .. high - 1 no box reaches into them
            low = bisect_left(self._reached, start)
            high = max(low, bisect_left(self._first, stop))
        rectangles = tuple(_rectangles(self.tensor.shape, start, stop))
        return Overlap(index=self, low=low, high=high, count=stop - start, rectangles=rectangles)

    @cached_property
    def are_runs(self) -> bool:
        """Whether every box is one run of row-major elements."""
        return self.is_one_box or bool((self._ends[1] - self._ends[0] + 1 == self.tensor.sizes.prod(1)).all())

    @cached_property
    def mine(self) -> list[int]:
        """The numbers of this rank's boxes."""
        found: list[int] = self.box_of_holder[self.tensor.ranks == self._rank].tolist()
        return found

    @cached_property
    def box_of_holder(self) -> torch.Tensor:
        """int64, as long as `tensor.ranks`: which box each of those ranks holds."""
        counts = (stop - start for start, stop in pairwise(self.tensor.first))
        boxes = [box for box, count in enumerate(counts) for _ in range(count)]
        return torch.tensor(boxes, dtype=torch.int64, device="cpu")

    @cached_property
    def stops(self) -> torch.Tensor:
        """int64 (boxes, dims): one past the last index of each box."""
        return self.tensor.starts + self.tensor.sizes

    def corners(self, box: int) -> tuple[list[int], list[int]]:
        """The first index of a box on each dim, and one past its last."""
        if box not in self._corners:
            self._corners[box] = self.tensor.starts[box].tolist(), self.stops[box].tolist()
        return self._corners[box]

    @cached_property
    def _ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The first and the last element of each box, in row-major order."""
        strides = torch.tensor(self.strides, dtype=torch.int64, device="cpu")
        return (self.tensor.starts * strides).sum(1), ((self.stops - 1) * strides).sum(1)

    @cached_property
    def _first(self) -> list[int]:
        """The first element of each box; they ascend."""
        found: list[int] = self._ends[0].tolist()
        return found

    @cached_property
    def _reached(self) -> list[int]:
        """The last element of each box and of all boxes before it; they ascend."""
        found: list[int] = self._ends[1].cummax(0).values.tolist()
        return found


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """A stretch of a tensor, a range of its row-major elements, and the boxes that reach into it.

    Args:
        index: The boxes of the tensor.
        low: The first box that may reach into the stretch.
        high: One past the last box that may.
        count: Elements of the stretch.
        rectangles: What the stretch is made of.
    """

    index: BoxIndex
    low: int
    high: int
    count: int
    rectangles: tuple[Rectangle, ...]

    @property
    def tensor(self) -> GlobalTensor:
        """The tensor."""
        return self.index.tensor

    @cached_property
    def boxes(self) -> dict[int, int]:
        """By number of a box: how many elements of the stretch it has, if any."""
        if self.index.is_one_box:
            return {0: self.count}
        if self.high - self.low > _FEW:
            counts = self._elements.tolist()
        else:
            counts = [sum(math.prod(size) for _, size in self.parts(box)) for box in range(self.low, self.high)]
        return {self.low + i: count for i, count in enumerate(counts) if count}

    @property
    def mine(self) -> list[int]:
        """This rank's boxes that may have elements of the stretch."""
        return [box for box in self.index.mine if self.low <= box < self.high]

    def parts(self, box: int) -> Iterator[Rectangle]:
        """The rectangles of the stretch that lie in a box."""
        if self.index.is_one_box:
            yield from self.rectangles
            return
        first, stop = self.index.corners(box)
        for start, size in self.rectangles:
            low = tuple(map(max, start, first))
            common = tuple(min(a + n, end) - b for a, n, end, b in zip(start, size, stop, low, strict=True))
            if min(common, default=1) > 0:
                yield low, common

    @cached_property
    def ranks(self) -> torch.Tensor:
        """int64: the holders of boxes low .. high - 1, box by box; a rank is there once for each of its boxes."""
        return self.tensor.ranks[self.tensor.first[self.low] : self.tensor.first[self.high]]

    @cached_property
    def weights(self) -> torch.Tensor:
        """int64, as long as `ranks`: bytes of the stretch in that box."""
        return self._elements.index_select(0, self._box_of_rank) * self.tensor.dtype.itemsize

    def boxes_of(self, rank: int) -> set[int]:
        """The boxes with elements of the stretch that a rank holds."""
        return self.boxes.keys() & {self.low + i for i in self._box_of_rank[self.ranks == rank].tolist()}

    def ranks_with_some(self) -> list[int]:
        """All ranks that hold elements of the stretch, box by box."""
        return [rank for box in self.boxes for rank in self.tensor.holders(box).tolist()]

    @cached_property
    def _box_of_rank(self) -> torch.Tensor:
        """Which box each of `ranks` holds, counted from `low`."""
        return self.index.box_of_holder[self.tensor.first[self.low] : self.tensor.first[self.high]] - self.low

    @cached_property
    def _elements(self) -> torch.Tensor:
        """int64: how many elements of the stretch each of boxes low .. high - 1 has."""
        if self.index.is_one_box:
            return torch.tensor([self.count], device="cpu")
        boxes = slice(self.low, self.high)
        corners = torch.tensor(self.rectangles, dtype=torch.int64, device="cpu")  # (rectangles, start and size, dims)
        begin, size = corners.unsqueeze(2).unbind(1)
        edges = torch.minimum(self.index.stops[boxes], begin + size)
        edges.sub_(torch.maximum(self.tensor.starts[boxes], begin))
        return edges.clamp_(min=0).prod(-1).sum(0)


def _rectangles(shape: Shape, start: int, stop: int) -> Iterator[Rectangle]:
    """The rectangles of a row-major range: the end of a first row, whole rows, and the beginning of a last one.

    Where rows have dims themselves, the two ends are cut into rectangles in the same way.
    """
    if len(shape) <= 1:
        yield (start,) * len(shape), (stop - start,) * len(shape)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows first .. last - 1
    if first > last:
        yield from _in_row(shape, last, start, stop)
        return
    if start < first * row:
        yield from _in_row(shape, first - 1, start, first * row)
    if first < last:
        yield (first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])
    if last * row < stop:
        yield from _in_row(shape, last, last * row, stop)


def _in_row(shape: Shape, number: int, start: int, stop: int) -> Iterator[Rectangle]:
    """The rectangles of a range that lies in one row, with the row's number in front."""
    begin = number * math.prod(shape[1:])
    for at, size in _rectangles(shape[1:], start - begin, stop - begin):
        yield (number, *at), (1, *size)
