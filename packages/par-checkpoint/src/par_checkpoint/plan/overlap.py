"""Who holds how much of a stretch of a tensor. Pure arithmetic on many boxes at once: a plan asks it of every block."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from .claims import Held
from .coverage import row_major

Shape = tuple[int, ...]
Rectangle = tuple[Shape, Shape]
"""Start and size."""

_FEW = 16  # boxes that are sooner looked at one by one than as tensors


class Holders:
    """One tensor's holders, ready to be asked; what is asked of many tensors that are held as a whole costs little.

    Args:
        held: The tensor.
        rank: The rank whose boxes are wanted again and again.
    """

    def __init__(self, held: Held, rank: int) -> None:
        self.held = held
        self.whole = len(held) == 1 and tuple(held.sizes[0].tolist()) == held.shape
        self.strides = row_major(held.shape)
        self._rank = rank
        self._corners: dict[int, tuple[list[int], list[int]]] = {}

    @cached_property
    def stops(self) -> torch.Tensor:
        """One past the last index of each box."""
        return self.held.starts + self.held.sizes

    @cached_property
    def box(self) -> torch.Tensor:
        """Which box each of `held.ranks` holds."""
        counts = (stop - start for start, stop in pairwise(self.held.first))
        boxes = [box for box, count in enumerate(counts) for _ in range(count)]
        return torch.tensor(boxes, dtype=torch.int64, device="cpu")

    @cached_property
    def mine(self) -> list[int]:
        """The boxes of the rank."""
        found: list[int] = self.box[self.held.ranks == self._rank].tolist()
        return found

    @cached_property
    def flat(self) -> bool:
        """Whether every box is one run of elements."""
        return self.whole or bool((self._ends[1] - self._ends[0] + 1 == self.held.sizes.prod(1)).all())

    @cached_property
    def _ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The first and the last element of each box, in row-major order."""
        strides = torch.tensor(self.strides, dtype=torch.int64, device="cpu")
        return (self.held.starts * strides).sum(1), ((self.stops - 1) * strides).sum(1)

    @cached_property
    def _first(self) -> list[int]:
        """The first element of each box."""
        found: list[int] = self._ends[0].tolist()
        return found

    @cached_property
    def _reached(self) -> list[int]:
        """The last element of each box and all before it."""
        found: list[int] = self._ends[1].cummax(0).values.tolist()
        return found

    def within(self, start: int, stop: int) -> "Overlap":
        """Who holds how much of the row-major elements start .. stop - 1."""
        low, high = 0, 1
        if not self.whole:  # outside of low .. high - 1 no box reaches into them
            low = bisect_left(self._reached, start)
            high = max(low, bisect_left(self._first, stop))
        rectangles = tuple(_rectangles(self.held.shape, start, stop))
        return Overlap(holders=self, low=low, high=high, count=stop - start, rectangles=rectangles)

    def corners(self, box: int) -> tuple[list[int], list[int]]:
        """The first index of a box on each dim, and one past its last."""
        if box not in self._corners:
            self._corners[box] = self.held.starts[box].tolist(), self.stops[box].tolist()
        return self._corners[box]


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """A stretch of a tensor and the boxes that reach into it.

    Args:
        holders: The tensor's.
        low: The first box that may reach into it.
        high: One past the last.
        count: Elements of the stretch.
        rectangles: What it is made of.
    """

    holders: Holders
    low: int
    high: int
    count: int
    rectangles: tuple[Rectangle, ...]

    @property
    def held(self) -> Held:
        """The tensor."""
        return self.holders.held

    @cached_property
    def boxes(self) -> dict[int, int]:
        """Elements of the stretch by box, those that have some."""
        if self.holders.whole:
            return {0: self.count}
        if self.high - self.low > _FEW:
            counts = self._elements.tolist()
        else:
            counts = [sum(math.prod(size) for _, size in self.parts(box)) for box in range(self.low, self.high)]
        return {self.low + i: count for i, count in enumerate(counts) if count}

    @cached_property
    def ranks(self) -> torch.Tensor:
        """All holders of boxes low .. high - 1."""
        return self.held.ranks[self.held.first[self.low] : self.held.first[self.high]]

    @cached_property
    def weights(self) -> torch.Tensor:
        """Bytes that each of `ranks` holds."""
        return self._elements.index_select(0, self._box) * self.held.dtype.itemsize

    @property
    def mine(self) -> list[int]:
        """The boxes that may have elements of the stretch and are this rank's."""
        return [box for box in self.holders.mine if self.low <= box < self.high]

    def boxes_of(self, rank: int) -> set[int]:
        """The boxes with elements of the stretch that a rank holds."""
        return self.boxes.keys() & {self.low + i for i in self._box[self.ranks == rank].tolist()}

    def ranks_with_some(self) -> list[int]:
        """All ranks that hold elements of the stretch, box by box."""
        return [rank for box in self.boxes for rank in self.held.holders(box).tolist()]

    def parts(self, box: int) -> Iterator[Rectangle]:
        """The rectangles of the stretch within a box."""
        if self.holders.whole:
            yield from self.rectangles
            return
        first, stop = self.holders.corners(box)
        for start, size in self.rectangles:
            low = tuple(map(max, start, first))
            common = tuple(min(a + n, end) - b for a, n, end, b in zip(start, size, stop, low, strict=True))
            if min(common, default=1) > 0:
                yield low, common

    @cached_property
    def _box(self) -> torch.Tensor:
        """Which box each of `ranks` holds, counted from `low`."""
        return self.holders.box[self.held.first[self.low] : self.held.first[self.high]] - self.low

    @cached_property
    def _elements(self) -> torch.Tensor:
        """Elements of the stretch in each of boxes low .. high - 1."""
        if self.holders.whole:
            return torch.tensor([self.count], device="cpu")
        run = slice(self.low, self.high)
        return _common(self.held.starts[run], self.holders.stops[run], self.rectangles)


def _rectangles(shape: Shape, start: int, stop: int) -> Iterator[Rectangle]:
    """A row-major range: the end of a first row, whole rows, and the beginning of a last one; rows likewise."""
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
    begin = number * math.prod(shape[1:])
    for at, size in _rectangles(shape[1:], start - begin, stop - begin):
        yield (number, *at), (1, *size)


def _common(starts: torch.Tensor, stops: torch.Tensor, rectangles: Sequence[Rectangle]) -> torch.Tensor:
    """How many elements each box has in common with the rectangles."""
    corners = torch.tensor(rectangles, dtype=torch.int64, device="cpu")  # (rectangles, start and size, dims)
    begin, size = corners.unsqueeze(2).unbind(1)
    edges = torch.minimum(stops, begin + size).sub_(torch.maximum(starts, begin))
    return edges.clamp_(min=0).prod(-1).sum(0)
