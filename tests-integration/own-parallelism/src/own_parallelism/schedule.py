"""The pipeline schedule: which rank does what, in order. It imports no torch, so that planning stays quick."""

from par_pipeline import Action


def eager_1f1b(ranks: int, microbatches: int) -> list[list[Action]]:
    """Build 1F1B with more warm-up forwards, to hide the sends of activations.

    Rank r holds up to 2 (ranks - r) - 1 microbatches; 1F1B holds ranks - r.

    Args:
        ranks: Number of pipeline ranks, with one stage per rank.
        microbatches: Number of microbatches per step.

    Source: eager-1F1B, Zhuang et al., arXiv:2211.05322.
    """
    ahead = [2 * (ranks - rank) - 1 for rank in range(ranks)]
    return [_actions(rank, ahead[rank], microbatches) for rank in range(ranks)]


def _actions(rank: int, ahead: int, microbatches: int) -> list[Action]:
    forwards = [Action("F", rank, k) for k in range(microbatches)]
    order = forwards[:ahead]
    for k in range(microbatches):
        order += [Action("B", rank, k), *forwards[ahead + k : ahead + k + 1]]
    return order
