"""Which elements of a tensor this rank counts when ranks sum. Pure arithmetic."""

from collections.abc import Container, Iterable
from dataclasses import dataclass, replace

import torch

from par_groups import Box, Segments


@dataclass(frozen=True)
class Counted:
    """What one rank counts of a local tensor.

    Args:
        boxes: In the local tensor; None: all of it.
    """

    boxes: tuple[Box, ...] | None

    def of(self, local: torch.Tensor) -> list[torch.Tensor]:
        """Views of what is counted; of a copy, where memory is not contiguous."""
        if self.boxes is None:
            return [local]
        dense = local.contiguous()
        return [box.of(dense) for box in self.boxes]


EVERYTHING, NOTHING = Counted(None), Counted(())


def counted(segments: Segments, numel: int, rank: int, ranks: Container[int]) -> Counted:
    """What `rank` owns of a tensor among the `ranks` that sum, in as few pieces as there can be.

    Args:
        segments: What the local tensor packs.
        numel: Its elements, padding included.
        rank: A global rank.
        ranks: The global ranks that sum.
    """
    owned = [box for segment in segments for box in segment.sharding.boxes if box.owns(rank, ranks)]
    runs, others = _runs(owned)
    if not others and [(run.offset, run.numel) for run in runs] == [(0, numel)]:
        return EVERYTHING
    return Counted((*runs, *others))


def _runs(boxes: Iterable[Box]) -> tuple[list[Box], list[Box]]:
    """Boxes without gaps in memory joined into flat ones, and the others."""
    runs: list[Box] = []
    others: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offset):
        if box.last - box.offset + 1 != box.numel:
            others.append(box)
        elif runs and runs[-1].last + 1 == box.offset:
            runs[-1] = replace(runs[-1], size=(runs[-1].numel + box.numel,))
        else:
            runs.append(Box((0,), (box.numel,), box.offset, (1,), box.copies))
    return runs, others
