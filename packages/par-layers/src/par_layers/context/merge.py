"""Attention of several pieces added up: each query's outputs, weighted by the sums of exponentials behind them.

Two pieces with outputs a and b and log-sum-exp x and y make the output a + w (b - a) with w = sigmoid(y - x), and the
log-sum-exp log(e^x + e^y). It is done in float32 at least, whatever the kernels give.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from .kernels.kernel import products, wide_dtype
from .pieces import AttentionPiece

Spans = tuple[tuple[int, int, bool], ...]
"""Ranges of a piece's queries, (start, stop, whether this piece is the first one of these queries)."""


def spans_in_order(pieces: Sequence[AttentionPiece], queries: int) -> tuple[list[Spans], tuple[tuple[int, int], ...]]:
    """Return the queries for which each piece is the first piece, in this order of computation.

    The first result of a query is copied and not added, so that the memory needs no zeros beforehand.

    Args:
        pieces: The pieces in the order in which they are computed.
        queries: Number of queries.

    Returns:
        The spans of each piece, and the ranges of queries that see nothing at all.
    """
    begun = np.zeros(queries, bool)
    result = []
    for piece in pieces:
        result.append(tuple((piece.q0 + a, piece.q0 + b, not old) for a, b, old in runs(begun[piece.q0 : piece.q1])))
        # The first piece of a query overwrites the memory, so the running sum needs no initialization.
        begun[piece.q0 : piece.q1] = True
    return result, tuple((a, b) for a, b, seen in runs(begun) if not seen)


def runs(flags: "np.ndarray[tuple[int], np.dtype[np.bool_]]") -> list[tuple[int, int, bool]]:
    """Return ranges of equal flags, with the flag."""
    number = int(np.count_nonzero(flags))
    if number in {0, len(flags)}:  # nearly always
        return [(0, len(flags), number > 0)] if len(flags) else []
    edges = [0, *(np.flatnonzero(flags[1:] != flags[:-1]) + 1).tolist(), len(flags)]
    return [(a, b, bool(flags[a])) for a, b in pairwise(edges) if b > a]


class RunningSoftmax:
    """Running sum of the attention of queries, to which `add` adds the attention over one piece of the keys.

    Args:
        out: Uninitialized memory of the output, [B, s, H, D], float32 or float64.
        lse: Uninitialized memory of the log-sum-exp, [B, H, s], of the same dtype.
        unseeing: Ranges of queries that attend to no key. Their output is set to zero.
    """

    def __init__(self, out: Tensor, lse: Tensor, unseeing: Sequence[tuple[int, int]]) -> None:
        self.out, self.lse = out, lse
        for start, stop in unseeing:
            out[:, start:stop] = 0
            lse[:, :, start:stop] = 0  # not -inf: in backward e^(-inf - lse) must be zero

    def add(self, start: int, spans: Spans, out: Tensor, lse: Tensor) -> None:
        """Add the output of a piece.

        Args:
            start: First query of the piece.
            spans: Ranges of the piece's queries, as `spans_in_order` returns them.
            out: Output of the piece, [B, Q, H, D].
            lse: Log-sum-exp of the piece, [B, H, Q].
        """
        for begin, end, is_first in spans:
            a, b = begin - start, end - start
            if is_first:
                self.out[:, begin:end] = out[:, a:b]
                self.lse[:, :, begin:end] = lse[:, :, a:b]
                continue
            old, new = self.lse[:, :, begin:end], lse[:, :, a:b]
            weight = torch.sigmoid(new - old).transpose(1, 2).unsqueeze(-1)
            # The sigmoid is the weight of the new piece in the sum of both; it cannot overflow, unlike the two
            # exponentials themselves.
            self.out[:, begin:end].lerp_(out[:, a:b].to(self.out.dtype), weight)
            old.copy_(torch.logaddexp(old, new))


def empty_sum(q: Tensor, value_head: int) -> tuple[Tensor, Tensor]:
    """Allocate the sum of attention of queries [B, s, H, D]: the output, and the log-sum-exp."""
    wide = wide_dtype(q.dtype)
    out = torch.empty((*q.shape[:3], value_head), dtype=wide, device=q.device)
    return out, torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=wide, device=q.device)


def add_sinks_(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Add a term to the sum of exponentials of each head, which no value belongs to.

    Args:
        out: The output [B, s, H, D], which is overwritten.
        lse: The log-sum-exp [B, H, s], which is overwritten.
        sinks: The logarithm of each head's term, [H].
    """
    new = torch.logaddexp(lse, sinks.to(lse.dtype)[None, :, None])
    out *= torch.exp(lse - new).transpose(1, 2).unsqueeze(-1)
    lse.copy_(new)


def sinks_gradient(gradient: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sinks, [H], from the final output, its gradient, and the final log-sum-exp."""
    # A sink only scales a head's output down, so its gradient depends on the output and the output's gradient.
    along = products("bshd,bshd->bhs", gradient.to(lse.dtype), out.to(lse.dtype))
    weights = torch.exp(sinks.to(lse.dtype)[None, :, None] - lse)
    return -(weights * along).sum((0, 2)).to(sinks.dtype)
