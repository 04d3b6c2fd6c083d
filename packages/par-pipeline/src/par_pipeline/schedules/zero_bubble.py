"""ZB-H1 and ZB-H2: 1F1B whose backward is cut in two, so that weight gradients fill the time of waiting."""

from collections.abc import Iterator

from .actions import Action
from .generate import Generated, check_sizes
from .placement import straight
from .registry import register_schedule
from .schedule import Schedule


@register_schedule("zb_h1")
def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Return ZB-H1: a third of 1F1B's bubble with its memory. Every rank keeps at most `ranks` activations.

    Rank r runs a weight gradient r microbatches after its input gradient.

    Args:
        ranks: Number of ranks in the pipeline, with one stage each.
        microbatches: Number of microbatches per step.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 2.
    """
    check_sizes(ranks=ranks, microbatches=microbatches)
    actions = [Generated(_zero_bubble, rank, microbatches, ranks - rank, rank) for rank in range(ranks)]
    return Schedule(actions, placement=straight(ranks), microbatches=microbatches)


@register_schedule("zb_h2")
def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Return ZB-H2: no bubble inside a rank's actions, with twice 1F1B's memory: 2 `ranks` - 1 activations.

    Ranks finish at different times, so what they all wait for at the end of a step still costs ZB-H1's idle time.

    Args:
        ranks: Number of ranks in the pipeline, with one stage each.
        microbatches: Number of microbatches per step.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241, section 2.
    """
    check_sizes(ranks=ranks, microbatches=microbatches)
    actions = [Generated(_zero_bubble, rank, microbatches, 2 * (ranks - rank) - 1, 2 * rank) for rank in range(ranks)]
    return Schedule(actions, placement=straight(ranks), microbatches=microbatches)


def _zero_bubble(rank: int, microbatches: int, ahead: int, lag: int) -> Iterator[Action]:
    """Forwards run `ahead` of input gradients, weight gradients `lag` behind them."""
    for k in range(min(ahead, microbatches)):
        yield Action("F", rank, k)
    for k in range(microbatches):
        # The input gradient comes first in every round, because the rank before waits for it and nobody waits for a
        # weight gradient.
        yield Action("I", rank, k)
        if k >= lag:
            yield Action("W", rank, k - lag)
        if k + ahead < microbatches:
            yield Action("F", rank, k + ahead)
    for k in range(max(0, microbatches - lag), microbatches):
        yield Action("W", rank, k)
