"""Boxes by which a local tensor is cut out of a named global tensor. Pure arithmetic.

This record is the contract between packages. Layers attach it, ZeRO cuts it further, and a checkpoint, a gradient norm
or a clipping function reads nothing else about parallelism.
"""

import itertools
import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..attributes import PART, SHARDING

if TYPE_CHECKING:
    import torch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A rectangle of the global tensor, and where it lies in the local, contiguous tensor.

    Global element `start + i` is local element `offset + sum(i * stride)`, counted row-major, for every index i below
    `size`.

    Args:
        start: First global index on each dim.
        size: Extent on each dim.
        offset: The local element of the first corner, counted in row-major elements of the local tensor.
        stride: The number of local elements between neighbours on each dim.
        copies: The global ranks that hold this very box, this rank among them.
        sum_over: The axes over which this box's gradient is still a partial sum after backward.
    """

    start: Shape
    size: Shape
    offset: int
    stride: Shape
    copies: Sequence[int]
    sum_over: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.start) == len(self.size) == len(self.stride):
            raise ValueError(f"start {self.start}, size {self.size} and stride {self.stride} differ in their dims")
        # A rank that holds nothing has no box, so an empty box is always a mistake; it would have no last element.
        if min((*self.start, self.offset, *self.stride), default=0) < 0 or min(self.size, default=1) < 1:
            raise ValueError(f"box {self.start} + {self.size} at {self.offset}, {self.stride}: negative, or empty")

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.size)

    @property
    def last(self) -> int:
        """The highest local element that it covers."""
        return self.offset + sum((size - 1) * stride for size, stride in zip(self.size, self.stride, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        """The rectangle as an index: `whole[box.slices]` is what `box.of(local)` holds."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.size, strict=True))

    def owns(self, rank: int, ranks: Container[int]) -> bool:
        """Return whether `rank` is the lowest of the box's copies among `ranks`.

        Ownership depends on the group: if each member of `ranks` counts the elements that it owns, every element that
        the group covers is counted once.

        Args:
            rank: Global rank.
            ranks: Global ranks that sum; a set or a range needs O(1) per copy.
        """
        return rank == min((copy for copy in self.copies if copy in ranks), default=-1)

    def of(self, local: "torch.Tensor") -> "torch.Tensor":
        """Return this box as a view of the local tensor, of shape `size`.

        Raises:
            ValueError: The local tensor is too small, or it is not contiguous and the box is only a part of it.
        """
        local = part_of(local)
        if self.last >= local.numel():
            raise ValueError(f"box {self} ends at element {self.last}, but the local tensor has {local.numel()}")
        # A box that is the complete tensor needs no contiguous memory: its strides count elements in row-major order,
        # whatever the memory format.
        if self.offset == 0 and tuple(local.shape) == self.size and self.stride == row_major(self.size):
            return local.view(self.size)
        if not local.is_contiguous():
            raise ValueError(f"a box of a tensor with strides {local.stride()} needs it contiguous: call .contiguous()")
        # `as_strided` counts from the beginning of the storage, which the local tensor may share with other tensors.
        return local.as_strided(self.size, self.stride, local.storage_offset() + self.offset)


