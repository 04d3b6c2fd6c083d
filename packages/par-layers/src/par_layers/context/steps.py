"""Attention pieces of one rank in the order of computation, with their masks and their running sums."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from par_groups import copy_to_device

from .._tensor_cache import kept_in
from .columns import empty_like
from .kernels.choose import Kernels
from .kernels.kernel import Documents, Visible, wide_dtype
from .merge import RunningSoftmax, Spans, runs, spans_in_order
from .pieces import AttentionPiece, Lengths, pieces, seen
from .tokens import Ints, Runs


@dataclass(frozen=True)
class PieceStep:
    """One attention piece in the order of computation.

    Args:
        piece: The piece: ranges of queries and keys, and the kind of their mask.
        spans: Ranges of its queries for which it is the first piece, so that its result is copied and not added.
        bounds: First and last visible key of each query, relative to the piece's first key, int64 [2, queries]; None
            unless the mask is irregular.
    """

    piece: AttentionPiece
    spans: Spans
    bounds: Ints | None


@dataclass(frozen=True)
class AttentionPieces:
    """Pieces that one rank computes for one row of a batch, or for all rows if they have the same documents.

    Args:
        buffers: Steps for each buffer of keys, in the order of computation.
        unseeing: Ranges of queries that see no key.
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
    """Plan the pieces of local queries against consecutive buffers of keys.

    Args:
        first: First token that each token of the full row sees, int64 [padded].
        last: One more than the last token that each token sees, int64 [padded].
        queries: Token ranges of the local queries.
        buffers: Token ranges of each buffer's keys, ascending.
        block: Maximum number of queries of a piece that needs a mask.
        joins: Shapes of masks that the kernel computes in one call, as in `pieces`.
    """
    found = [pieces(first, last, queries, keys, block=block, joins=joins) for keys in buffers]
    number = sum(stop - start for start, stop in queries)
    spans, unseeing = spans_in_order([piece for of_buffer in found for piece in of_buffer], number)
    remaining = iter(spans)
    result = []
    for keys, of_buffer in zip(buffers, found, strict=True):
        # Only masked pieces need bounds, and most masks have none.
        low, high = seen(first, last, queries, keys) if any(p.kind == "band" for p in of_buffer) else (None, None)
        steps = []
        for piece in of_buffer:
            bounds = None
            if piece.kind == "band" and low is not None and high is not None:
                rows = slice(piece.q0, piece.q1)
                # A piece may cover a part of the keys, so bounds are clipped to it and counted from its first key.
                bounds = np.stack([low[rows], high[rows]]).clip(piece.k0, piece.k1) - piece.k0
            steps.append(PieceStep(piece, next(remaining), bounds))
        result.append(tuple(steps))
    return AttentionPieces(tuple(result), unseeing)


@dataclass(frozen=True)
class Masks:
    """Inputs of kernels about masks: additive masks and document boundaries, created on first use and cached."""

    made: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    documents: dict[tuple[Any, ...], Documents] = field(default_factory=dict)

    def visible(self, step: PieceStep, like: Tensor, *, biased: bool) -> Visible:
        """Return the description of a piece's mask that a kernel receives.

        Args:
            step: The piece.
            like: Queries [B, s, H, D], whose batch size, dtype and device apply.
            biased: Whether the kernel needs an additive mask.
        """
        piece = step.piece
        bias = self.of(step, like) if biased else None
        documents = self._documents(piece.lengths, like) if piece.lengths else None
        return Visible(piece.kind, bias, piece.left, documents)

    def of(self, step: PieceStep, like: Tensor) -> Tensor:
        """Return the additive mask of a piece: 0 for a visible key, -inf for a hidden key, [queries, keys].

        Args:
            step: The piece.
            like: Tensor whose dtype and device the mask gets.
        """
        queries, keys = step.piece.q1 - step.piece.q0, step.piece.k1 - step.piece.k0
        bounds = step.bounds
        if bounds is None:
            bounds = np.stack([np.arange(queries), np.full(queries, keys)])
        # Equal shapes of masks occur again in every layer and in many pieces, so masks are cached by their content.
        key = (like.device, like.dtype, queries, keys, bounds.tobytes())

        def make() -> Tensor:
            low, high = copy_to_device(torch.from_numpy(bounds), like.device).unsqueeze(-1)
            places = torch.arange(keys, device=like.device)
            mask = torch.zeros((queries, keys), dtype=like.dtype, device=like.device)
            return mask.masked_fill_((places < low) | (places >= high), -torch.inf)

        return kept_in(self.made, key, make)

    def _documents(self, lengths: Lengths, like: Tensor) -> Documents:
        """Return the documents of all rows of a batch, one row after another, as a kernel receives them."""
        key = (like.device, len(like), lengths)

        def make() -> Documents:
            numbers = np.tile(np.array(lengths, np.int32), (len(like), 1))
            ends = np.concatenate([np.zeros((1, 2), np.int32), np.cumsum(numbers, 0, dtype=np.int32)])
            queries, keys = (copy_to_device(torch.from_numpy(np.ascontiguousarray(x)), like.device) for x in ends.T)
            return Documents(queries, keys, *(int(most) for most in numbers.max(0)))

        return kept_in(self.documents, key, make)


