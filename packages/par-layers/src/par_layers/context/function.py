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
    """Attention over a sequence that is cut over ranks, as a function; a `Context` keeps its plans, and is faster.

    Args:
        q: Queries [B, s, H, D].
        k: Keys [B, s, Hk, D].
        v: Values [B, s, Hk, D].
        groups: The live groups.
        axis: The axis whose ranks hold parts of the sequence.
        mode: How attention reaches other ranks' keys; default: the mode of the topology.
        mask: What a token sees of its document.
        tokens: How the batch is cut; default: rows of one document, by the static cut.
        scale: What products of queries and keys are multiplied by; default: 1 / sqrt(D).
        sinks: The logarithm of one more term in each head's sum of exponentials, [H].

    Returns:
        [B, s, H, D].
    """
    return Context(groups, axis=axis, mode=mode).attention(q, k, v, tokens, mask=mask, scale=scale, sinks=sinks)
