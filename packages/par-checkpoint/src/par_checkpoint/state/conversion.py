"""Conversion between a tensor in memory and its tensors in the files: several, a part of one, or a transposed one.

A conversion only moves elements and changes no value. It is a list of parts. Arithmetic on boxes turns a rank's shard
of the tensor in memory into its shard of each tensor in the files. This is pure: it reads no data.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from par_groups import Box, Segment, Sharding

from ..plan.coverage import is_covered

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class TensorSlice:
    """A tensor in the files, or a rectangle of one, and where it lies in a tensor in memory.

    Args:
        name: Name of the tensor in the files.
        shape: Shape of the whole tensor in the files.
        start: The index in memory where the first element of the rectangle lies, one number per dim in memory.
        dims: Dim i in the files runs along dim `dims[i]` in memory. Along dims in memory that are not named here, the
            part is one element thick.
        offset: First index of the rectangle in the files; None is the origin.
        size: Extent of the rectangle on each dim in the files; None is all that follows `offset`.
        step: Number of indices in memory from one index of each dim in the files to the next, such as 2 where memory
            has another tensor's rows in between; None is 1 on each dim.

    Raises:
        ValueError: A rectangle that leaves its tensor in the files, or dims or steps that do not fit.
    """

    name: str
    shape: Shape
    start: Shape
    dims: Shape
    offset: Shape | None = None
    size: Shape | None = None
    step: Shape | None = None

    def __post_init__(self) -> None:
        given = [numbers for numbers in (self.dims, self.offset, self.size, self.step) if numbers is not None]
        if any(len(numbers) != len(self.shape) for numbers in given):
            raise ValueError(f"{self}: dims, offset, size and step need one number for each dim of shape {self.shape}")
        if min(self.steps, default=1) < 1:
            raise ValueError(f"{self}: step must be 1 or more on each dim")
        if len(set(self.dims)) != len(self.dims) or not set(self.dims) <= set(range(len(self.start))):
            raise ValueError(f"{self}: dims must name different ones of the {len(self.start)} dims in memory")
        for low, size, length in zip(self.first, self.extent, self.shape, strict=True):
            if low < 0 or size < 0 or low + size > length:
                raise ValueError(f"{self}: offset and size leave the shape {self.shape} in the files")

    @property
    def first(self) -> Shape:
        """The first index of the rectangle, in the files."""
        return (0,) * len(self.shape) if self.offset is None else self.offset

    @property
    def extent(self) -> Shape:
        """The extent of the rectangle on each dim in the files."""
        if self.size is not None:
            return self.size
        return tuple(length - low for length, low in zip(self.shape, self.first, strict=True))

    @property
    def steps(self) -> Shape:
        """Distance in memory between neighbouring indices of each dim in the files."""
        return (1,) * len(self.shape) if self.step is None else self.step

    @property
    def extent_in_memory(self) -> Shape:
        """Extent of the rectangle on each dim in memory, including the gaps between its elements."""
        extent = [1] * len(self.start)
        for dim, size, step in zip(self.dims, self.extent, self.steps, strict=True):
            extent[dim] = (size - 1) * step + 1 if size else 0
        return tuple(extent)


Conversion = Callable[[str, Shape], Sequence[TensorSlice] | None]
"""The parts of a tensor, from its name in the model and its global shape; None where it lies in the files as it is."""


def parts_cover(shape: Shape, parts: Sequence[TensorSlice]) -> None:
    """Raise unless parts hold every element of a tensor in memory exactly once.

    Args:
        shape: Shape of the full tensor in memory.
        parts: Slices that make up the tensor.

    Raises:
        ValueError: A part leaves the shape, an element is in no part or in two parts, a name has two shapes, or steps
            do not divide a dim.
    """
    shapes: dict[str, Shape] = {}
    for part in parts:
        if shapes.setdefault(part.name, part.shape) != part.shape:
            raise ValueError(
                f"the parts give {part.name!r} the shapes {shapes[part.name]} and {part.shape}; it has one"
            )
        if len(part.start) != len(shape):
            raise ValueError(f"the part {part.name!r} has a start of {len(part.start)} dims, but the shape is {shape}")
        for low, size, length in zip(part.start, part.extent_in_memory, shape, strict=True):
            if low < 0 or low + size > length:
                raise ValueError(f"the part {part.name!r}, {part.extent_in_memory} at {part.start}, leaves {shape}")
    common = [1] * len(shape)
    for part in parts:
        for dim, step in zip(part.dims, part.steps, strict=True):
            common[dim] = math.lcm(common[dim], step)
    for dim, (length, step) in enumerate(zip(shape, common, strict=True)):
        if length % step:
            raise ValueError(f"the parts have steps of {step} along dim {dim} of shape {shape}, which must divide it")
    # Each dim becomes two, of index // step and index % step: there parts are boxes without steps.
    boxes = [box for part in parts if 0 not in part.extent for box in _of_each_remainder(part, common)]
    twice = tuple(n for length, step in zip(shape, common, strict=True) for n in (length // step, step))
    corners = [[start for start, _ in boxes], [size for _, size in boxes]]
    starts, sizes = torch.tensor(corners, dtype=torch.int64, device="cpu").view(2, len(boxes), len(twice))
    count = sum(math.prod(part.extent) for part in parts)
    # Where the parts hold as many elements as there are, and none is left out, none is held twice.
    if count != math.prod(shape) or not is_covered(twice, starts, sizes):
        names = ", ".join(repr(part.name) for part in parts[:4]) or "(none)"
        more = f" and {len(parts) - 4} more" if len(parts) > 4 else ""
        raise ValueError(
            f"the parts {names}{more} hold {count} elements, but must hold each of the {math.prod(shape)} of shape "
            f"{shape} exactly once"
        )


def _of_each_remainder(part: TensorSlice, common: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield a part as boxes (start, size) of a tensor whose dims are each split into index // s and index % s.

    Args:
        part: Part that is not empty.
        common: Divisor s of each dim in memory, a multiple of the part's step.
    """
    runs = [[(first // s, first % s, 1)] for first, s in zip(part.start, common, strict=True)]
    for dim, size, step in zip(part.dims, part.extent, part.steps, strict=True):
        first, s = part.start[dim], common[dim]
        if step == s == 1:
            runs[dim] = [(first, 0, size)]
            continue
        many = s // step  # indices of the part between two of one remainder
        begins = [(first + skipped * step, -(-(size - skipped) // many)) for skipped in range(min(many, size))]
        runs[dim] = [(index // s, index % s, count) for index, count in begins]
    for run in itertools.product(*runs):
        yield [n for quotient, rest, _ in run for n in (quotient, rest)], [n for *_, count in run for n in (count, 1)]


def checked(convert: Conversion) -> Conversion:
    """Return a conversion with a check that the parts of a tensor hold each of its elements exactly once.

    Raises:
        ValueError: When it is called, naming the tensor. See `parts_cover`.
    """

    def convert_and_check(name: str, shape: Shape) -> Sequence[TensorSlice] | None:
        parts = convert(name, shape)
        if parts is not None:
            try:
                parts_cover(shape, parts)
            except ValueError as error:
                raise ValueError(f"convert({name!r}, {shape}): {error}") from None
        return parts

    return convert_and_check


def split(sharding: Sharding, parts: Sequence[TensorSlice]) -> list[Segment]:
    """Map a rank's shard of a tensor in memory to its shard of each tensor in the files.

    Args:
        sharding: Sharding of the tensor in memory.
        parts: Slices that make up the tensor. See `parts_cover`.

    Returns:
        One segment for each name in the files, with boxes that point into the same local tensor; a segment without
        boxes where this rank holds nothing of it.
    """
    boxes: dict[str, list[Box]] = {part.name: [] for part in parts}
    for part in parts:
        for box in sharding.boxes:
            piece = _common(box, part)
            if piece is not None:
                boxes[part.name].append(piece)
    shapes = {part.name: part.shape for part in parts}
    return [Segment(name, Sharding(shapes[name], tuple(own))) for name, own in boxes.items()]


def _common(box: Box, part: TensorSlice) -> Box | None:
    """Intersect a box with a slice, as a box of the tensor in the files."""
    start, size, stride = list(part.first), list(part.extent), list(box.stride)
    offset = box.offset
    for dim, (own, first) in enumerate(zip(box.start, part.start, strict=True)):
        # Along a dim that the tensor in the files lacks, the part lies at one index, which the box has or has not.
        if dim not in part.dims:
            if not own <= first < own + box.size[dim]:
                return None
            offset += (first - own) * stride[dim]
    for at, (dim, step) in enumerate(zip(part.dims, part.steps, strict=True)):
        before = part.start[dim] - box.start[dim]  # of the box's first index to the part's
        # Indices of the part are `step` apart in memory, so both ends are rounded towards the inside of the box.
        low = max(0, -(before // step))  # the first index of the part that the box has
        high = min(size[at], -((before - box.size[dim]) // step))
        if high <= low:
            return None
        offset += (before + low * step) * stride[dim]
        start[at], size[at] = start[at] + low, high - low
    return replace(
        box,
        start=tuple(start),
        size=tuple(size),
        offset=offset,
        stride=tuple(stride[dim] * step for dim, step in zip(part.dims, part.steps, strict=True)),
    )
