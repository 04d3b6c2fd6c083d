"""Which experts a token goes to: pure arithmetic on its scores."""

import torch
from torch import Tensor


def select_experts(
    scores: Tensor, top_k: int, *, bias: Tensor | None = None, group_limit: tuple[int, int] | None = None
) -> Tensor:
    """The experts of each token, best first. There is no gradient: a choice is no number.

    Args:
        scores: Scores of all experts, [M, E].
        top_k: Number of experts that a token goes to.
        bias: Added to the scores for the choice alone, [E].
        group_limit: (groups, kept): experts are divided into groups of neighbours, and a token may go to those of the
            `kept` best groups alone. A group's score is the sum of its two best.

    Returns:
        Their numbers, int64 [M, top_k].

    Raises:
        ValueError: There are not so many experts, or they do not divide into the groups.
    """
    experts = scores.shape[-1]
    check_choice(experts, top_k, group_limit)
    wanted = scores.detach()
    if bias is not None:
        wanted = wanted + bias
    if group_limit is not None:
        groups, kept = group_limit
        by_group = wanted.unflatten(-1, (groups, -1))  # [M, groups, experts of a group]
        best = by_group.topk(2, dim=-1).values.sum(-1).topk(kept, dim=-1).indices
        left_out = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter_(-1, best, False)
        wanted = by_group.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(-2)
    return wanted.topk(top_k, dim=-1).indices


def check_choice(experts: int, top_k: int, group_limit: tuple[int, int] | None) -> None:
    """Raises ValueError unless so many experts can be chosen.

    Args:
        experts: Number of experts.
        top_k: Number of experts that a token goes to.
        group_limit: Number of groups, and of those whose experts may be chosen.
    """
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k is {top_k}, but there are {experts} experts; give a number from 1 to {experts}")
    if group_limit is None:
        return
    groups, kept = group_limit
    if groups < 1 or experts % groups:
        raise ValueError(f"group_limit={group_limit}: {experts} experts do not divide into {groups} groups")
    size = experts // groups
    if size < 2:
        raise ValueError(
            f"group_limit={group_limit}: {experts} experts in {groups} groups are fewer than two each, whose two best "
            f"are its score; give at most {max(experts // 2, 1)} groups, or None"
        )
    if not 1 <= kept <= groups:
        raise ValueError(f"group_limit={group_limit} keeps {kept} of {groups} groups; keep 1 to {groups}")
    if top_k > kept * size:
        raise ValueError(
            f"top_k is {top_k}, but {kept} kept groups have {kept * size} experts (group_limit={group_limit}); keep at "
            f"least {-(-top_k // size)} groups"
        )
