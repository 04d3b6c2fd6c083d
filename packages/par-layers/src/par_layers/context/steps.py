"""The pieces of one rank, ready to be computed: in their order, with their masks, one buffer of keys after another."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._tensor_cache import kept_in
from .columns import empty_like
from .kernels import Documents, Kernels, Visible, wide_dtype
from .merge import RunningSoftmax, Spans, runs, spans_in_order
from .pieces import AttentionPiece, Lengths, pieces, seen
from .tokens import Ints, Runs


@dataclass(frozen=True)
class PieceStep:
    """One piece, and when its turn is.

    Args:
        piece: The piece.
        spans: Which of its queries it is the first piece of.
        bounds: For a piece with an irregular mask the keys that its queries see, counted from its first one, int64
            [2, queries].
    """

    piece: AttentionPiece
    spans: Spans
    bounds: Ints | None


@dataclass(frozen=True)
class AttentionPieces:
    """What one rank computes for one row of a batch, or for all rows alike.

    Args:
        buffers: The steps against each buffer of keys, in the order in which the buffers are computed.
        unseeing: Ranges of queries that see nothing.
    """

    buffers: tuple[tuple[PieceStep, ...], ...]
    unseeing: tuple[tuple[int, int], ...]


def make_work(
    first: Ints,
    last: Ints,
    queries: Runs,
    buffers: Sequence[Runs],
    *,
    block: int,
    joins: Collection[str] = (),
) -> AttentionPieces:
    """Plans the pieces of local queries against several buffers of keys, which follow one another.

    Args:
        first: First token of the whole row that each token of it sees, int64 [padded].
        last: One more than the last token that each token sees, int64 [padded].
        queries: Ranges of tokens that the local queries are.
        buffers: For each buffer the ranges of tokens that it holds, ascending.
        block: Most queries of a piece that needs a mask.
        joins: What the kernel computes in one call, as `pieces` takes it.
    """
    found = [pieces(first, last, queries, keys, block=block, joins=joins) for keys in buffers]
    number = sum(stop - start for start, stop in queries)
    spans, unseeing = spans_in_order([piece for of_buffer in found for piece in of_buffer], number)
    remaining = iter(spans)
    result = []
    for keys, of_buffer in zip(buffers, found, strict=True):
        low, high = seen(first, last, queries, keys) if any(p.kind == "band" for p in of_buffer) else (None, None)
        steps = []
        for piece in of_buffer:
            bounds = None
            if piece.kind == "band" and low is not None and high is not None:
                rows = slice(piece.q0, piece.q1)
                bounds = np.stack([low[rows], high[rows]]).clip(piece.k0, piece.k1) - piece.k0
            steps.append(PieceStep(piece, next(remaining), bounds))
        result.append(tuple(steps))
    return AttentionPieces(tuple(result), unseeing)


@dataclass(frozen=True)
class Masks:
    """What kernels are told of pieces: additive masks, and where documents begin. Each is made once, when needed."""

    made: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    documents: dict[tuple[Any, ...], Documents] = field(default_factory=dict)

    def visible(self, step: PieceStep, like: Tensor, *, biased: bool) -> Visible:
        """What a kernel is told of a piece.

        Args:
            step: The piece.
            like: The queries [B, s, H, D], for the batch, the dtype and the device.
            biased: Whether the kernel needs an additive mask.
        """
        piece = step.piece
        bias = self.of(step, like) if biased else None
        documents = self._documents(piece.lengths, like) if piece.lengths else None
        return Visible(piece.kind, bias, piece.left, documents)

    def of(self, step: PieceStep, like: Tensor) -> Tensor:
        """The mask [queries, keys] of a piece, 0 where a query sees a key, else -inf; like a tensor."""
        queries, keys = step.piece.q1 - step.piece.q0, step.piece.k1 - step.piece.k0
        bounds = step.bounds
        if bounds is None:
            bounds = np.stack([np.arange(queries), np.full(queries, keys)])
        key = (like.device, like.dtype, queries, keys, bounds.tobytes())

        def make() -> Tensor:
            low, high = torch.from_numpy(bounds).to(like.device).unsqueeze(-1)
            places = torch.arange(keys, device=like.device)
            mask = torch.zeros((queries, keys), dtype=like.dtype, device=like.device)
            return mask.masked_fill_((places < low) | (places >= high), -torch.inf)

        return kept_in(self.made, key, make)

    def _documents(self, lengths: Lengths, like: Tensor) -> Documents:
        """Documents of each row of a batch, whose rows follow one another."""
        key = (like.device, len(like), lengths)

        def make() -> Documents:
            numbers = np.tile(np.array(lengths, np.int32), (len(like), 1))
            ends = np.concatenate([np.zeros((1, 2), np.int32), np.cumsum(numbers, 0, dtype=np.int32)])
            queries, keys = (torch.from_numpy(np.ascontiguousarray(x)).to(like.device) for x in ends.T)
            return Documents(queries, keys, *(int(most) for most in numbers.max(0)))

        return kept_in(self.documents, key, make)


@dataclass(frozen=True)
class AttentionOptions:
    """How pieces are computed, whatever the mode.

    Args:
        kernels: The kernels.
        masks: The additive masks.
        scale: What products of queries and keys are multiplied by.
    """

    kernels: Kernels
    masks: Masks
    scale: float

    def forward(self, steps: Sequence[PieceStep], q: Tensor, k: Tensor, v: Tensor, total: RunningSoftmax) -> None:
        """Computes pieces, and adds them up.

        Args:
            steps: The pieces.
            q: Queries [B, s, H, D].
            k: The buffer's keys [B, n, Hk, D].
            v: The buffer's values [B, n, Hk, D].
            total: What the pieces are added to.
        """
        for step in steps:
            q0, q1, k0, k1, kind, *_ = step.piece
            kernel = self.kernels.of(kind)
            visible = self.masks.visible(step, q, biased=kind in kernel.biased)
            out, lse = kernel.forward(q[:, q0:q1], k[:, k0:k1], v[:, k0:k1], visible=visible, scale=self.scale)
            total.add(q0, step.spans, out, lse)

    def backward(self, steps: Sequence[PieceStep], queries: "Queries", keys: "Keys") -> None:
        """Adds the gradients of pieces to those of queries and keys.

        Args:
            steps: The pieces.
            queries: The queries, and what is known of their attention.
            keys: The buffer's keys and values.
        """
        for step in steps:
            q0, q1, k0, k1, kind, *_ = step.piece
            rows, columns, kernel = slice(q0, q1), slice(k0, k1), self.kernels.of(kind)
            dq, dk, dv = kernel.backward(
                queries.gradient[:, rows],
                queries.q[:, rows],
                keys.k[:, columns],
                keys.v[:, columns],
                queries.out[:, rows],
                queries.lse[:, :, rows],
                visible=self.masks.visible(step, queries.q, biased=kind in kernel.biased),
                scale=self.scale,
            )
            queries.dq.add(q0, q1, dq)
            keys.dk.add(k0, k1, dk)
            keys.dv.add(k0, k1, dv)


class Gradient:
    """A gradient that pieces are added up in; the first one of each token is copied.

    Args:
        total: Where it is made, [B, n, heads, D], float32 at least; not read before it is written.
    """

    def __init__(self, total: Tensor) -> None:
        self._total = total
        self._begun = np.zeros(total.shape[1], bool)

    def add(self, start: int, stop: int, part: Tensor) -> None:
        """Adds the gradient of tokens from `start` to `stop`."""
        for begin, end, old in runs(self._begun[start:stop]):
            into, given = self._total[:, start + begin : start + end], part[:, begin:end]
            if old:
                into += given
            else:
                into.copy_(given)
        self._begun[start:stop] = True

    def finish(self) -> None:
        """Clears what no piece was added to."""
        for begin, end, old in runs(self._begun):
            if not old:
                self._total[:, begin:end] = 0


class Queries(NamedTuple):
    """Queries in backward.

    Args:
        gradient: The gradient of their output, [B, s, H, D].
        q: The queries [B, s, H, D].
        out: Their final output, of all pieces together, [B, s, H, D].
        lse: Their final log-sum-exp, [B, H, s].
        dq: Where their gradient is added up.
    """

    gradient: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor
    dq: Gradient

    def finish(self) -> None:
        """Clears the gradients of queries that see nothing."""
        self.dq.finish()


class Keys(NamedTuple):
    """A buffer of keys in backward.

    Args:
        k: The keys [B, n, Hk, D].
        v: The values [B, n, Hk, D].
        dk: Where the gradient of the keys is added up.
        dv: Where the gradient of the values is added up.
    """

    k: Tensor
    v: Tensor
    dk: Gradient
    dv: Gradient

    @classmethod
    def beside(cls, both: Tensor, gradients: Tensor, head: int) -> "Keys":
        """Keys and values that lie beside each other, [B, n, Hk, D + D], as messages have them."""
        return cls(both[..., :head], both[..., head:], Gradient(gradients[..., :head]), Gradient(gradients[..., head:]))

    def finish(self) -> None:
        """Clears the gradients of what no query has seen."""
        self.dk.finish()
        self.dv.finish()


class SavedAttention(NamedTuple):
    """What backward has of a whole attention on one rank.

    Args:
        gradient: The gradient of the output, [B, s, H, D].
        q: The queries [B, s, H, D].
        k: The local keys [B, s, Hk, D].
        v: The local values [B, s, Hk, D].
        out: The output.
        lse: The log-sum-exp, [B, H, s].
    """

    gradient: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor

    def empty_gradients(self, *, beside: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Room for the gradients of q, k and v, float32 at least.

        Args:
            beside: Whether they lie beside each other where q, k and v do, as ulysses sends them.
        """
        wide, inputs = wide_dtype(self.q.dtype), (self.q, self.k, self.v)
        if beside:
            dq, dk, dv = empty_like(inputs, wide)
        else:
            dq, dk, dv = (torch.empty(x.shape, dtype=wide, device=x.device) for x in inputs)
        return dq, dk, dv

    def queries(self, dq: Tensor, rows: slice, heads: slice = slice(None)) -> Queries:
        """Some rows of the batch, and some heads."""
        gradient, q, out, total = (x[rows, :, heads] for x in (self.gradient, self.q, self.out, dq))
        return Queries(gradient, q, out, self.lse[rows, heads], Gradient(total))

    def keys(self, dk: Tensor, dv: Tensor, rows: slice, heads: slice = slice(None)) -> Keys:
        """Some rows of the batch, and some key heads."""
        k, v, of_k, of_v = (x[rows, :, heads] for x in (self.k, self.v, dk, dv))
        return Keys(k, v, Gradient(of_k), Gradient(of_v))


Rows = slice
"""Rows of a batch that have the same documents."""


def by_rows(works: Sequence[AttentionPieces], batch: int) -> list[tuple[Rows, AttentionPieces]]:
    """The rows of a batch, with their work: all of them at once where they have the same documents."""
    if len(works) == 1:
        return [(slice(0, batch), works[0])]
    return [(slice(row, row + 1), work) for row, work in enumerate(works)]


def halves(steps: Sequence[PieceStep]) -> tuple[tuple[PieceStep, ...], tuple[PieceStep, ...]]:
    """Cuts steps into two parts of about the same work, for two times of waiting."""
    half, done = sum(step.piece.pairs for step in steps) / 2, 0
    for number, step in enumerate(steps):
        if done + step.piece.pairs / 2 >= half:
            return tuple(steps[:number]), tuple(steps[number:])
        done += step.piece.pairs
    return tuple(steps), ()


def plain(gradient: Tensor) -> Tensor:
    """A gradient as kernels take it: features next to each other, and each number in its own place."""
    return gradient if gradient.stride(-1) == 1 and 0 not in gradient.stride() else gradient.contiguous()