@dataclass(frozen=True)
class AttentionOptions:
    """Options for the computation of pieces that are the same in every mode.

    Args:
        kernels: The kernels.
        masks: The additive masks.
        scale: Factor of the scores of queries and keys.
    """

    kernels: Kernels
    masks: Masks
    scale: float

    def forward(self, steps: Sequence[PieceStep], q: Tensor, k: Tensor, v: Tensor, total: RunningSoftmax) -> None:
        """Compute pieces and add their results to the running softmax.

        Args:
            steps: The pieces.
            q: Queries [B, s, H, D].
            k: The buffer's keys [B, n, Hk, D].
            v: The buffer's values [B, n, Hk, D].
            total: Running softmax that the results are added to.
        """
        for step in steps:
            q0, q1, k0, k1, kind, *_ = step.piece
            kernel = self.kernels.of(kind)
            visible = self.masks.visible(step, q, biased=kind in kernel.biased)
            out, lse = kernel.forward(q[:, q0:q1], k[:, k0:k1], v[:, k0:k1], visible=visible, scale=self.scale)
            total.add(q0, step.spans, out, lse)

    def backward(self, steps: Sequence[PieceStep], queries: "Queries", keys: "Keys") -> None:
        """Compute the gradients of pieces and add them to the gradients of queries, keys and values.

        Args:
            steps: The pieces.
            queries: The queries, with the final output and log-sum-exp of their attention.
            keys: The buffer's keys and values.
        """
        # Each piece receives the output and log-sum-exp of the full attention: only then is its part of the softmax
        # normalized over all keys, and the gradients of the pieces add up to the gradient of the full attention.
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
    """Gradient accumulator. It copies the first part of each token, so that the memory needs no zeros beforehand.

    Args:
        total: Uninitialized memory of the sum, [B, n, heads, D], float32 or float64.
    """

    def __init__(self, total: Tensor) -> None:
        self._total = total
        self._begun = np.zeros(total.shape[1], bool)

    def add(self, start: int, stop: int, part: Tensor) -> None:
        """Add the gradient of tokens `start` to `stop` (exclusive)."""
        for begin, end, old in runs(self._begun[start:stop]):
            into, given = self._total[:, start + begin : start + end], part[:, begin:end]
            if old:
                # The order of pieces is fixed by the plan, so the sum is the same in every run.
                into += given
            else:
                into.copy_(given)
        self._begun[start:stop] = True

    def finish(self) -> None:
        """Set the gradient of tokens without any piece to zero."""
        for begin, end, old in runs(self._begun):
            if not old:
                self._total[:, begin:end] = 0


class Queries(NamedTuple):
    """Queries in backward.

    Args:
        gradient: Gradient of the output, [B, s, H, D].
        q: Queries [B, s, H, D].
        out: Output of the full attention, over all pieces, [B, s, H, D].
        lse: Log-sum-exp of the full attention, [B, H, s].
        dq: Accumulator of the queries' gradient.
    """

    gradient: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor
    dq: Gradient

    def finish(self) -> None:
        """Set the gradients of queries that see no key to zero."""
        self.dq.finish()


