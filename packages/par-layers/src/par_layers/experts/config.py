"""The options of a mixture of experts: how its router scores, and what one expert computes. Plain data."""

from dataclasses import dataclass
from typing import Literal

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
