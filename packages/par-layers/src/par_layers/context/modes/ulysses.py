"""Context parallelism by an exchange of tokens for heads (Ulysses): each rank gets all tokens of some heads, and back.

Queries, keys and values are one message. If several ranks use one key head, each of them receives it, and backward sums
their gradients. Another mode computes the attention between the two exchanges. In mode "ulysses" this attention covers
the full sequence on each rank. In mode "2d" it runs over groups of ranks, which split a longer sequence.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..._collectives import finish, may_overwrite
from ..._tensor_cache import tensor_cache
from ..._torch_private import functional_collectives, group_of_name
from ..columns import columns, joined
from ..room import MessageBuffer


@dataclass(frozen=True)
class HeadShares:
    """Assignment of heads to ranks between the two exchanges.

    Args:
        group: Name of the group.
        ranks: Number of ranks.
        rank: This rank's index in the group.
        heads: Number of query heads, a multiple of `ranks`.
        key_heads: Number of key heads, a divisor of `heads`.
        room: Memory for messages, reused by each attention.
    """

    group: str
    ranks: int
    rank: int
    heads: int
    key_heads: int
    room: MessageBuffer = field(default_factory=MessageBuffer, compare=False, repr=False)

    @property
    def mine(self) -> int:
        """Number of query heads of each rank."""
        return self.heads // self.ranks

    def keys_of(self, rank: int) -> range:
        """Return the key heads that a rank's query heads use."""
        shared, first = self.heads // self.key_heads, rank * self.mine
        # Query heads of one rank may begin in the middle of a group that shares a key head, so neighbours may use the
        # same key head.
        return range(first // shared, (first + self.mine - 1) // shared + 1)

    @cached_property
    def copies(self) -> tuple[int, ...] | None:
        """Received key head for each key head of the attention; None if both are the same.

        Attention needs the same number of query heads for each key head. If this rank has only a part of the query
        heads of some key head, other key heads occur several times.
        """
        shared, keys = self.heads // self.key_heads, self.keys_of(self.rank)
        users = [
            [h // shared for h in range(self.rank * self.mine, (self.rank + 1) * self.mine)].count(key) for key in keys
        ]
        # Kernels support grouped heads if every key head has equally many query heads. Otherwise key heads are repeated
        # to make the groups equal.
        if len(set(users)) == 1:
            return None
        size = next(size for size in range(min(users), 0, -1) if all(number % size == 0 for number in users))
        return tuple(place for place, number in enumerate(users) for _ in range(number // size))


def to_heads(q: Tensor, k: Tensor, v: Tensor, shares: HeadShares) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange tokens for heads: return all tokens of this rank's heads, [B, S, H / ranks, D], and their key heads.

    Args:
        q: This rank's queries of all heads, [B, s, H, D].
        k: This rank's keys [B, s, Hk, D].
        v: This rank's values [B, s, Hk, D].
        shares: Assignment of heads to ranks.
    """
    result: tuple[Tensor, Tensor, Tensor] = _ToHeads.apply(q, k, v, shares)  # type: ignore[no-untyped-call]
    if shares.copies is None:
        return result
    index = _index(shares.copies, k.device)
    queries, keys, values = result
    return queries, keys.index_select(2, index), values.index_select(2, index)


def to_tokens(out: Tensor, shares: HeadShares) -> Tensor:
    """Exchange heads for tokens: return this rank's tokens of all heads, [B, s, H, D], from [B, S, H / ranks, D].

    Args:
        out: All tokens of this rank's heads.
        shares: Assignment of heads to ranks.
    """
    result: Tensor = _ToTokens.apply(out, shares)  # type: ignore[no-untyped-call]
    return result


@tensor_cache(maxsize=64)  # copied to the device once, not in every attention
def _index(copies: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(copies, device=device)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, shares: HeadShares) -> tuple[Tensor, Tensor, Tensor]:
        ctx.shares, ctx.shapes = shares, (q.shape, k.shape, v.shape)
        batch, s = q.shape[:2]
        widths = [_widths(shares, rank, q, k, v) for rank in range(shares.ranks)]
        ctx.widths = widths
        sent, sizes = [batch * s * sum(width) for width in widths], widths[shares.rank]
        # The message is only alive during the exchange, and every layer needs one of this size.
        with shares.room.of(sum(sent), q) as message:
            for rank, part in enumerate(message.split(sent)):
                keys = shares.keys_of(rank)
                key_heads = slice(keys.start, keys.stop)
                _pack(part, q[:, :, _heads(shares, rank)], k[:, :, key_heads], v[:, :, key_heads])
            arrived = _all_to_all(message, [s * batch * sum(sizes)] * shares.ranks, sent, shares.group)
        queries, keys, values = arrived.view(shares.ranks * s, batch, sum(sizes)).split(sizes, -1)
        return (
            queries.unflatten(-1, (-1, q.shape[3])).transpose(0, 1),
            keys.unflatten(-1, (-1, k.shape[3])).transpose(0, 1),
            values.unflatten(-1, (-1, v.shape[3])).transpose(0, 1),
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        shares, (of_q, of_k, of_v) = ctx.shares, ctx.shapes
        batch, s = of_q[:2]
        # The attention kernel has written the gradients into one tensor if it could, which is then the message.
        message = joined((dq, dk, dv))  # the tokens of rank 0 first
        if message is None:
            message = _pack(dq.new_empty(dq.numel() + dk.numel() + dv.numel()), dq, dk, dv)
        widths = ctx.widths
        received = [s * batch * sum(width) for width in widths]
        sent = [message.numel() // shares.ranks] * shares.ranks
        queries, keys, values = dq.new_empty(of_q), dk.new_empty(of_k), dv.new_empty(of_v)
        written = 0  # key heads that have a gradient; of one that ranks share theirs are summed
        with _arrived(message.flatten(), received, sent, shares) as arrived:
            for rank, (part, width) in enumerate(zip(arrived.split(received), widths, strict=True)):
                a, b, c = part.view(s, batch, sum(width)).transpose(0, 1).split(width, -1)
                places = shares.keys_of(rank)
                shared = written - places.start
                queries[:, :, _heads(shares, rank)] = a.unflatten(-1, (-1, of_q[3]))
                arriving_keys, arriving_values = b.unflatten(-1, (-1, of_k[3])), c.unflatten(-1, (-1, of_v[3]))
                for total, arriving in ((keys, arriving_keys), (values, arriving_values)):
                    total[:, :, places.start : written] += arriving[:, :, :shared]
                    total[:, :, written : places.stop] = arriving[:, :, shared:]
                # Ranks hold ascending key heads, so a key head that two ranks share is always the last of one and the
                # first of the next.
                written = places.stop
        return queries, keys, values, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, shares: HeadShares) -> Tensor:
        ctx.shares = shares
        return _tokens_of(out, shares)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        shares = ctx.shares
        batch, s, _, head = gradient.shape
        sizes = [s * batch * shares.mine * head] * shares.ranks
        with shares.room.of(sum(sizes), gradient) as message:
            for rank, part in enumerate(message.split(sizes)):
                _pack(part, gradient[:, :, _heads(shares, rank)])
            arrived = _all_to_all(message, sizes, sizes, shares.group)
        return arrived.view(shares.ranks * s, batch, shares.mine, head).transpose(0, 1), None


def _tokens_of(out: Tensor, shares: HeadShares) -> Tensor:
    batch, whole, mine, head = out.shape
    s = whole // shares.ranks
    sizes = [s * batch * mine * head] * shares.ranks
    with _arrived(out.transpose(0, 1).reshape(-1), sizes, sizes, shares) as arrived:  # one row is not copied
        by_rank = arrived.view(shares.ranks, s, batch, mine, head)
        tokens = out.new_empty(batch, s, shares.ranks, mine, head)
        return tokens.copy_(by_rank.permute(2, 1, 0, 3, 4)).flatten(2, 3)


def _pack(message: Tensor, *parts: Tensor) -> Tensor:
    """Fill a flat message with parts [B, tokens, heads, D], beside each other, token by token; return it."""
    batch, tokens = parts[0].shape[:2]
    for place, part in zip(columns(message.view(tokens, batch, -1), parts), parts, strict=True):
        place.copy_(part)
    return message


def _widths(shares: HeadShares, rank: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int, int]:
    """Return the number of features of a rank's heads, of queries, keys and values."""
    keys = len(shares.keys_of(rank))
    return shares.mine * q.shape[3], keys * k.shape[3], keys * v.shape[3]


def _heads(shares: HeadShares, rank: int) -> slice:
    return slice(rank * shares.mine, (rank + 1) * shares.mine)


def _all_to_all(message: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
    return finish(functional_collectives.all_to_all_single.default(message, received, sent, group))


@contextmanager
def _arrived(message: Tensor, received: list[int], sent: list[int], shares: HeadShares) -> Iterator[Tensor]:
    """Yield the result of an all-to-all for the duration of a `with` block.

    The message is released before the block, so that its memory is free during the attention.
    """
    if not may_overwrite():
        arrived = _all_to_all(message, received, sent, shares.group)
        del message
        yield arrived
        return
    with shares.room.of(sum(received), message) as arrived:
        dist.all_to_all_single(arrived, message, received, sent, group=group_of_name(shares.group))
        del message
        yield arrived
