"""Elements of a tensor that this rank counts when ranks sum. Pure arithmetic."""

from collections.abc import Container
from dataclasses import dataclass, replace

import torch

from par_groups import Box, Segments


@dataclass(frozen=True)
class Counted:
    """The elements that one rank counts of a local tensor.

    Args:
        boxes: Boxes of the elements in the local tensor. None: all elements count.
    """

    boxes: tuple[Box, ...] | None

    def of(self, local: torch.Tensor) -> list[torch.Tensor]:
        """Return the counted elements of a local tensor, as views of it, or of a copy if it is not contiguous."""
        if self.boxes is None:
            return [local]
        dense = local.contiguous()
        return [box.of(dense) for box in self.boxes]


EVERYTHING, NOTHING = Counted(None), Counted(())


def counted(segments: Segments, numel: int, rank: int, ranks: Container[int]) -> Counted:
    """Return the elements of a tensor that a rank counts among the ranks that sum, in as few boxes as possible.

    Boxes that follow each other in memory become one flat box, because each box costs an operation.

    Args:
        segments: Segments of the local tensor.
        numel: Number of its elements, including padding.
        rank: Global rank that counts.
        ranks: Global ranks that sum.
    """
    owned = [box for segment in segments for box in segment.sharding.boxes if box.owns(rank, ranks)]
    flat: list[Box] = []
    with_gaps: list[Box] = []
    for box in sorted(owned, key=lambda box: box.offset):
        # A box with gaps in memory cannot join its neighbours, and is summed by itself.
        if box.last - box.offset + 1 != box.numel:
            with_gaps.append(box)
        elif flat and flat[-1].last + 1 == box.offset:
            flat[-1] = replace(flat[-1], size=(flat[-1].numel + box.numel,))
        else:
            flat.append(Box((0,), (box.numel,), box.offset, (1,), box.copies))
    if not with_gaps and [(box.offset, box.numel) for box in flat] == [(0, numel)]:
        return EVERYTHING
    return Counted((*flat, *with_gaps))
