"""The holders of a range of a tensor's elements.

This is pure arithmetic on many boxes at once, because a plan needs the holders of every block.
"""

import itertools
import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from par_groups import Boxes, GlobalTensor, Rectangle, bytes_of

from .coverage import Shape, is_covered, row_major

_RECENT = 64  # stretches of one cut that are kept: tensors that are cut alike lie in one file
_FEW = 16  # boxes that are sooner looked at one by one than as tensors


class Cut:
    """The boxes of a tensor without their holders. Many tensors have the same boxes.

    Args:
        boxes: The boxes.
        shape: The shape of the tensors.
    """

    def __init__(self, boxes: Boxes, shape: Shape) -> None:
        self.starts, self.sizes, self.shape = boxes.starts, boxes.sizes, shape
        self.is_one_box = len(boxes) == 1 and tuple(boxes.sizes[0].tolist()) == shape
        self.strides = row_major(shape)
        self._corners: dict[int, tuple[list[int], list[int]]] = {}
        self._recent: dict[tuple[int, int], Stretch] = {}

    def within(self, start: int, stop: int) -> "Stretch":
        """Return the boxes that overlap the row-major elements from `start` to `stop` - 1."""
        found = self._recent.get((start, stop))
        if found is None:
            low, high = 0, 1
            if not self.is_one_box:  # outside of low .. high - 1 no box reaches into them
                # Boxes are sorted by first element. The running maximum of their last elements ascends too, so both
                # ends are found by bisection.
                low = bisect_left(self._reached, start)
                high = max(low, bisect_left(self._first, stop))
            if len(self._recent) >= _RECENT:
                self._recent.clear()
            rectangles = tuple(_rectangles(self.shape, start, stop))
            found = Stretch(cut=self, low=low, high=high, count=stop - start, rectangles=rectangles)
            self._recent[start, stop] = found  # which another thread of the same plan may clear at any moment
        return found

    @cached_property
    def are_runs(self) -> bool:
        """Whether each box is a run of elements that follow each other."""
        return self.is_one_box or bool((self._ends[1] - self._ends[0] + 1 == self.sizes.prod(1)).all())

    @cached_property
    def run(self) -> int:
        """Elements that follow each other in every box, wherever one looks: less only at the ends of a stretch.

        0 where boxes overlap or leave elements out, so that the runs do not make up the tensor.
        """
        numel = math.prod(self.shape)
        # With gaps or overlaps no run length holds for every position.
        if int(self.sizes.prod(1).sum()) != numel or not is_covered(self.shape, self.starts, self.sizes):
            return 0
        if self.are_runs:
            return numel // max(len(self.starts), 1)  # some may be shorter: it is their number in a block that counts
        is_cut = (self.sizes != torch.tensor(self.shape, device="cpu")).any(0).tolist()
        # Dims behind the last sharded one are full in every box, so a run is at least one index range of that dim.
        last = max(dim for dim, cut in enumerate(is_cut) if cut)
        return int(self.sizes[:, last].min()) * self.strides[last]

    def ends(self, box: int) -> tuple[int, int]:
        """Return the first element of a box, in row-major order, and its last element plus one."""
        return self._first[box], int(self._ends[1][box]) + 1

    @cached_property
    def slices(self) -> list[int]:
        """Edges of the boxes on the first dim, as row-major elements.

        Between two edges, all rows have the same boxes.
        """
        if not self.shape:
            return []
        edges = torch.cat([self.starts[:, 0], self.stops[:, 0]]).unique() * self.strides[0]
        found: list[int] = edges.tolist()
        return found

    @cached_property
    def stops(self) -> torch.Tensor:
        """int64 (boxes, dims): one past the last index of each box."""
        return self.starts + self.sizes

    def corners(self, box: int) -> tuple[list[int], list[int]]:
        """Return the first index of a box on each dim, and the last index plus one."""
        if box not in self._corners:
            self._corners[box] = self.starts[box].tolist(), self.stops[box].tolist()
        return self._corners[box]

    @cached_property
    def _ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The first and the last element of each box, in row-major order."""
        strides = torch.tensor(self.strides, dtype=torch.int64, device="cpu")
        return (self.starts * strides).sum(1), ((self.stops - 1) * strides).sum(1)

    @cached_property
    def _first(self) -> "array[int]":
        """The first element of each box; they ascend."""
        return array("q", self._ends[0].tolist())

    @cached_property
    def _reached(self) -> "array[int]":
        """The last element of each box and of all boxes before it; they ascend."""
        return array("q", self._ends[1].cummax(0).values.tolist())


@dataclass(frozen=True, kw_only=True)
class Stretch:
    """A range of the row-major elements of a tensor, and the boxes that reach into it.

    Args:
        cut: Sharding of the tensor.
        low: First box that may overlap the stretch.
        high: Last box that may overlap it, plus one.
        count: Number of elements of the stretch.
        rectangles: Rectangles that make up the range.
    """

    cut: Cut
    low: int
    high: int
    count: int
    rectangles: tuple[Rectangle, ...]

    @cached_property
    def boxes(self) -> dict[int, int]:
        """Number of elements of the stretch in each box that has any, by number of the box."""
        if self.cut.is_one_box:
            return {0: self.count}
        # Tensor operations cost microseconds each, so a loop is faster for a few boxes.
        if self.high - self.low > _FEW:
            counts = self._elements.tolist()
        else:
            counts = [sum(math.prod(size) for _, size in self.parts(box)) for box in range(self.low, self.high)]
        return {self.low + i: count for i, count in enumerate(counts) if count}

    def parts(self, box: int) -> Iterator[Rectangle]:
        """Yield the rectangles of the stretch that lie in a box."""
        if self.cut.is_one_box:
            yield from self.rectangles
            return
        first, stop = self.cut.corners(box)
        for start, size in self.rectangles:
            low = tuple(map(max, start, first))
            common = tuple(min(a + n, end) - b for a, n, end, b in zip(start, size, stop, low, strict=True))
            if min(common, default=1) > 0:
                yield low, common

    def runs(self, limit: int | None = None) -> list[tuple[int, int, int]] | None:
        """Return the stretch as runs of elements in one box each: first element, last plus one, and box, in order.

        Args:
            limit: The most runs; None: any number.

        Returns:
            The runs; None where they are too many.
        """
        if limit not in self._runs:
            self._runs[limit] = self._found_runs(limit)
        return self._runs[limit]

    def _found_runs(self, limit: int | None) -> list[tuple[int, int, int]] | None:
        found: list[tuple[int, int, int]] = []
        for box in self.boxes:
            for start, size in self.parts(box):
                for first, count in _runs(start, size, self.cut.shape, self.cut.strides):
                    if len(found) == limit:
                        return None
                    found.append((first, first + count, box))
        return sorted(found)

    @cached_property
    def _runs(self) -> dict[int | None, list[tuple[int, int, int]] | None]:
        """Cached runs, by limit."""
        return {}

    @cached_property
    def _elements(self) -> torch.Tensor:
        """int64: how many elements of the stretch each of boxes low .. high - 1 has."""
        boxes = slice(self.low, self.high)
        corners = torch.tensor(self.rectangles, dtype=torch.int64, device="cpu")  # (rectangles, start and size, dims)
        begin, size = corners.unsqueeze(2).unbind(1)
        edges = torch.minimum(self.cut.stops[boxes], begin + size)
        edges.sub_(torch.maximum(self.cut.starts[boxes], begin))
        return edges.clamp_(min=0).prod(-1).sum(0)


class BoxIndex:
    """An index of the boxes of identically sharded tensors, which finds the holders of a range of elements.

    Each property is computed on first use. Most tensors are one box that all ranks hold, and need few of them.

    Args:
        boxes: The boxes and their holders.
        cut: The same boxes without their holders.
    """

    def __init__(self, boxes: Boxes, cut: Cut) -> None:
        self.boxes, self.cut = boxes, cut
        self._held: dict[int, frozenset[int]] = {}
        self._holders: dict[int, list[int]] = {}

    def within(self, start: int, stop: int) -> "BoxOverlap":
        """Return the boxes that overlap the row-major elements from `start` to `stop` - 1."""
        return BoxOverlap(self, self.cut.within(start, stop))

    def held_by(self, rank: int) -> frozenset[int]:
        """Return the numbers of a rank's boxes."""
        if rank not in self._held:
            self._held[rank] = frozenset(self.box_of_holder[self.boxes.ranks == rank].tolist())
        return self._held[rank]

    def holders(self, box: int) -> list[int]:
        """Return the ranks that hold a box, ascending."""
        if box not in self._holders:
            self._holders[box] = self.boxes.holders(box).tolist()
        return self._holders[box]

    @cached_property
    def box_of_holder(self) -> torch.Tensor:
        """int64, as long as `boxes.ranks`: which box each of those ranks holds."""
        counts = self.boxes.first.diff()
        return torch.arange(len(counts), device="cpu").repeat_interleave(counts)