@dataclass(frozen=True)
class Sharding:
    """The global shape of a tensor, and the boxes of it that this rank holds.

    Args:
        shape: The shape of the whole tensor.
        boxes: This rank's share; empty if it holds none of it. Local elements outside all boxes are padding.

    Raises:
        ValueError: A box that leaves the shape.
    """

    shape: Shape
    boxes: tuple[Box, ...]

    def __post_init__(self) -> None:
        for box in self.boxes:
            if len(box.start) != len(self.shape):
                raise ValueError(
                    f"a box with {len(box.start)} dims cannot lie in a tensor of shape {self.shape}; give a start and "
                    "a size for each of its dims"
                )
            if any(start + size > length for start, size, length in zip(box.start, box.size, self.shape, strict=True)):
                raise ValueError(
                    f"box {box.start} + {box.size} leaves the tensor's shape {self.shape}; give boxes within"
                )

    @property
    def numel(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def local_numel(self) -> int:
        """Elements that this rank holds, without padding."""
        return sum(box.numel for box in self.boxes)

    def owned(self, rank: int, ranks: Container[int]) -> int:
        """Return the number of elements that `rank` counts when `ranks` sum. See `Box.owns`."""
        return sum(box.numel for box in self.boxes if box.owns(rank, ranks))


def part_of(tensor: "torch.Tensor") -> "torch.Tensor":
    """Return this rank's shard of a tensor that raises an error on a read, such as a freed parameter of ZeRO.

    Any other tensor is returned unchanged.
    """
    part = PART.of(tensor)
    return tensor if part is None else part


def set_sharding(tensor: "torch.Tensor", sharding: Sharding) -> None:
    """Set the sharding metadata of a tensor. It belongs to this tensor object: a copy or a view has none.

    Args:
        tensor: Local tensor.
        sharding: Sharding of the local tensor.

    Raises:
        ValueError: A box reaches beyond the local tensor, or two boxes hold more elements than it has.
    """
    for box in sharding.boxes:
        if box.last >= tensor.numel():
            raise ValueError(f"box {box} ends at local element {box.last}, but the tensor has {tensor.numel()}")
    # If each box fits but their sum does not, two boxes overlap.
    if sharding.local_numel > tensor.numel():
        raise ValueError(f"the boxes hold {sharding.local_numel} elements, but the tensor has {tensor.numel()}")
    SHARDING.set(tensor, sharding)


def recorded_sharding(tensor: "torch.Tensor") -> Sharding | None:
    """Return the sharding metadata of a tensor, or None."""
    return SHARDING.of(tensor)


def whole(shape: Sequence[int], copies: Sequence[int]) -> Sharding:
    """Return the sharding metadata of an unsharded tensor.

    Args:
        shape: The shape of the tensor.
        copies: The global ranks that have it, this rank among them.
    """
    shape = tuple(shape)
    if 0 in shape:
        return Sharding(shape, ())
    return Sharding(shape, (Box((0,) * len(shape), shape, 0, row_major(shape), copies),))


def cut(
    sharding: Sharding, start: int, stop: int, *, offset: int = 0, holders: Container[int] | None = None
) -> Sharding:
    """Return the sharding of a flat range of a local tensor after a copy into another buffer.

    ZeRO uses this for a tensor-parallel shard whose row-major elements it partitions: a flat range of a box is again a
    few boxes (at most 2 * dims - 1 if rows do not interleave).

    Args:
        sharding: Sharding of the local tensor.
        start: First local element of the range.
        stop: One past the last local element of the range.
        offset: Index in the new buffer at which the range begins. Default: 0.
        holders: Global ranks that take the same range of their local tensors; copies on other ranks are removed.
            Default: all copies stay.

    Raises:
        ValueError: The range is not within 0 <= start <= stop, or the offset is negative.
    """
    if not 0 <= start <= stop or offset < 0:
        raise ValueError(f"elements {start}..{stop} at offset {offset}: needs 0 <= start <= stop and offset >= 0")
    boxes = []
    for box in sharding.boxes:
        copies = box.copies if holders is None else tuple(rank for rank in box.copies if rank in holders)
        for piece in _within(box, start, stop):
            boxes.append(replace(piece, offset=piece.offset - start + offset, copies=copies))
    return Sharding(sharding.shape, tuple(boxes))


def _within(box: Box, start: int, stop: int) -> Iterator[Box]:
    """Yield the part of a box with local elements start .. stop - 1, as boxes."""
    if start <= box.offset and box.last < stop:
        yield box
    elif box.last >= start and box.offset < stop:
        # Indices of the dim with the largest stride follow each other in memory, so the range contains most of them
        # completely, and few boxes are left.
        dim = max((d for d, size in enumerate(box.size) if size > 1), key=lambda d: box.stride[d])
        for first, length in _runs(box, dim, start, stop):
            yield from _within(_narrow(box, dim, first, length), start, stop)


def _runs(box: Box, dim: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Split one dim into single indices that are partly in the range, and the run of indices completely inside it."""
    # An index is touched if any of its elements is in the range, and inside if all of them are. `-(-a // b)` rounds up.
    size, stride = box.size[dim], box.stride[dim]
    last = box.last - (size - 1) * stride  # the highest element of index 0
    touched_from = max(0, -(-(start - last) // stride))
    touched_to = min(size, -(-(stop - box.offset) // stride))
    inside_from = min(max(touched_from, -(-(start - box.offset) // stride)), touched_to)
    inside_to = max(inside_from, min(touched_to, (stop - 1 - last) // stride + 1))
    yield from ((index, 1) for index in range(touched_from, inside_from))
    if inside_to > inside_from:
        yield inside_from, inside_to - inside_from
    yield from ((index, 1) for index in range(inside_to, touched_to))


def _narrow(box: Box, dim: int, first: int, length: int) -> Box:
    start = (*box.start[:dim], box.start[dim] + first, *box.start[dim + 1 :])
    size = (*box.size[:dim], length, *box.size[dim + 1 :])
    return replace(box, start=start, size=size, offset=box.offset + first * box.stride[dim])


def row_major(shape: Sequence[int]) -> Shape:
    """Return the strides of a contiguous tensor of that shape, in elements."""
    # As in torch, a dim of size 0 counts as 1, so that the strides of the dims before it do not become 0.
    steps = list(itertools.accumulate(reversed(tuple(shape)[1:]), lambda a, b: a * max(b, 1), initial=1))
    return tuple(reversed(steps))[: len(shape)] if shape else ()
