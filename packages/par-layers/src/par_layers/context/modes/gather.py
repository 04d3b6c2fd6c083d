"""Context parallelism by a gather: one exchange brings every rank the keys and values that its queries see.

Forward computes attention to the local keys during the exchange. Backward fetches the keys again (or has saved them),
computes their gradients first, and returns them to their ranks while it computes the gradients of the local keys. The
exchange is split into parts of the heads, which saves memory and overlaps one part with the computation of another.
Gradients are added in the order of ranks, so that the result does not depend on timing.

The same code computes attention on one rank, without an exchange.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from par_groups import copy_to_device

from ..._collectives import finish
from ..._tensor_cache import kept_in
from ..._torch_private import functional_collectives
from ..cost import num_gather_parts
from ..fetch import Fetch, transfers
from ..mask import Mask
from ..merge import RunningSoftmax, add_sinks_, empty_sum, sinks_gradient
from ..steps import AttentionOptions, AttentionPieces, Keys, Masks, SavedAttention, by_rows, halves, make_work, plain
from ..tokens import Ints, Tokens


@dataclass(frozen=True, eq=False)
class GatherPlan:
    """Plan of one rank for one mask and one split. It stores no group.

    Args:
        works: Pieces of each entry of documents, for the local keys (buffer 0) and the fetched keys (buffer 1).
        fetch: Exchange of keys.
        most: Number of tokens, over all entries of documents, that the rank with the most fetches; 0: no exchange.
        masks: Additive masks of the pieces.
    """

    works: tuple[AttentionPieces, ...]
    fetch: Fetch
    most: int
    masks: Masks = field(default_factory=Masks)
    _exchanges: dict[tuple[int, torch.device], "KeyExchange"] = field(default_factory=dict)

    def exchange(self, batch: int, device: torch.device) -> "KeyExchange":
        """Return the exchange for a batch of `batch` sequences."""
        return kept_in(self._exchanges, (batch, device), lambda: KeyExchange.of(self.fetch, batch, device))


def plan_gather(mask: Mask, tokens: Tokens, rank: int, block: int, joins: Collection[str] = ()) -> GatherPlan:
    """Plan attention for one rank. Pure.

    Args:
        mask: Mask of attention.
        tokens: Split of the sequence.
        rank: Index of the rank.
        block: Maximum number of queries of a piece that needs a mask.
        joins: Shapes of masks that the kernel computes in one call, as in `pieces`.
    """
    first, last = mask.intervals(tokens)
    table = transfers(first, last, tokens)
    fetch, mine = Fetch(table, rank), tokens.runs[rank]
    works = tuple(
        make_work(first[row], last[row], mine, (mine, fetch.keys[row]), block=block, joins=joins)
        for row in range(len(first))
    )
    return GatherPlan(works, fetch, most=int(table.received().max()))


@dataclass(frozen=True, eq=False)
class KeyExchange:
    """Exchange of keys and values, and of their gradients, for a batch with a fixed number of rows.

    Args:
        sent: Number of rows that this rank sends to each rank.
        received: Number of rows that this rank receives from each rank.
        buffered: Number of rows of the buffer of each row of the batch.
        index: Local rows that are sent to each rank, counted over [B, s].
        order: Row of the message for each row of the buffers; None if the orders are equal.
    """

    sent: list[int]
    received: list[int]
    buffered: list[int]
    index: tuple["slice | Tensor", ...]
    order: Tensor | None

    @classmethod
    def of(cls, fetch: Fetch, batch: int, device: torch.device) -> "KeyExchange":
        """Return the exchange of one rank, with its indices on a device."""
        sent, order = fetch.send_splits(batch), fetch.order(batch)
        parts = np.split(fetch.send_index(batch), np.cumsum(sent)[:-1])
        return cls(
            sent,
            fetch.receive_splits(batch),
            fetch.buffered(batch),
            tuple(_as_slice(part, device) for part in parts),
            None if order is None else copy_to_device(torch.from_numpy(order), device),
        )

    def start(self, k: Tensor, v: Tensor, group: str) -> list[Tensor]:
        """Start to fetch rows of keys and values [B, s, heads, D]; `finish` gives them."""
        flat_k, flat_v = k.flatten(0, 1), v.flatten(0, 1)
        head = k.shape[3]
        message = k.new_empty((sum(self.sent), k.shape[2], head + v.shape[3]))
        for place, index in zip(self._places, self.index, strict=True):
            # Keys and values travel as one message, because each message costs a latency.
            message[place, :, :head] = flat_k[index]
            message[place, :, head:] = flat_v[index]
        # The message is returned as well, because its memory must stay until the exchange has ended.
        return [message, functional_collectives.all_to_all_single.default(message, self.received, self.sent, group)]

    def finish(self, started: list[Tensor]) -> Tensor:
        """Return the fetched rows in the order of the buffers, [rows, heads, D + D]: keys next to values.

        Takes both tensors out of the list, so that neither lives longer than it is needed.
        """
        fetched = finish(started.pop())
        started.clear()
        return fetched if self.order is None else fetched.index_select(0, self.order)

    def by_rank(self, gradients: Tensor) -> Tensor:
        """Return gradients of the buffers, [rows, heads, D + D], grouped by the rank that receives them."""
        if self.order is None:
            return gradients
        message = torch.empty_like(gradients)
        # This is the inverse of the order in `finish`: gradients go back in the order in which the keys arrived.
        message[self.order] = gradients
        return message

    def start_home(self, gradients: Tensor, group: str) -> tuple[Tensor, Tensor]:
        """Start to send gradients home, [rows, heads, D + D], those for each rank together."""
        return gradients, functional_collectives.all_to_all_single.default(gradients, self.sent, self.received, group)

    def add_home(self, started: tuple[Tensor, Tensor], dk: Tensor, dv: Tensor) -> None:
        """Add the received gradients to those of local keys and values, [B, s, heads, D], in the order of ranks."""
        arrived = finish(started[1])
        flat_k, flat_v, head = dk.flatten(0, 1), dv.flatten(0, 1), dk.shape[3]  # views, as nobody else made them
        for place, index in zip(self._places, self.index, strict=True):
            if isinstance(index, slice):
                flat_k[index] += arrived[place, :, :head]
                flat_v[index] += arrived[place, :, head:]
            else:
                # The indices of one rank are distinct. Ranks are added one after the other, so the sum does not depend
                # on their timing.
                flat_k.index_add_(0, index, arrived[place, :, :head].to(dk.dtype))
                flat_v.index_add_(0, index, arrived[place, :, head:].to(dv.dtype))

    def rows(self, buffers: Tensor, works: Sequence[AttentionPieces]) -> Iterator[Tensor]:
        """Yield the buffer of each sequence of a batch, or one buffer if all sequences have the same documents."""
        if len(works) == 1:
            yield buffers.unflatten(0, (len(self.buffered), -1))
            return
        for part in buffers.split(self.buffered):
            yield part.unsqueeze(0)

    @cached_property
    def _places(self) -> list[slice]:
        """Slices of the message's rows for each rank."""
        ends = np.cumsum(self.sent).tolist()
        return [slice(end - number, end) for end, number in zip(ends, self.sent, strict=True)]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    *,
    plan: GatherPlan,
    how: AttentionOptions,
    options: "GatherOptions",
) -> Tensor:
    """Compute attention of local queries to all visible keys; [B, s, H, D] of q's dtype. Collective over the group.

    Args:
        q: Queries [B, s, H, D].
        k: Local keys [B, s, Hk, D].
        v: Local values [B, s, Hk, D].
        sinks: Logarithm of one more term of each head's sum of exponentials, [H]; None for no such term.
        plan: Plan of this rank.
        how: Kernels, masks and scale.
        options: Group, and options of the exchange.
    """
    result: Tensor = _GatherAttention.apply(q, k, v, sinks, plan, how, options)  # type: ignore[no-untyped-call]
    return result


