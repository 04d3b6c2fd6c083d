"""All forwards, then all backwards: GPipe, and its looped form over several stages per rank."""

from collections.abc import Iterator

from .actions import Action
from .generate import Generated, check_sizes
from .placement import straight
from .registry import register_schedule
from .schedule import Schedule


@register_schedule("gpipe")
def gpipe(ranks: int, microbatches: int) -> Schedule:
    """Return GPipe: all forwards, then all backwards. Every rank keeps the activations of all microbatches.

    Args:
        ranks: Number of ranks in the pipeline, with one stage each.
        microbatches: Number of microbatches per step.

    Source: Huang et al., GPipe, arXiv:1811.06965, figure 2c.
    """
    check_sizes(ranks=ranks, microbatches=microbatches)
    actions = [Generated(_gpipe, rank, microbatches) for rank in range(ranks)]
    return Schedule(actions, placement=straight(ranks), microbatches=microbatches)


def _gpipe(rank: int, microbatches: int) -> Iterator[Action]:
    for op in "FB":
        for k in range(microbatches):
            yield Action(op, rank, k)


@register_schedule("looped_bfs")
def looped_bfs(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Return looped breadth-first pipelining: a stage runs all microbatches before the rank's next stage does.

    Args:
        ranks: Number of ranks in the pipeline.
        microbatches: Number of microbatches per step.
        chunks: Number of stages on each rank; rank r holds the stages r, r + ranks, ...

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, arXiv:2211.05953.
    """
    check_sizes(ranks=ranks, microbatches=microbatches, chunks=chunks)
    actions = [Generated(_looped_bfs, rank, ranks, microbatches, chunks) for rank in range(ranks)]
    return Schedule(actions, placement=straight(ranks, chunks), microbatches=microbatches)


def _looped_bfs(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    stages = range(rank, ranks * chunks, ranks)
    for stage in stages:
        for k in range(microbatches):
            yield Action("F", stage, k)
    for stage in reversed(stages):
        for k in reversed(range(microbatches)):
            yield Action("B", stage, k)