def indexes_of(tensors: Iterable[GlobalTensor]) -> list[BoxIndex]:
    """Return the boxes of each tensor.

    Tensors of one shape that are sharded identically share a `Cut`; with identical holders they share the index as
    well.
    """
    cuts: dict[tuple[Shape, int, bytes], Cut] = {}
    made: dict[tuple[int, Shape], BoxIndex] = {}
    found = []
    for tensor in tensors:
        boxes, shape = tensor.boxes, tensor.shape
        # Layers that are sharded alike share their `Boxes`, so most tensors need no look at the content.
        if (id(boxes), shape) not in made:
            content = b"".join(bytes(bytes_of(part.contiguous())) for part in (boxes.starts, boxes.sizes))
            # The geometry is shared even if the holders differ, as for the layers of different pipeline stages.
            cut = cuts.setdefault((shape, len(boxes), content), Cut(boxes, shape))
            made[id(boxes), shape] = BoxIndex(boxes, cut)
        found.append(made[id(boxes), shape])
    return found


@dataclass(frozen=True, slots=True)
class BoxOverlap:
    """A stretch of a tensor, and who holds the boxes that reach into it.

    Args:
        index: The boxes of the tensor and their holders.
        stretch: The stretch.
    """

    index: BoxIndex
    stretch: Stretch

    @property
    def boxes(self) -> dict[int, int]:
        """Number of elements of the stretch in each box that has any, by number of the box."""
        return self.stretch.boxes

    def boxes_of(self, rank: int) -> list[int]:
        """Return the boxes with elements of the stretch that a rank holds."""
        return [box for box in sorted(self.index.held_by(rank)) if box in self.boxes]


def _rectangles(shape: Shape, start: int, stop: int) -> Iterator[Rectangle]:
    """Yield the rectangles of a row-major range: the end of a first row, full rows, and the beginning of a last row.

    If rows have several dims, both ends are split into rectangles in the same way.
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


def _runs(start: Shape, size: Shape, shape: Shape, strides: Shape) -> Iterator[tuple[int, int]]:
    """Yield the contiguous row-major runs of a rectangle, each as the index of its first element and its length."""
    dim, count = len(shape), 1  # dims from `dim` on are one run of elements; those before are gone through one by one
    while dim and (dim == len(shape) or size[dim] == shape[dim]):
        dim -= 1
        count *= size[dim]
    first = sum(i * stride for i, stride in zip(start, strides, strict=True))
    for index in itertools.product(*map(range, size[:dim])):
        yield first + sum(i * stride for i, stride in zip(index, strides, strict=False)), count


def _in_row(shape: Shape, number: int, start: int, stop: int) -> Iterator[Rectangle]:
    """Yield the rectangles of a range within one row, with the row's number in front."""
    begin = number * math.prod(shape[1:])
    for at, size in _rectangles(shape[1:], start - begin, stop - begin):
        yield (number, *at), (1, *size)