@dataclass(frozen=True)
class GatherOptions:
    """Options of the exchange of keys and values.

    Args:
        group: Name of the group.
        parts: Maximum number of parts of the heads; None uses the default of `num_gather_parts`.
        keep: Whether the fetched keys and values are saved for backward.
    """

    group: str
    parts: int | None = None
    keep: bool = False

    def heads(self, q: Tensor, k: Tensor, v: Tensor, plan: GatherPlan) -> list[tuple[slice, slice]]:
        """Return the query heads and key heads of each part of the heads. Keys are fetched one part at a time.

        The parts are identical on all ranks. If no rank fetches keys, one part holds all heads.
        """
        # Without an exchange there is nothing to overlap, and one kernel call for all heads is fastest.
        if plan.most == 0:
            return [(slice(None), slice(None))]
        fetched = plan.most / len(plan.works) * k.shape[2] * (k.shape[3] + v.shape[3])
        number = num_gather_parts(fetched, k.shape[2], self.parts)
        mine, keys = q.shape[2] // number, k.shape[2] // number
        return [
            (slice(part * mine, (part + 1) * mine), slice(part * keys, (part + 1) * keys)) for part in range(number)
        ]


class _GatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - torch's signature
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        plan: GatherPlan,
        how: AttentionOptions,
        options: GatherOptions,
    ) -> Tensor:
        out, lse = empty_sum(q, v.shape[3])
        rows, parts, head = by_rows(plan.works, q.shape[0]), options.heads(q, k, v, plan), k.shape[3]
        exchange = None if plan.most == 0 else plan.exchange(q.shape[0], q.device)
        kept: list[Tensor] = []

        def start(number: int) -> list[Tensor] | None:
            """Start to fetch the heads of a part, if there is one."""
            if exchange is None or number == len(parts):
                return None
            _, heads = parts[number]
            return exchange.start(k[:, :, heads], v[:, :, heads], options.group)

        # The first exchange runs while attention to the local keys is computed, which needs no communication.
        started = start(0)
        for number, (heads, key_heads) in enumerate(parts):
            totals = [RunningSoftmax(out[row, :, heads], lse[row, heads], work.unseeing) for row, work in rows]
            for (row, work), total in zip(rows, totals, strict=True):
                how.forward(work.buffers[0], q[row, :, heads], k[row, :, key_heads], v[row, :, key_heads], total)
            if exchange is None or started is None:
                continue
            # The next part is requested before this one is computed, so that communication and computation overlap.
            fetched, started = exchange.finish(started), start(number + 1)
            for (row, work), total, both in zip(rows, totals, exchange.rows(fetched, plan.works), strict=True):
                how.forward(work.buffers[1], q[row, :, heads], both[..., :head], both[..., head:], total)
            if options.keep:
                kept.append(fetched)
        if sinks is not None:
            add_sinks_(out, lse, sinks)
        # Only the sum over pieces needs the wide dtype; saving it would double the memory of attention for 16-bit
        # models.
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, sinks, *kept)
        ctx.plan, ctx.how, ctx.options = plan, how, options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks, *kept = ctx.saved_tensors
        plan, how, options = ctx.plan, ctx.how, ctx.options
        head, saved = k.shape[3], SavedAttention(plain(gradient), q, k, v, out, lse)
        # The gradients of fetched keys are added to the local ones by index, which needs separate tensors.
        dq, dk, dv = saved.empty_gradients(beside=plan.most == 0)
        rows, parts = by_rows(plan.works, q.shape[0]), options.heads(q, k, v, plan)
        exchange = None if plan.most == 0 else plan.exchange(q.shape[0], q.device)
        queries = [[saved.queries(dq, row, heads) for row, _ in rows] for heads, _ in parts]
        keys = [[saved.keys(dk, dv, row, heads) for row, _ in rows] for _, heads in parts]

        # The local keys are computed in halves, to have work for each of the two transfers of a part: its keys here,
        # and their gradients back.
        def local(number: int, half: int) -> None:
            """Compute one half of the local keys, for the heads of a part."""
            for (_, work), of_row, buffer in zip(rows, queries[number], keys[number], strict=True):
                how.backward(halves(work.buffers[0])[half], of_row, buffer)

        def start(number: int) -> list[Tensor] | None:
            """Start to fetch the heads of a part again, if there is one, unless they were kept."""
            if exchange is None or kept or number == len(parts):
                return None
            _, heads = parts[number]
            under_way: list[Tensor] = exchange.start(k[:, :, heads], v[:, :, heads], options.group)
            return under_way

        def foreign(number: int, exchange: KeyExchange, fetched: Tensor) -> Tensor:
            """Return the gradients of the fetched keys of a part."""
            gradients = torch.empty(fetched.shape, dtype=dq.dtype, device=fetched.device)
            buffers = zip(exchange.rows(fetched, plan.works), exchange.rows(gradients, plan.works), strict=True)
            for (_, work), of_row, (both, of_both) in zip(rows, queries[number], buffers, strict=True):
                buffer = Keys.beside(both, of_both, head)
                how.backward(work.buffers[1], of_row, buffer)
                buffer.finish()
            return gradients.to(k.dtype)

        def come_home(number: int) -> None:
            """Add the gradients of a part's keys that other ranks have computed, after those of this rank."""
            if exchange is not None and number >= 0:
                _, heads = parts[number]
                exchange.add_home(homes.pop(number), dk[:, :, heads], dv[:, :, heads])

        homes: dict[int, tuple[Tensor, Tensor]] = {}
        started = start(0)
        for number in range(len(parts)):
            local(number, 0)  # while this part's keys are under way
            # The gradients of the part before have had a part's computation to arrive.
            come_home(number - 1)
            if exchange is not None:
                fetched = [kept[number] if started is None else exchange.finish(started)]
                started = start(number + 1)
                # `pop` drops the last reference to the fetched keys, so that they are free when the message of
                # gradients is made.
                gradients = exchange.by_rank(foreign(number, exchange, fetched.pop()))
                homes[number] = exchange.start_home(gradients, options.group)
                # The exchange holds the message until it has ended; this name would hold it for the rest of the
                # iteration.
                del gradients
            local(number, 1)  # while their gradients are
            for buffer in keys[number]:
                buffer.finish()
        come_home(len(parts) - 1)
        for of_row in chain(*queries):
            of_row.finish()
        of_sinks = None if sinks is None else sinks_gradient(gradient, out, lse, sinks)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), of_sinks, None, None, None


def _as_slice(index: Ints, device: torch.device) -> "slice | Tensor":
    """Return consecutive rows as a slice, which needs no copy, and other rows as an index tensor."""
    if not len(index):
        return slice(0, 0)
    if len(index) == index[-1] - index[0] + 1 and np.all(np.diff(index) == 1):
        return slice(int(index[0]), int(index[-1]) + 1)
    return copy_to_device(torch.from_numpy(index), device)
