"""The pipeline schedule: which rank does what, in order. It imports no torch, so that planning stays quick."""

from par_pipeline import Action


def eager_1f1b(ranks: int, microbatches: int) -> list[list[Action]]:
    """1F1B with more forwards ahead, so that sending a microbatch overlaps with computing the next one.

    Rank r keeps up to 2 (ranks - r) - 1 microbatches, where 1F1B keeps ranks - r.

    Args:
        ranks: The ranks of the pipeline, with one stage each.
        microbatches: In a step.

    Source: eager-1F1B, Zhuang et al., arXiv:2211.05322.
    """
    return [_actions(rank, 2 * (ranks - rank) - 1, microbatches) for rank in range(ranks)]


def _actions(rank: int, ahead: int, microbatches: int) -> list[Action]:
    forwards = [Action("F", rank, k) for k in range(microbatches)]
    order = forwards[:ahead]
    for k in range(microbatches):
        order += [Action("B", rank, k), *forwards[ahead + k : ahead + k + 1]]
    return order
