"""Blocks: full tensors of which several ranks hold parts, and the rank that steps each of them. Pure arithmetic.

Sharding metadata is a list of boxes, and a rank mostly has one box. A fused layer has one box for each of q, k and v,
also on one device, because each is sharded separately. An optimizer therefore sees the first boxes of all ranks as one
tensor and the second boxes as another: each is a block.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from par_groups import Box, Sharding

Key = TypeVar("Key")


@dataclass(frozen=True, kw_only=True)
class MatrixPart:
    """Part of a block on one rank.

    Args:
        rank: Index of the rank among the ranks that hold parts.
        box: Rectangle, and its position in the rank's tensor.
        chosen: Whether this replica, of several, is sent to the rank that steps the block.
    """

    rank: int
    box: Box
    chosen: bool

    @property
    def counts(self) -> bool:
        """Whether its gradient is sent to the rank that steps the block. Partial sums all are sent."""
        return self.chosen or bool(self.box.sum_over)


@dataclass(frozen=True, kw_only=True)
class MatrixBlock:
    """Rectangle of a parameter, mostly the full parameter, which an optimizer steps as one tensor.

    Args:
        name: Name of the parameter.
        shape: Full shape of the parameter.
        start: First index of the block on each dim.
        size: Shape of the block.
        pieces: Parts of the block on the ranks.
        stepper: Index of the rank that steps it.
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
        """Return the position of a box of the parameter in the block."""
        corner = (first - own for first, own in zip(box.start, self.start, strict=True))
        return tuple(slice(first, first + size) for first, size in zip(corner, box.size, strict=True))


def work(size: Sequence[int]) -> int:
    """Estimate the cost of stepping a block, up to a factor.

    A matmul takes as many operations per element as the shorter side has elements.
    """
    return math.prod(size) * (min(size[0], math.prod(size[1:])) if len(size) > 1 else 1)


def blocks_of(records: Sequence[tuple[str, Sequence[Sharding]]]) -> list[MatrixBlock]:
    """Return the blocks of parameters, assigned to ranks: the costliest first, to the rank with the least work.

    Args:
        records: Name of each parameter, and its sharding metadata on the ranks.

    Raises:
        ValueError: The ranks do not hold all elements of a parameter, or its boxes form no rectangle.
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


def stepped_elements(blocks: Mapping[Key, Sequence[MatrixBlock]], rank: int) -> dict[Key, int]:
    """Return the number of elements of each parameter that one of the ranks steps.

    Args:
        blocks: Blocks of each parameter.
        rank: Index of the rank among the ranks that hold parts.
    """
    return {key: sum(block.numel for block in own if block.stepper == rank) for key, own in blocks.items()}


def _block(name: str, shape: tuple[int, ...], boxes: Sequence[tuple[int, Box]]) -> MatrixBlock:
    """Make one block, which has no stepper yet."""
    corners = {(box.start, box.size) for _, box in boxes}
    start = tuple(min(first[dim] for first, _ in corners) for dim in range(len(shape)))
    stop = tuple(max(first[dim] + size[dim] for first, size in corners) for dim in range(len(shape)))
    size = tuple(high - low for low, high in zip(start, stop, strict=True))
    # Boxes without overlap that have as many elements as the bounding rectangle fill it.
    if sum(math.prod(extent) for _, extent in corners) != math.prod(size) or _any_overlap(sorted(corners)):
        raise ValueError(
            f"the boxes that the ranks of tensor_group have of {name!r} are no rectangle together: {sorted(corners)}; "
            "shard each matrix as boxes that cover it without overlap, or use an elementwise optimizer for it"
        )
    pieces = tuple(MatrixPart(rank=rank, box=box, chosen=True) for rank, box in boxes)
    return MatrixBlock(name=name, shape=tuple(shape), start=start, size=size, pieces=pieces, stepper=0)


def _any_overlap(corners: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> bool:
    """Return whether any two rectangles, each given by a first corner and a size, overlap."""
    return any(
        all(a < b + n and b < a + m for a, m, b, n in zip(one, extent, other, size, strict=True))
        for (one, extent), (other, size) in itertools.combinations(corners, 2)
    )


def _dealt(blocks: Sequence[MatrixBlock], ranks: int) -> list[MatrixBlock]:
    """Assign blocks to ranks, and return them in their original order."""
    loads = [0] * ranks
    steppers = [0] * len(blocks)
    # The largest blocks first give nearly equal loads. The sort is stable, so all ranks get the same result.
    for number in sorted(range(len(blocks)), key=lambda number: -work(blocks[number].size)):
        steppers[number] = loads.index(min(loads))
        loads[steppers[number]] += work(blocks[number].size)
    return [_stepped_by(stepper, block) for stepper, block in zip(steppers, blocks, strict=True)]


def _stepped_by(stepper: int, block: MatrixBlock) -> MatrixBlock:
    """Set the stepper of a block, and choose its own replica of each part, or else the first one."""
    chosen: dict[tuple[int, ...], int] = {}
    for piece in block.pieces:
        # The stepper's own replica needs no communication.
        if piece.box.start not in chosen or piece.rank == stepper:
            chosen[piece.box.start] = piece.rank
    pieces = tuple(replace(piece, chosen=chosen[piece.box.start] == piece.rank) for piece in block.pieces)
    return replace(block, stepper=stepper, pieces=pieces)
