"""Who holds a run of blocks, as far as it decides who writes or reads them. Pure arithmetic."""

from collections.abc import Sequence
from functools import cached_property

from .blocks import Block
from .overlap import BoxIndex
from .tasks import parts_of

RUNS = 16  # of a block that ranks write by themselves: more would be small writes


class Held:
    """The ranks that hold a run of blocks, most of which are cut alike.

    Where one index of the first dim is more than a block, boxes may be cut inside: then not all of the ranks hold some
    of every block.

    Args:
        block: All blocks of the run, as if they were one.
        indexes: For each of its spans, the boxes of the tensor.
    """

    def __init__(self, block: Block, indexes: Sequence[BoxIndex]) -> None:
        self._block = block
        spans = zip(block.spans, indexes, strict=True)
        overlaps = [(span, index.within(span.start, span.stop)) for span, index in spans]
        self._overlaps = [(span, overlap) for span, overlap in overlaps if overlap.boxes]
        self._held = [
            (rank, count * span.width)
            for span, overlap in self._overlaps
            for box, count in overlap.boxes.items()
            for rank in overlap.index.holders(box)
        ]

    @cached_property
    def some(self) -> frozenset[int]:
        """The ranks that hold something."""
        return frozenset(rank for rank, _ in self._held)

    @cached_property
    def main(self) -> tuple[int, ...]:
        """The ranks that hold about as much as any, at least half as much, ascending."""
        most = max((size for _, size in self._held), default=0)
        return tuple(sorted({rank for rank, size in self._held if 2 * size >= most}))

    @cached_property
    def much(self) -> frozenset[int]:
        """The ranks that hold at least a quarter of all of it."""
        return frozenset(rank for rank, size in self._held if 4 * size >= self._block.size)

    @cached_property
    def is_whole(self) -> bool:
        """Whether each of the main ranks holds all of it; so it is where nobody holds anything."""
        return all(
            overlap.index.held_by(rank) >= overlap.boxes.keys() for _, overlap in self._overlaps for rank in self.main
        )

    @cached_property
    def is_once(self) -> bool:
        """Whether no box has replicas."""
        return all(len(overlap.index.holders(box)) == 1 for _, overlap in self._overlaps for box in overlap.boxes)

    @property
    def are_runs(self) -> bool:
        """Whether each box is a run of elements that follow each other."""
        return all(overlap.index.cut.are_runs for _, overlap in self._overlaps)

    @cached_property
    def is_in_parts(self) -> bool:
        """Whether ranks hold it in so few runs of bytes that each may write or read its own."""
        return bool(parts_of(self._block, self._overlaps, limit=RUNS))
