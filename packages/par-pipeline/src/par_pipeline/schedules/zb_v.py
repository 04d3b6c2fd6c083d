"""ZB-V: stages in a V, and no bubble with 1F1B's memory where forward and both parts of backward take equal times."""

from collections.abc import Iterator

from .actions import Action
from .generate import Generated, check_sizes, numbered
from .placement import v_shaped
from .registry import register_schedule
from .schedule import Schedule


@register_schedule("zb_v")
def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Return ZB-V: no bubble, with 1F1B's memory: 2 `ranks` activations of stages half as large.

    Rank r holds the stages r and 2 `ranks` - 1 - r. Fewer than 2 `ranks` - 1 microbatches take the places of the first
    ones in the order for 2 `ranks` - 1.

    Args:
        ranks: Number of ranks in the pipeline.
        microbatches: Number of microbatches per step.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 6.
    """
    check_sizes(ranks=ranks, microbatches=microbatches)
    actions = [Generated(_zb_v, rank, ranks, microbatches) for rank in range(ranks)]
    return Schedule(actions, placement=v_shaped(ranks), microbatches=microbatches)


def _zb_v(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    return numbered(_order(rank, ranks, max(microbatches, 2 * ranks - 1)), microbatches)


def _order(rank: int, ranks: int, microbatches: int) -> Iterator[tuple[str, int]]:
    """Yield one rank's operations and stages: warm-up until all ranks run the second stage, steady state, cool-down."""
    down, up = v_shaped(ranks)[rank]
    ahead = 2 * ranks - rank - 1
    # The first microbatch needs 2 (ranks - rank) - 1 hops to come back up the V to this rank, which runs as many
    # forwards in the meantime.
    yield from [("F", down)] * (ahead - rank)
    yield from [("F", up), ("F", down)] * rank
    # Until the first gradient has come down the V, only the second stage has backwards to run.
    yield from [("F", up), ("I", up), ("W", up)] * (ranks - rank)
    for k in range(microbatches - ranks):
        if k + ahead < microbatches:
            yield "F", down
        yield from [("I", down), ("W", down), ("F", up), ("I", up), ("W", up)]
    yield from [("I", down), ("I", up)] * rank
    yield from [("I", down), ("W", down)] * (ranks - rank)
    # The last weight gradients were kept back so that input gradients, which other ranks wait for, ran first.
    yield from [("W", up)] * rank
    yield from [("W", down)] * rank
