"""Who holds how much of a stretch of a tensor. Pure arithmetic on many boxes at once: a plan asks it of every block."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from ._claims import Held
from ._coverage import row_major

Shape = tuple[int, ...]
Rectangle = tuple[Shape, Shape]
"""Start and size."""


class Holders:
    """One tensor's holders, ready to be asked.

    Args:
        held: The tensor.
        rank: The rank whose boxes are wanted again and again.
    """

    def __init__(self, held: Held, rank: int) -> None:
        self.held = held
        counts = torch.tensor(held.first).diff()
        self._stops = held.starts + held.sizes
        self._box = torch.arange(len(held)).repeat_interleave(counts)
        self._mine = self._box[held.ranks == rank].tolist()
        strides = torch.tensor(row_major(held.shape) if len(held) else (0,) * len(held.shape), dtype=torch.int64)
        self._first = (held.starts * strides).sum(1).tolist()  # of each box, in row-major order
        self._reached = ((self._stops - 1) * strides).sum(1).cummax(0).values.tolist()  # by it and all before it
        self._whole = len(held) == 1 and held.sizes[0].tolist() == list(held.shape)

    def within(self, start: int, stop: int) -> "Overlap":
        """Who holds how much of the row-major elements start .. stop - 1."""
        held = self.held
        low = bisect_left(self._reached, start)  # outside of low .. high - 1 no box reaches into them
        high = max(low, bisect_left(self._first, stop))
        rectangles = tuple(_rectangles(held.shape, start, stop))
        if self._whole:
            elements = torch.tensor([stop - start])
        else:
            elements = _common(held.starts[low:high], self._stops[low:high], rectangles)
        holders = slice(held.first[low], held.first[high])
        return Overlap(
            held=held,
            rectangles=rectangles,
            low=low,
            elements=elements,
            ranks=held.ranks[holders],
            box=self._box[holders] - low,
            candidates=[box for box in self._mine if low <= box < high],
        )


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """A stretch of a tensor and the boxes that may reach into it, a run of all its boxes.

    Args:
        held: The tensor.
        rectangles: What the stretch is made of.
        low: The first box of the run.
        elements: How many each of its boxes holds.
        ranks: All holders of all of them.
        box: Which of the boxes each of these holds, counted from `low`.
        candidates: The boxes of one rank, this one, that may reach into it.
    """

    held: Held
    rectangles: tuple[Rectangle, ...]
    low: int
    elements: torch.Tensor
    ranks: torch.Tensor
    box: torch.Tensor
    candidates: list[int]

    @cached_property
    def boxes(self) -> dict[int, int]:
        """Elements by box, those that do reach into it."""
        return {self.low + i: count for i, count in enumerate(self.elements.tolist()) if count}

    @cached_property
    def mine(self) -> list[int]:
        """The boxes of this rank with elements of the stretch."""
        return [box for box in self.candidates if box in self.boxes]

    @cached_property
    def weights(self) -> torch.Tensor:
        """Bytes that each of `ranks` holds."""
        return self.elements.index_select(0, self.box) * self.held.dtype.itemsize

    def holders(self) -> list[int]:
        """All that hold elements of the stretch."""
        return self.ranks.masked_select(self.weights > 0).tolist()

    def boxes_of(self, rank: int) -> set[int]:
        """The boxes with elements of the stretch that a rank holds."""
        return self.boxes.keys() & {self.low + i for i in self.box[self.ranks == rank].tolist()}

    def parts(self, box: int) -> Iterator[Rectangle]:
        """The rectangles of the stretch within a box."""
        box_start, box_size = self.held.starts[box].tolist(), self.held.sizes[box].tolist()
        for start, size in self.rectangles:
            low = tuple(map(max, start, box_start))
            high = tuple(min(a + n, b + m) for a, n, b, m in zip(start, size, box_start, box_size, strict=True))
            if all(a < b for a, b in zip(low, high, strict=True)):
                yield low, tuple(b - a for a, b in zip(low, high, strict=True))


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
    corners = torch.tensor(rectangles, dtype=torch.int64)[:, :, None]  # (rectangles, start and size, 1, dims)
    begin, size = corners.unbind(1)
    edges = torch.minimum(stops, begin + size).sub_(torch.maximum(starts, begin))
    return edges.clamp_(min=0).prod(-1).sum(0)
