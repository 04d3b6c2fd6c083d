"""Tensors that ranks have parts of, and which of these ranks steps each as a whole. Pure arithmetic.

A record is a row of boxes, of which one is mostly all that a rank has. A fused layer's has one for each of q, k and v,
on one device too, since each is cut by itself. So the first boxes of all ranks together are one tensor to an optimizer,
the second ones another: a block.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from par_groups import Box, Sharding


@dataclass(frozen=True, kw_only=True)
class MatrixPart:
    """What a rank has of a block.

    Args:
        rank: The rank's number among those that have parts.
        box: The rectangle, and where it lies in the rank's tensor.
        chosen: Whether it is the one of all copies that is sent to the rank that steps the block.
    """

    rank: int
    box: Box
    chosen: bool

    @property
    def counts(self) -> bool:
        """Whether its gradient is sent to the rank that steps the block: of copies that are partial sums, each is."""
        return self.chosen or bool(self.box.sum_over)


@dataclass(frozen=True, kw_only=True)
class MatrixBlock:
    """A rectangle of a parameter, mostly all of it, which an optimizer steps as one tensor.

    Args:
        name: The parameter's name.
        shape: The parameter's whole shape.
        start: First index of the block on each dim.
        size: Its shape.
        pieces: What the ranks have of it.
        stepper: Number of the rank that steps it.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    size: tuple[int, ...]
    pieces: tuple[MatrixPart, ...]
    stepper: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.size)

    def slices(self, box: Box) -> tuple[slice, ...]:
        """Where a box of the parameter lies in the block."""
        corner = (first - own for first, own in zip(box.start, self.start, strict=True))
        return tuple(slice(first, first + size) for first, size in zip(corner, box.size, strict=True))


def work(size: Sequence[int]) -> int:
    """What a block costs to step, up to a factor: products of matrices take a side's length for each element."""
    return math.prod(size) * (min(size[0], math.prod(size[1:])) if len(size) > 1 else 1)


def blocks_of(records: Sequence[tuple[str, Sequence[Sharding]]]) -> list[MatrixBlock]:
    """The blocks of parameters, dealt out to the ranks: the costliest first, to the rank that has the least to do.

    Args:
        records: For each parameter its name, and its records on the ranks.

    Raises:
        ValueError: The ranks do not have all of a parameter, or its boxes are no rectangles when put together.
    """
    found = []
    for name, of_ranks in records:
        whole = of_ranks[0]
        counts = {len(record.boxes) for record in of_ranks if record.boxes}
        if len(counts) > 1 or len({record.shape for record in of_ranks}) > 1:
            raise ValueError(
                f"{name!r} has {sorted(counts)} boxes of shapes {sorted({tuple(each.shape) for each in of_ranks})} on "
                "the ranks of tensor_group, whose first boxes form one matrix, and so on; shard each matrix as one "
                "box per rank, or give the parameter to an elementwise optimizer"
            )
        blocks = [
            _block(name, whole.shape, [(rank, record.boxes[i]) for rank, record in enumerate(of_ranks) if record.boxes])
            for i in range(max(counts, default=0))
        ]
        if sum(block.numel for block in blocks) != whole.numel:
            raise ValueError(
                f"of {name!r} the ranks of tensor_group have {sum(block.numel for block in blocks)} of {whole.numel} "
                "elements, and an optimizer that must see whole tensors needs all; pass the tensor_group of all ranks "
                "that have parts of it"
            )
        found += blocks
    return _dealt(found, len(records[0][1]) if records else 0)


def _block(name: str, shape: tuple[int, ...], boxes: Sequence[tuple[int, Box]]) -> MatrixBlock:
    """One block, whose stepper is not chosen yet."""
    corners = {(box.start, box.size) for _, box in boxes}
    start = tuple(min(first[dim] for first, _ in corners) for dim in range(len(shape)))
    stop = tuple(max(first[dim] + size[dim] for first, size in corners) for dim in range(len(shape)))
    size = tuple(high - low for low, high in zip(start, stop, strict=True))
    if sum(math.prod(extent) for _, extent in corners) != math.prod(size) or _any_overlap(sorted(corners)):
        raise ValueError(
            f"the boxes that the ranks of tensor_group have of {name!r} are no rectangle together: {sorted(corners)}; "
            "shard each matrix as boxes that cover it without overlap, or use an elementwise optimizer for it"
        )
    pieces = tuple(MatrixPart(rank=rank, box=box, chosen=True) for rank, box in boxes)
    return MatrixBlock(name=name, shape=tuple(shape), start=start, size=size, pieces=pieces, stepper=0)


def _any_overlap(corners: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Whether any two rectangles, each of a first corner and a size, have an element in common."""
    return any(
        all(a < b + n and b < a + m for a, m, b, n in zip(one, extent, other, size, strict=True))
        for (one, extent), (other, size) in itertools.combinations(corners, 2)
    )


def _dealt(blocks: Sequence[MatrixBlock], ranks: int) -> list[MatrixBlock]:
    """The blocks with their steppers, in the order that they had."""
    loads = [0] * ranks
    steppers = [0] * len(blocks)
    for number in sorted(range(len(blocks)), key=lambda number: -work(blocks[number].size)):
        steppers[number] = loads.index(min(loads))
        loads[steppers[number]] += work(blocks[number].size)
    return [_stepped_by(stepper, block) for stepper, block in zip(steppers, blocks, strict=True)]


def _stepped_by(stepper: int, block: MatrixBlock) -> MatrixBlock:
    """A block with its stepper, which of several copies has its own, or else the first one."""
    chosen: dict[tuple[int, ...], int] = {}
    for piece in block.pieces:
        if piece.box.start not in chosen or piece.rank == stepper:
            chosen[piece.box.start] = piece.rank
    pieces = tuple(replace(piece, chosen=chosen[piece.box.start] == piece.rank) for piece in block.pieces)
    return replace(block, stepper=stepper, pieces=pieces)
