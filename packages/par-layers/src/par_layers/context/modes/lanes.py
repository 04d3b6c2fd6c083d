"""Attention whose bits do not depend on the number of ranks that split a sequence.

A sequence consists of lanes. The queries of each lane are one kernel call, against keys from the first to the last one
that they see. So each call has the same shapes on every topology. Each lane computes a gradient of all keys, and these
are added in a fixed binary tree: first over the lanes of a rank, which are one subtree, then over the ranks.
"""

import math
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from par_groups import LaneCounts, ProcessGroups, tree

from ..._collectives import all_gather_on, start_tree_reduce_scatter_on
from ..._torch_private import group_of_name
from ..kernels.choose import choose_kernels
from ..kernels.kernel import wide_dtype
from ..mask import Mask
from ..merge import RunningSoftmax, empty_sum, spans_in_order
from ..pieces import AttentionPiece
from ..steps import AttentionOptions, AttentionPieces, Gradient, Keys, Masks, PieceStep, SavedAttention, by_rows, plain
from ..tokens import Tokens
from .attention import PLANS, name_of

SEQUENCE = 1
"""Dim of the tokens of queries and keys [B, s, heads, D]."""


@dataclass(frozen=True, eq=False)
class LanePlan:
    """Plan of one rank for one mask and one split.

    Args:
        works: Pieces of each entry of documents, one for each lane of which a token sees something.
        length: Number of tokens of a lane.
        masks: Additive masks of the pieces.
    """

    works: tuple[AttentionPieces, ...]
    length: int
    masks: Masks = field(default_factory=Masks)


class LaneAttention:
    """Attention of this rank's queries to the keys of all ranks of a sequence, which are gathered.

    Args:
        groups: Live groups; None for one device.
        axis: Axis of the topology whose ranks hold parts of the sequence.
        lanes: Numbers of lanes.
        kernel: "auto", or "math" for attention by plain matmuls.
        block: Maximum number of queries of a block of the "math" kernel.

    Attributes:
        inner_ranks: Number of ranks that exchange tokens for heads: 1, because each rank has all tokens of its heads.
    """

    inner_ranks = 1

    def __init__(self, groups: ProcessGroups | None, axis: str, lanes: LaneCounts, *, kernel: str, block: int) -> None:
        self._rank = 0 if groups is None else groups.rank(axis)
        self._group = name_of(groups, axis)
        self._lanes, self._kernel, self._block = lanes.sequence, kernel, block
        self._plan = lru_cache(PLANS)(self._make_plan)

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        *,
        tokens: Tokens,
        mask: Mask,
        scale: float | None,
    ) -> Tensor:
        """Compute attention. Collective over the sequence's ranks. The arguments are those of `SequenceAttention`.

        Raises:
            ValueError: There are sinks, whose gradient is a sum over queries of other ranks.
        """
        if sinks is not None:
            raise ValueError(
                "attention sinks have no sum over lanes of a sequence so far; use one sequence lane with "
                "numerics='canonical'"
            )
        kernels = choose_kernels(q, v, self._kernel, self._block)
        plan = self._plan(tokens, mask)
        how = AttentionOptions(kernels, plan.masks, 1 / math.sqrt(q.shape[3]) if scale is None else scale)
        # The kernels read the last dim as contiguous without looking at its stride.
        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
        mixed: Tensor = _QueriesInLanes.apply(q, k, v, plan, how, self._group)  # type: ignore[no-untyped-call]
        return mixed

    def _make_plan(self, tokens: Tokens, mask: Mask) -> LanePlan:
        first, last = mask.intervals(tokens)
        length, rest = divmod(tokens.padded, self._lanes)
        runs = tokens.runs[self._rank]
        begin, end = runs[0]
        if rest or len(runs) > 1 or begin % length or end % length:
            raise ValueError(
                f"rows of {tokens.padded} tokens, of which this rank has {list(runs)}, do not consist of "
                f"{self._lanes} lanes; cut the batch with the context of the layers"
            )
        works = []
        for row in range(len(first)):
            pieces = []
            for start in range(begin, end, length):
                low, high = first[row, start : start + length], last[row, start : start + length]
                sees = high > low
                if sees.any():
                    at = start - begin
                    keys = int(low[sees].min()), int(high[sees].max())
                    pieces.append(AttentionPiece(at, at + length, *keys, "band"))
            spans, unseeing = spans_in_order(pieces, end - begin)
            bounds = np.stack([first[row, begin:end], last[row, begin:end]])
            steps = (
                PieceStep(piece, of_piece, bounds[:, piece.q0 : piece.q1].clip(piece.k0, piece.k1) - piece.k0)
                for piece, of_piece in zip(pieces, spans, strict=True)
            )
            works.append(AttentionPieces((tuple(steps),), unseeing))
        return LanePlan(tuple(works), length)


class _QueriesInLanes(torch.autograd.Function):
    """It saves local keys and values, and gathers them again in backward."""

    @staticmethod
    def forward(  # noqa: PLR0917 - torch's signature
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: LanePlan,
        how: AttentionOptions,
        group: str,
    ) -> Tensor:
        out, lse = empty_sum(q, v.shape[3])
        keys, values = _gathered(k, v, group)
        for row, work in by_rows(plan.works, q.shape[0]):
            total = RunningSoftmax(out[row], lse[row], work.unseeing)
            how.forward(work.buffers[0], q[row], keys[row], values[row], total)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.how, ctx.group = plan, how, group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        # To save them would cost each layer the memory of the full sequence.
        keys, values = _gathered(k, v, ctx.group)
        saved = SavedAttention(plain(gradient), q, keys, values, out, lse)
        wide, head = wide_dtype(q.dtype), k.shape[3]
        dq = torch.empty(q.shape, dtype=wide, device=q.device)
        # Of each lane a gradient of all keys, zero for those that it does not see: the terms of the tree.
        shape, lanes = (*keys.shape[:3], head + v.shape[3]), q.shape[SEQUENCE] // ctx.plan.length
        terms = [torch.zeros(shape, dtype=wide, device=q.device) for _ in range(lanes)]
        for row, work in by_rows(ctx.plan.works, q.shape[0]):
            queries = saved.queries(dq, row)
            for step in work.buffers[0]:
                term = terms[step.piece.q0 // ctx.plan.length][row]
                gradients = Gradient(term[..., :head]), Gradient(term[..., head:])
                ctx.how.backward((step,), queries, Keys(keys[row], values[row], *gradients))
            queries.finish()
        both = tree(terms)
        if ctx.group:
            # The tree over the ranks goes on from the sum over this rank's lanes, and leaves each rank the gradient
            # of its own keys.
            both = start_tree_reduce_scatter_on(both, group_of_name(ctx.group), SEQUENCE)()
        both = both.to(k.dtype)
        return dq.to(q.dtype), both[..., :head], both[..., head:], None, None, None


def _gathered(k: Tensor, v: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """Return the keys and values of the full sequence, in its order."""
    if not group:
        return k, v
    both = all_gather_on(torch.cat([k, v], -1), group_of_name(group), SEQUENCE)
    return both[..., : k.shape[3]], both[..., k.shape[3] :]
