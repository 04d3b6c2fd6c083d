"""Context parallelism by a ring: keys and values travel from rank to rank during the computation of the previous ones.

Keys travel up to the last rank that sees any of them. In backward their gradients follow one hop behind the keys. The
first foreign rank that sees the keys starts their gradient, and the last such rank sends it directly to its owner, so
that the ring needs one hop less than a full round. Keys and gradients have separate communicators, and each rank posts
its receives before its sends.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from par_groups import Axes, Channels, ProcessGroups, sendable

from ..._torch_private import group_of_name
from ..fetch import Hops, hops, transfers
from ..mask import Mask
from ..merge import RunningSoftmax, add_sinks_, empty_sum, sinks_gradient
from ..steps import AttentionOptions, AttentionPieces, Keys, Masks, SavedAttention, by_rows, make_work, plain
from ..tokens import Tokens

par_wait_axis = ""
"""See `par_groups.attributes.WAIT_AXIS`."""


@dataclass(frozen=True, eq=False)
class RingPlan:
    """Plan of one rank for one mask and one split, hop by hop. It stores no group.

    Args:
        works: Pieces of each entry of documents, for the keys of each hop. Hop 0 has the local keys.
        hops: Distances that the keys of each rank travel.
        rank: Index of the rank.
        ranks: Number of ranks.
        masks: Additive masks of the pieces.
    """

    works: tuple[AttentionPieces, ...]
    hops: Hops
    rank: int
    ranks: int
    masks: Masks = field(default_factory=Masks)

    def owner(self, hop: int) -> int:
        """Return the rank whose keys this rank holds after a number of hops."""
        return (self.rank - hop) % self.ranks

    def sends(self, hop: int) -> bool:
        """Return whether this rank forwards keys in a hop."""
        return self.hops.travels(self.owner(hop - 1), hop)

    def receives(self, hop: int) -> bool:
        """Return whether this rank receives keys in a hop."""
        return self.hops.travels(self.owner(hop), hop)

    def has_gradient(self, owner: int, hop: int) -> bool:
        """Return whether the gradient of `owner`'s keys exists, and has not returned to it, after a number of hops."""
        return 0 < self.hops.near[owner] <= hop <= self.hops.far[owner]


def plan_ring(mask: Mask, tokens: Tokens, rank: int, block: int, joins: Collection[str] = ()) -> RingPlan:
    """Plan attention for one rank. Pure.

    Args:
        mask: Mask of attention.
        tokens: Split of the sequence.
        rank: Index of the rank.
        block: Maximum number of queries of a piece that needs a mask.
        joins: Shapes of masks that the kernel computes in one call, as in `pieces`.
    """
    first, last = mask.intervals(tokens)
    travel, ranks = hops(transfers(first, last, tokens)), tokens.ranks
    keys = [tokens.runs[(rank - hop) % ranks] for hop in range(travel.steps + 1)]
    works = tuple(
        make_work(first[row], last[row], tokens.runs[rank], keys, block=block, joins=joins) for row in range(len(first))
    )
    return RingPlan(works, travel, rank, ranks)


@dataclass(frozen=True)
class RingOptions:
    """Names of the communicators around the ring.

    Args:
        keys: Communicator of keys and values.
        gradients: Communicator of their gradients.
    """

    keys: str
    gradients: str


