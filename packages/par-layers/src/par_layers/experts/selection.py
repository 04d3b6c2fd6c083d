"""Options of a mixture of experts, and the selection of each token's experts: pure arithmetic on scores."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .products import Activation


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """Options of a router. The names are those of DeepSeek-V3's `config.json` where it has the option.

    Args:
        scoring_func: Function from logits to scores: "softmax" over all experts, or "sigmoid" of each logit.
        norm_topk_prob: Whether to divide the gates of a token by their sum.
        routed_scaling_factor: Factor of the gates, applied last.
        n_group: Number of groups of consecutive experts; 1 does not limit the selection.
        topk_group: Number of groups that a token may use. A group's score is the sum of its two best scores.
        bias: Whether the logits have a bias.
        correction_bias: Whether to add a bias to the scores when experts are selected. The gates do not contain it, so
            it balances the experts without a loss. It is the buffer `e_score_correction_bias`.

    Raises:
        ValueError: The scoring function is unknown, or `topk_group` exceeds `n_group`.
    """

    scoring_func: Literal["softmax", "sigmoid"] = "softmax"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    bias: bool = False
    correction_bias: bool = False

    def __post_init__(self) -> None:
        if self.scoring_func not in ("softmax", "sigmoid"):
            raise ValueError(f"scoring_func={self.scoring_func!r}: unknown function; pass 'softmax' or 'sigmoid'")
        if not 1 <= self.topk_group <= self.n_group:
            raise ValueError(
                f"topk_group={self.topk_group}: out of range with n_group={self.n_group}; pass 1 to {self.n_group}"
            )


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """Computation and weight layout of one expert.

    Args:
        activation: Function between the two matmuls: "swiglu", "clamped_swiglu" (gpt-oss), "gelu" (without a gate), or
            an `Activation`.
        bias: Whether both matmuls have a bias.
        interleaved: Whether gate and up features alternate in the weight. If False, all gate features come first.
        transposed: Whether weights are stored as [inputs, outputs] instead of torch's [outputs, inputs].
    """

    activation: str | Activation = "swiglu"
    bias: bool = False
    interleaved: bool = False
    transposed: bool = False


def select_experts(
    scores: Tensor, top_k: int, *, bias: Tensor | None = None, n_group: int = 1, topk_group: int = 1
) -> Tensor:
    """Select the experts of each token, best first, without a gradient.

    Args:
        scores: Scores of all experts, [M, E].
        top_k: Number of experts per token, k.
        bias: Bias that is added to the scores for the selection only, [E]; None adds nothing.
        n_group: Number of groups of consecutive experts; 1 does not limit the selection.
        topk_group: Number of groups that a token may use. A group's score is the sum of its two best scores.

    Returns:
        Expert ids, int64 [M, k].

    Raises:
        ValueError: `top_k` exceeds the experts that a token may use, or the experts do not divide into the groups.
    """
    check_selection(scores.shape[-1], top_k, n_group, topk_group)
    # Scores are detached first: autograd would save the indices of `topk`, and activation checkpointing raises when a
    # recomputation, which replays the ids and calls no `topk`, does not save them again.
    ranked = scores.detach()
    if bias is not None:
        ranked = ranked + bias
    if n_group > 1:
        by_group = ranked.unflatten(-1, (n_group, -1))  # [M, groups, experts per group]
        # DeepSeek-V3 ranks a group by the sum of its two best scores.
        best = by_group.topk(2, dim=-1).values.sum(-1).topk(topk_group, dim=-1).indices
        excluded = torch.ones_like(by_group[..., 0], dtype=torch.bool).scatter_(-1, best, False)
        ranked = by_group.masked_fill(excluded.unsqueeze(-1), -torch.inf).flatten(-2)
    return ranked.topk(top_k, dim=-1).indices


def check_selection(num_experts: int, top_k: int, n_group: int, topk_group: int) -> None:
    """Raise ValueError unless each token can select `top_k` experts.

    Args:
        num_experts: Number of experts, E.
        top_k: Number of experts per token, k.
        n_group: Number of groups of consecutive experts.
        topk_group: Number of groups that a token may use.
    """
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k}: there are {num_experts} experts; pass 1 to {num_experts}")
    if n_group < 1 or num_experts % n_group:
        raise ValueError(f"n_group={n_group}: {num_experts} experts do not divide into {n_group} groups")
    if n_group == 1:
        return
    size = num_experts // n_group
    if size < 2:
        raise ValueError(
            f"n_group={n_group}: groups need two experts each, because their two best scores rank them, and "
            f"{num_experts} experts are too few; pass at most {max(num_experts // 2, 1)}"
        )
    if not 1 <= topk_group <= n_group:
        raise ValueError(f"topk_group={topk_group}: out of range with n_group={n_group}; pass 1 to {n_group}")
    if top_k > topk_group * size:
        raise ValueError(
            f"top_k={top_k}: topk_group={topk_group} groups have {topk_group * size} experts; pass topk_group of at "
            f"least {-(-top_k // size)}"
        )
