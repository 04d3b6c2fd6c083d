"""Attention over a split sequence as a function."""

from torch import Tensor

from par_groups import ProcessGroups

from .balance import CAUSAL
from .context import Context
from .mask import Mask
from .tokens import Tokens


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    groups: ProcessGroups,
    *,
    axis: str = "sequence",
    mode: str | None = None,
    mask: Mask = CAUSAL[0],
    tokens: Tokens | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute attention over a sequence that is split over ranks. A `Context` caches its plans, and is faster.

    Args:
        q: Queries [B, s, H, D].
        k: Keys [B, s, Hk, D].
        v: Values [B, s, Hk, D].
        groups: The live groups.
        axis: The axis whose ranks hold parts of the sequence.
        mode: Mode in which attention reaches other ranks' keys; default: the mode of the topology.
        mask: Tokens of its document that a token sees.
        tokens: Split of the batch; default: sequences of one document, by the static split.
        scale: Factor of the scores of queries and keys; default: 1 / sqrt(D).
        sinks: Logarithm of one more term in each head's sum of exponentials, [H].

    Returns:
        Output [B, s, H, D].
    """
    return Context(groups, axis=axis, mode=mode).attention(q, k, v, tokens, mask=mask, scale=scale, sinks=sinks)
