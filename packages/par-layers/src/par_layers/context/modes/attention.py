"""Attention over the ranks of a sequence, in the mode that a context has: one exchange, a ring, or heads for tokens."""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor

from par_groups import Axes, ProcessGroups

from ..arguments import axes_of
from ..kernels.choose import choose_kernels
from ..mask import Mask
from ..steps import AttentionOptions
from ..tokens import Tokens
from .gather import GatherOptions, GatherPlan, attend, plan_gather
from .ring import RingOptions, RingPlan, attend_ring, channels_of, plan_ring
from .ulysses import HeadShares, to_heads, to_tokens

PLANS = 32
"""Number of plans that a context keeps."""

CPU_BLOCK = 128
"""Maximum number of queries of a piece with a mask on a CPU, whose kernel computes what the mask hides, too."""


class SequenceAttention:
    """Attention of this rank's queries to the keys of all ranks of a sequence.

    Args:
        groups: Live groups; None for one device.
        axis: Axis of the topology whose ranks hold parts of the sequence.
        mode: "gather", "ring", "ulysses" or "2d", as in `Context`.
        options: Options of the mode in the topology.
        kernel: "auto", or "math" for attention by plain matmuls.
        block: Maximum number of queries of a piece with a mask.

    Attributes:
        inner_ranks: Number of neighbouring ranks that exchange tokens for heads; 1 without such an exchange.
    """

    def __init__(
        self,
        groups: ProcessGroups | None,
        axis: str,
        mode: str,
        options: Mapping[str, Any],
        *,
        kernel: str,
        block: int,
    ) -> None:
        self._groups, self._kernel, self._block = groups, kernel, block
        self._outer, self._inner, between = axes_of(groups, axis, mode, options)
        self.inner_ranks = 1 if groups is None or self._inner is None else groups.size(self._inner)
        self._is_ring = between == "ring"
        outer = name_of(groups, self._outer)
        self._gather = GatherOptions(outer, options.get("parts"), options.get("keep", False))
        self._ring = RingOptions(outer, outer)
        if groups is not None and self._is_ring and groups.size(self._outer) > 1:
            # Keys and gradients travel in opposite phases of backward. On one communicator, one of them would wait
            # behind the other.
            keys, gradients = channels_of(groups, self._outer)
            self._ring = RingOptions(keys.group_name, gradients.group_name)
        # Caches of this object and not of its class, so that plans end with it.
        self.plan = lru_cache(PLANS)(self._make_plan)
        self._shares = lru_cache(PLANS)(self._make_shares)

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
        """Compute attention. Collective over the sequence's ranks.

        Args:
            q: Queries [B, s, H, D].
            k: Keys [B, s, Hk, D]; H is a multiple of Hk.
            v: Values [B, s, Hk, D].
            sinks: Logarithm of one more term in each head's sum of exponentials, [H]; None: no such term.
            tokens: Split of the batch.
            mask: Tokens of its document that a token sees.
            scale: Factor of the scores of queries and keys; None: 1 / sqrt(D).

        Returns:
            Output [B, s, H, D].
        """
        # The plan depends on the kernel: some kernels compute masks in one call for which others need several pieces.
        kernels = choose_kernels(q, v, self._kernel, self._block)
        plan = self.plan(tokens, mask, kernels.joins)
        how = AttentionOptions(kernels, plan.masks, 1 / math.sqrt(q.shape[3]) if scale is None else scale)
        if self.inner_ranks == 1:
            return self._over_keys(q, k, v, sinks, plan, how)
        shares = self._shares(q.shape[2], k.shape[2])
        q, k, v = to_heads(q, k, v, shares)
        # Between the two exchanges a rank computes a slice of the heads, so it needs only the sinks of that slice.
        mine = None if sinks is None else sinks[shares.rank * shares.mine :][: shares.mine]
        return to_tokens(self._over_keys(q, k, v, mine, plan, how), shares)

    def _over_keys(
        self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: GatherPlan | RingPlan, how: AttentionOptions
    ) -> Tensor:
        """Compute attention over the ranks that exchange keys, by a ring or a gather."""
        # The kernels read the last dim as contiguous without looking at its stride, and would return garbage.
        q, k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (q, k, v))
        if isinstance(plan, RingPlan):
            return attend_ring(q, k, v, sinks, plan=plan, how=how, options=self._ring)
        return attend(q, k, v, sinks, plan=plan, how=how, options=self._gather)

    def _make_plan(self, tokens: Tokens, mask: Mask, joins: frozenset[str]) -> GatherPlan | RingPlan:
        # After ranks have exchanged tokens for heads, each of them holds the tokens of all neighbours.
        merged = tokens if self.inner_ranks == 1 else tokens.merged(self.inner_ranks)
        on_cpu = self._groups is None or self._groups.device.type == "cpu"
        block = min(self._block, CPU_BLOCK) if on_cpu else self._block
        rank = 0 if self._groups is None else self._groups.rank(self._outer)
        return (plan_ring if self._is_ring else plan_gather)(mask, merged, rank, block, joins)

    def _make_shares(self, heads: int, key_heads: int) -> HeadShares:
        """Return the heads of each rank between the two exchanges of tokens for heads."""
        rank = 0 if self._groups is None or self._inner is None else self._groups.rank(self._inner)
        return HeadShares(name_of(self._groups, self._inner or ()), self.inner_ranks, rank, heads, key_heads)


def name_of(groups: ProcessGroups | None, axes: Axes) -> str:
    """Return the name of the group of some axes; "" for a group of one rank.

    Plans and autograd graphs store the name instead of the group, because a graph that holds a group when the process
    ends aborts it.
    """
    return "" if groups is None or groups.size(axes) == 1 else groups[axes].group_name