class Keys(NamedTuple):
    """A buffer of keys in backward.

    Args:
        k: Keys [B, n, Hk, D].
        v: Values [B, n, Hk, D].
        dk: Accumulator of the keys' gradient.
        dv: Accumulator of the values' gradient.
    """

    k: Tensor
    v: Tensor
    dk: Gradient
    dv: Gradient

    @classmethod
    def beside(cls, both: Tensor, gradients: Tensor, head: int) -> "Keys":
        """Return the keys and values of a message, which concatenates them along the features.

        Args:
            both: Keys and values, [B, n, Hk, D + D].
            gradients: Memory of their gradients, of the same shape.
            head: Number of features of one head, D.
        """
        return cls(both[..., :head], both[..., head:], Gradient(gradients[..., :head]), Gradient(gradients[..., head:]))

    def finish(self) -> None:
        """Set the gradients of keys and values that no query sees to zero."""
        self.dk.finish()
        self.dv.finish()


class SavedAttention(NamedTuple):
    """Inputs of backward for a full attention on one rank.

    Args:
        gradient: Gradient of the output, [B, s, H, D].
        q: Queries [B, s, H, D].
        k: Local keys [B, s, Hk, D].
        v: Local values [B, s, Hk, D].
        out: Output, [B, s, H, D].
        lse: Log-sum-exp, [B, H, s].
    """

    gradient: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor

    def empty_gradients(self, *, beside: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return uninitialized memory for the gradients of q, k and v, float32 or float64.

        Args:
            beside: Whether the gradients share one tensor if q, k and v do, because ulysses sends them as one message.
        """
        wide, inputs = wide_dtype(self.q.dtype), (self.q, self.k, self.v)
        # Gradients that are laid out like the received message can be returned without a copy.
        if beside:
            dq, dk, dv = empty_like(inputs, wide)
        else:
            dq, dk, dv = (torch.empty(x.shape, dtype=wide, device=x.device) for x in inputs)
        return dq, dk, dv

    def queries(self, dq: Tensor, rows: slice, heads: slice = slice(None)) -> Queries:
        """Return the queries of a slice of the batch and a slice of the heads.

        Args:
            dq: Memory of the gradient of all queries.
            rows: Slice of the batch.
            heads: Slice of the query heads; all of them by default.
        """
        gradient, q, out, total = (x[rows, :, heads] for x in (self.gradient, self.q, self.out, dq))
        return Queries(gradient, q, out, self.lse[rows, heads], Gradient(total))

    def keys(self, dk: Tensor, dv: Tensor, rows: slice, heads: slice = slice(None)) -> Keys:
        """Return the local keys and values of a slice of the batch and a slice of the key heads.

        Args:
            dk: Memory of the gradient of all keys.
            dv: Memory of the gradient of all values.
            rows: Slice of the batch.
            heads: Slice of the key heads; all of them by default.
        """
        k, v, of_k, of_v = (x[rows, :, heads] for x in (self.k, self.v, dk, dv))
        return Keys(k, v, Gradient(of_k), Gradient(of_v))


Rows = slice
"""Rows of a batch that have the same documents."""


def by_rows(works: Sequence[AttentionPieces], batch: int) -> list[tuple[Rows, AttentionPieces]]:
    """Return pairs of rows of a batch and their pieces: one pair for all rows if they have the same documents.

    Args:
        works: Pieces of each row, or of all rows if there is only one entry.
        batch: Number of rows, B.
    """
    if len(works) == 1:
        return [(slice(0, batch), works[0])]
    return [(slice(row, row + 1), work) for row, work in enumerate(works)]


def halves(steps: Sequence[PieceStep]) -> tuple[tuple[PieceStep, ...], tuple[PieceStep, ...]]:
    """Split steps into two parts of about the same work, one to overlap with each of two transfers."""
    half, done = sum(step.piece.pairs for step in steps) / 2, 0
    for number, step in enumerate(steps):
        # The piece in the middle goes to the part that it fits better.
        if done + step.piece.pairs / 2 >= half:
            return tuple(steps[:number]), tuple(steps[number:])
        done += step.piece.pairs
    return tuple(steps), ()


def plain(gradient: Tensor) -> Tensor:
    """Return a gradient in a layout that kernels accept: contiguous features, and no expanded dims (stride 0)."""
    return gradient if gradient.stride(-1) == 1 and 0 not in gradient.stride() else gradient.contiguous()