def channels_of(groups: ProcessGroups, axes: Axes) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the communicators around the ring. If nothing declared them, every rank of the world makes them now."""
    try:
        first, second = groups.channels(axes, 2)
    except ValueError:
        # The topology did not declare the channels, so all ranks of the world come here together, when they make their
        # context.
        groups.add(Channels(axes, 2))
        first, second = groups.channels(axes, 2)
    return first, second


def attend_ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    *,
    plan: RingPlan,
    how: AttentionOptions,
    options: RingOptions,
) -> Tensor:
    """Compute attention of local queries to all keys that they see; [B, s, H, D] in q's dtype.

    Args:
        q: Queries [B, s, H, D].
        k: Local keys [B, s, Hk, D].
        v: Local values [B, s, Hk, D].
        sinks: Logarithm of one more term in each head's sum of exponentials, [H].
        plan: Plan of this rank.
        how: Options for the pieces.
        options: Names of the communicators.
    """
    result: Tensor = _Ring.apply(q, k, v, sinks, plan, how, options)  # type: ignore[no-untyped-call]
    return result


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - torch's signature
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        plan: RingPlan,
        how: AttentionOptions,
        options: RingOptions,
    ) -> Tensor:
        out, lse = empty_sum(q, v.shape[3])
        head, rows = k.shape[3], by_rows(plan.works, q.shape[0])
        totals = [RunningSoftmax(out[row], lse[row], work.unseeing) for row, work in rows]
        travelling = TravellingKeys(plan, k, v, options.keys)
        for hop in range(plan.hops.steps + 1):
            # The next keys are in flight while the current ones are used.
            here = travelling.start(hop + 1)
            for (row, work), total in zip(rows, totals, strict=True):
                if hop == 0:
                    how.forward(work.buffers[0], q[row], k[row], v[row], total)
                elif here is not None:
                    how.forward(work.buffers[hop], q[row], here[row, ..., :head], here[row, ..., head:], total)
            del here  # so that its memory is free when the next keys arrive
            travelling.finish()
        if sinks is not None:
            add_sinks_(out, lse, sinks)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.plan, ctx.how, ctx.options = plan, how, options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        plan, how = ctx.plan, ctx.how
        head, rows = k.shape[3], by_rows(plan.works, q.shape[0])
        saved = SavedAttention(plain(gradient), q, k, v, out, lse)
        dq, dk, dv = saved.empty_gradients()
        queries = [saved.queries(dq, row) for row, _ in rows]
        local = [saved.keys(dk, dv, row) for row, _ in rows]
        travelling = TravellingKeys(plan, k, v, ctx.options.keys)
        home = HomewardGradients(plan, ctx.options.gradients)
        for hop in range(plan.hops.steps + 1):
            here, own = travelling.start(hop + 1), None
            if hop == 0:
                for (_, work), of_row, keys in zip(rows, queries, local, strict=True):
                    how.backward(work.buffers[0], of_row, keys)
                    keys.finish()
            # Some ranks only forward keys that they do not see.
            elif here is not None and any(work.buffers[hop] for _, work in rows):
                own = torch.empty((*k.shape[:3], head + v.shape[3]), dtype=dq.dtype, device=k.device)
                for (row, work), of_row in zip(rows, queries, strict=True):
                    keys = Keys.beside(here[row], own[row], head)
                    how.backward(work.buffers[hop], of_row, keys)
                    keys.finish()
                del keys
            del here  # so that its memory is free when the next keys and gradients arrive
            travelling.finish()
            # Gradients follow the keys one hop later, because a rank adds its own gradient first.
            if hop > 0:
                home.pass_on(hop, own, k, v)
        for of_row in queries:
            of_row.finish()
        # The gradients of the local keys arrive last, after the local ones are complete.
        arrived = home.arrived()
        if arrived is not None:
            arrived = arrived.to(dk.device)
            dk += arrived[..., :head]
            dv += arrived[..., head:]
        of_sinks = None if sinks is None else sinks_gradient(gradient, out, lse, sinks)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), of_sinks, None, None, None


class TravellingKeys:
    """Keys and values in flight around the ring, in one direction.

    Args:
        plan: Plan of this rank, with the number of hops.
        k: Local keys [B, s, Hk, D].
        v: Local values [B, s, Hk, D].
        group: Name of the communicator.
    """

    def __init__(self, plan: RingPlan, k: Tensor, v: Tensor, group: str) -> None:
        self._plan, self._group, self._device = plan, group, k.device
        self._shape, self._dtype = (*k.shape[:3], k.shape[3] + v.shape[3]), k.dtype
        self._own: tuple[Tensor, Tensor] | None = (k, v)
        self._here: Tensor | None = None  # after the first hop
        self._next: Tensor | None = None
        self._sent: Tensor | None = None  # alive until it was waited for
        self._works: list[dist.Work] = []

    def start(self, hop: int) -> Tensor | None:
        """Start a hop, and give what the one before brought: [B, s, Hk, D + D], keys and values beside each other.

        None where it brought nothing.
        """
        plan, group, batch = self._plan, group_of_name(self._group) if self._group else None, []
        own, here, self._own = self._own, self._here, None
        if plan.receives(hop):
            device = sendable(torch.empty(0, device=self._device), group).device
            self._next = torch.empty(self._shape, dtype=self._dtype, device=device)
            # Receives are posted before sends, so that an arriving message always finds its buffer.
            batch.append(_receive(self._next, (plan.rank - 1) % plan.ranks, group))
        if plan.sends(hop):
            # Only the first hop sends the rank's own keys; later hops forward what has arrived.
            message = here if own is None else torch.cat(own, -1)
            if message is None:
                raise RuntimeError(f"rank {plan.rank} holds no keys to send in hop {hop}; a bug of par-layers")
            self._sent = sendable(message, group)
            batch.append(_send(self._sent, (plan.rank + 1) % plan.ranks, group))
        self._works = dist.batch_isend_irecv(batch) if batch else []
        return here

    def finish(self) -> None:
        """Wait for the hop that was started."""
        for work in self._works:
            work.wait()
        self._here = None if self._next is None else self._next.to(self._device)
        self._next = self._sent = None
        self._works = []  # which hold what was sent


class HomewardGradients:
    """Gradients of keys and values in flight to the keys' own ranks, one hop behind the keys.

    Args:
        plan: Plan of this rank, with the number of hops.
        group: Name of the communicator.
    """

    def __init__(self, plan: RingPlan, group: str) -> None:
        self._plan, self._group = plan, group
        self._works: list[dist.Work] = []
        self._sent: Tensor | None = None  # alive until it was waited for
        self._incoming: Tensor | None = None
        self._home: Tensor | None = None

    def pass_on(self, hop: int, own: Tensor | None, k: Tensor, v: Tensor) -> None:
        """Add this rank's gradients to those that arrived with the keys of a hop, and send them on, or home.

        Args:
            hop: Number of hops that the keys have made.
            own: This rank's gradients of them, [B, s, Hk, D + D], or None.
            k: Local keys, for the shape and dtype of messages.
            v: Local values.
        """
        plan, total = self._plan, own
        # The gradients that arrived with the keys of this hop are needed now, and the previous send must have left its
        # memory.
        self._wait()
        if self._incoming is not None:
            received = self._incoming.to(k.device)
            total = received if own is None else own.add_(received)
            self._incoming = None
            del received
        group, batch = group_of_name(self._group), []
        owner, following = plan.owner(hop), (plan.rank - 1 - hop) % plan.ranks
        like = sendable(k.new_empty((*k.shape[:3], k.shape[3] + v.shape[3])), group)
        # The next keys to arrive already have a gradient if a rank between their owner and this one has seen them.
        if plan.has_gradient(following, hop) and hop < plan.hops.far[following]:
            self._incoming = torch.empty_like(like)
            batch.append(_receive(self._incoming, (plan.rank - 1) % plan.ranks, group))
        # The last rank that sees the local keys is this many hops away, and sends their gradient straight back.
        if hop == plan.hops.far[plan.rank]:
            self._home = torch.empty_like(like)
            batch.append(_receive(self._home, (plan.rank + hop) % plan.ranks, group))
        if plan.has_gradient(owner, hop) and total is not None:
            self._sent = sendable(total.to(k.dtype), group)
            # The last rank that sees the keys sends the sum directly to their owner, instead of around the rest of the
            # ring.
            peer = (plan.rank + 1) % plan.ranks if hop < plan.hops.far[owner] else owner
            batch.append(_send(self._sent, peer, group))
        self._works = dist.batch_isend_irecv(batch) if batch else []

    def arrived(self) -> Tensor | None:
        """Wait for all messages, and give the gradients that came home, if any rank saw the local keys."""
        self._wait()
        return self._home

    def _wait(self) -> None:
        for work in self._works:  # each of them once, as gloo waits for ever for what was waited for
            work.wait()
        self._works, self._sent = [], None


def _receive(into: Tensor, peer: int, group: dist.ProcessGroup | None) -> dist.P2POp:
    return dist.P2POp(dist.irecv, into, group=group, group_peer=peer)


def _send(message: Tensor, peer: int, group: dist.ProcessGroup | None) -> dist.P2POp:
    return dist.P2POp(dist.isend, message, group=group, group_peer=peer)
