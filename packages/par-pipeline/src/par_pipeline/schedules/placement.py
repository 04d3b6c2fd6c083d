"""Placement of stages on ranks."""

from collections.abc import Iterable
from functools import cached_property


class StagePlacement:
    """Assignment of stages to ranks.

    Args:
        stages_of_ranks: Numbers of each rank's stages, in any order.
    """

    def __init__(self, stages_of_ranks: Iterable[Iterable[int]]) -> None:
        self.by_rank = tuple(tuple(sorted(stages)) for stages in stages_of_ranks)

    @cached_property
    def _rank_by_stage(self) -> dict[int, int]:
        """The rank of each stage; the lowest one, if several claim it."""
        ranks = reversed(range(len(self.by_rank)))
        return {stage: rank for rank in ranks for stage in self.by_rank[rank]}

    @cached_property
    def stages(self) -> int:
        """The number of stages of the whole pipeline."""
        return 1 + max(self._rank_by_stage)

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage.

        Raises:
            ValueError: No rank holds it.
        """
        if stage not in self._rank_by_stage:
            raise ValueError(f"no rank holds stage {stage}; there are the stages {sorted(self._rank_by_stage)}")
        return self._rank_by_stage[stage]


def straight(ranks: int, chunks: int = 1) -> list[tuple[int, ...]]:
    """Return the stages of each rank when stages go around the ranks `chunks` times: rank 1 of 4 holds 1, 5, 9, ..."""
    return [tuple(range(rank, ranks * chunks, ranks)) for rank in range(ranks)]


def v_shaped(ranks: int) -> list[tuple[int, int]]:
    """Return two stages for each rank, down the ranks and up again: rank 0 holds the first and the last."""
    return [(rank, 2 * ranks - 1 - rank) for rank in range(ranks)]
