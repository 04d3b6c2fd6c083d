"""One forward, one backward: 1F1B, and its interleaved form over several stages per rank."""

from collections.abc import Iterator
from itertools import islice

from .actions import Action
from .generate import Generated, check_sizes
from .placement import straight
from .registry import register_schedule
from .schedule import Schedule


@register_schedule("1f1b")
def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Return 1F1B: a backward after each forward, once the first gradient arrives.

    Rank r keeps `ranks` - r microbatches.

    Args:
        ranks: Number of ranks in the pipeline, with one stage each.
        microbatches: Number of microbatches per step.

    Source: Narayanan et al., PipeDream, arXiv:1806.03377, section 3.2, with a flush (arXiv:2006.09503).
    """
    check_sizes(ranks=ranks, microbatches=microbatches)
    actions = [Generated(_one_f_one_b, rank, ranks, microbatches) for rank in range(ranks)]
    return Schedule(actions, placement=straight(ranks), microbatches=microbatches)


def _one_f_one_b(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    ahead = min(microbatches, ranks - rank)
    # A microbatch needs `ranks` - `rank` stages to reach the loss from here, so this many forwards run before the first
    # backward can.
    for k in range(ahead):
        yield Action("F", rank, k)
    for k in range(microbatches):
        yield Action("B", rank, k)
        if k + ahead < microbatches:
            yield Action("F", rank, k + ahead)


@register_schedule("interleaved")
def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Return interleaved 1F1B with several stages per rank: `chunks` times less bubble, `chunks` times the messages.

    Microbatches go round in groups, whose sizes differ by at most one, so that any number of them works.

    Args:
        ranks: Number of ranks in the pipeline.
        microbatches: Number of microbatches per step.
        chunks: Number of stages on each rank; rank r holds the stages r, r + ranks, ...

    Source: Narayanan et al., Megatron-LM, arXiv:2104.04473, section 2.2.2.
    """
    check_sizes(ranks=ranks, microbatches=microbatches, chunks=chunks)
    actions = [Generated(_interleaved, rank, ranks, microbatches, chunks) for rank in range(ranks)]
    return Schedule(actions, placement=straight(ranks, chunks), microbatches=microbatches)


def _interleaved(rank: int, ranks: int, microbatches: int, chunks: int) -> Iterator[Action]:
    groups = max(1, microbatches // ranks)
    largest = -(-microbatches // groups)
    # The first backward arrives after two hops for each rank behind this one, and after a full group has passed the
    # rank's first `chunks` - 1 stages.
    ahead = min(microbatches * chunks, 2 * (ranks - 1 - rank) + (chunks - 1) * largest)
    stages = range(rank, ranks * chunks, ranks)
    forwards = _in_groups("F", stages, microbatches, groups)
    yield from islice(forwards, ahead)
    for backward in _in_groups("B", stages[::-1], microbatches, groups):
        # `islice` ends silently when there are no forwards left, which is the cool-down.
        yield from islice(forwards, 1)
        yield backward


def _in_groups(op: str, stages: range, microbatches: int, groups: int) -> Iterator[Action]:
    """Take one group of microbatches after the other through all stages of the rank; larger groups come first."""
    size, larger = divmod(microbatches, groups)
    start = 0
    for group in range(groups):
        stop = start + size + (group < larger)
        for stage in stages:
            for k in range(start, stop):
                yield Action(op, stage, k)
        start = stop
