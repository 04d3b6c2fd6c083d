"""Cost of context-parallel attention: elements received, memory and operations, counted from the plan of each mode."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import Literal

import numpy as np

from .balance import CAUSAL, cut_tokens
from .fetch import KeyTransfers, hops, transfers
from .mask import Mask
from .tokens import Documents, Tokens, as_documents

MODES = {"gather": ("sequence",), "ring": ("sequence",), "ulysses": ("sequence",), "2d": ("ring", "ulysses")}
"""Modes of context parallelism, with the axes whose sizes determine their cost."""

Outer = Literal["ring", "gather"]

PARTS, PART = 2, 1 << 20
"""Default maximum number of parts that gather fetches, and minimum number of elements of one part."""


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """Shape of one attention over sequences that are split over ranks.

    Args:
        tokens: Number of tokens, batch x sequence.
        width: Number of features of the queries, heads x head size.
        key_width: Number of features of the keys, key heads x head size. The values have as many.
        mask: Tokens that a token sees.
        documents: Lengths of the documents of all sequences, or of each sequence; None is one document a sequence.
        rows: Number of sequences of the batch.
        heads: Number of query heads. Modes that split heads need it if several ranks use one key head.
        key_heads: Number of key heads.
        split: Assignment of tokens to ranks, as in `Context`.
        multiple: Divisor of the length of each chunk, such as the number of sequence-parallel ranks of mode 1d.
        masks: Masks of all layers, which determine the split; None uses only `mask`.

    Raises:
        ValueError: Numbers do not divide, or documents do not fill a row.
    """

    tokens: int
    width: int
    key_width: int
    mask: Mask = CAUSAL[0]
    documents: Documents | None = None
    rows: int = 1
    heads: int | None = None
    key_heads: int | None = None
    split: Literal["auto", "contiguous", "zigzag", "balanced"] = "auto"
    multiple: int = 1
    masks: tuple[Mask, ...] | None = None

    def __post_init__(self) -> None:
        if self.rows < 1 or self.tokens < 1 or self.tokens % self.rows:
            raise ValueError(f"{self.tokens} tokens are not those of {self.rows} rows of the same length")
        documents = as_documents(self.documents, self.length)
        if len(documents) not in {1, self.rows}:
            raise ValueError(f"documents are those of {len(documents)} rows, but there are {self.rows}")
        object.__setattr__(self, "documents", documents)
        if (self.heads is None) != (self.key_heads is None):
            raise ValueError(f"give heads and key_heads together; they are {self.heads} and {self.key_heads}")
        if self.heads is not None and self.key_heads is not None and self.heads % self.key_heads:
            raise ValueError(f"heads {self.heads} are not a multiple of key_heads {self.key_heads}")

    @property
    def length(self) -> int:
        """Number of tokens of a row."""
        return self.tokens // self.rows

    def over(self, ranks: int, inner: int = 1) -> Tokens:
        """Return how sequences are split over ranks, or over groups of `inner` ranks that exchange tokens for heads.

        Args:
            ranks: Number of ranks or groups. Sequences whose length does not divide are padded.
            inner: Number of ranks in each group.
        """
        tokens = cut_tokens(
            self.length,
            ranks * inner,
            self.split,
            documents=self.documents,
            masks=(self.mask,) if self.masks is None else self.masks,
            multiple=self.multiple,
            pad=True,
            inner=inner,
        )
        return tokens.merged(inner)

    def flops(self, *, recompute: bool = False) -> int:
        """Count the floating-point operations of all ranks, forward and backward, for visible pairs only.

        Args:
            recompute: Whether backward recomputes the forward.
        """
        alone = self.over(1)
        pairs = attention_pairs(self.mask, alone, 0) * (self.rows // len(alone.documents))
        return (18 if recompute else 14) * pairs * self.width


@dataclass(frozen=True)
class AttentionMemory:
    """Peak memory of attention in elements, without q, k, v, output and log-sum-exp, on the rank that needs the most.

    Args:
        forward: Elements in forward.
        backward: Elements in backward, before ulysses exchanges the gradients of heads for gradients of tokens.
        kept: Elements that are saved from forward for backward.
        arriving: Elements of keys and values that arrive at a time: in a ring the keys and values of one rank, in a
            gather all parts of the fetched keys and values.
    """

    forward: Fraction
    backward: Fraction
    kept: Fraction
    arriving: Fraction


def attention_pairs(mask: Mask, tokens: Tokens, rank: int) -> int:
    """Count the pairs of query and key that a rank computes, summed over the sequences in `tokens`.

    Args:
        mask: Tokens that a token sees.
        tokens: Split of the sequences. Sequences with the same documents are one entry, and count once.
        rank: Index of the rank.
    """
    first, last = mask.intervals(tokens)
    index = tokens.index(rank)
    return int((last[:, index] - first[:, index]).sum())


def received(
    mode: str,
    sizes: Mapping[str, int],
    shape: AttentionShape,
    *,
    keep: bool = False,
    recompute: bool = False,
    outer: Outer = "ring",
) -> Fraction:
    """Count the elements that a rank receives in forward and backward, averaged over ranks.

    Args:
        mode: "gather", "ring", "ulysses" or "2d".
        sizes: Number of ranks on "sequence", or on "ring" and "ulysses".
        shape: The attention.
        keep: Whether gather saves the keys and values fetched in forward for backward.
        recompute: Whether backward recomputes the forward and fetches its keys again.
        outer: Mode between the groups that exchange tokens for heads, in mode "2d".

    Raises:
        ValueError: The mode has no formulas, a size is missing, or heads do not divide.
    """
    outside, inside, outer_mode = _factors(mode, sizes, outer)
    key_width = _key_width(shape, inside)
    tokens, rows = shape.over(outside, inside), shape.rows
    others = Fraction(tokens.local * rows * (inside - 1), inside)  # tokens of which a rank is sent its heads
    # Both passes exchange the same sizes: the gradients of what forward has sent.
    forward = backward = 2 * others * (Fraction(shape.width, inside) + key_width)  # q, k and v there, the output back
    table = _transfers(shape, outside, inside)
    if outer_mode == "gather":
        seen = Fraction(int(table.received().sum()), outside) * (rows // len(tokens.documents))
        forward += 2 * seen * key_width
        # Backward returns the gradients of keys and values. It also fetches both again, unless they were kept.
        backward += (2 if keep else 4) * seen * key_width
    else:
        plan = hops(table)
        there = sum(plan.far)
        # Gradients set out where a chunk was seen first, and the last rank that saw it sends them home.
        home = sum(far - near + 1 for near, far in zip(plan.near, plan.far, strict=True) if far)
        one = Fraction(2 * tokens.local * rows, outside) * key_width
        forward += there * one
        backward += (there + home) * one
    # Activation checkpointing repeats the whole forward, with its communication.
    return forward * (2 if recompute else 1) + backward


def attention_memory(
    mode: str,
    sizes: Mapping[str, int],
    shape: AttentionShape,
    *,
    parts: int = 1,
    keep: bool = False,
    outer: Outer = "ring",
) -> AttentionMemory:
    """Return the peak memory of attention in elements, without this rank's q, k, v, output and log-sum-exp.

    - A ring holds the current keys and values and the next ones. In backward it also holds gradients of both. If the
      ring has three or more steps, it also holds the gradients in flight to the next rank.
    - A gather holds its outgoing message while it fetches. In backward it also holds the gradients of the fetched keys
      and values, and the gradients that it receives for its own.
    - Ulysses holds q, k, v and the output by heads, saved for backward. In backward it also holds their gradients.

    Args:
        mode: "gather", "ring", "ulysses" or "2d".
        sizes: Number of ranks on "sequence", or on "ring" and "ulysses".
        shape: The attention.
        parts: Number of groups of key heads that gather fetches consecutively.
        keep: Whether gather saves the fetched keys and values for backward.
        outer: The mode between the groups that exchange tokens for heads, in mode "2d".

    Raises:
        ValueError: The mode has no formulas, a size is missing, or heads do not divide.
    """
    outside, inside, outer_mode = _factors(mode, sizes, outer)
    if parts < 1:
        raise ValueError(f"parts must be 1 at least; it is {parts}")
    tokens, rows = shape.over(outside, inside), shape.rows
    key_width = _key_width(shape, inside)
    exchanged = home = Fraction(0)
    if inside > 1:
        home = tokens.local * rows * Fraction(shape.width, inside)  # the output as it arrives, before it is by tokens
        exchanged = 2 * home + 2 * tokens.local * rows * key_width
    if outside == 1:
        return AttentionMemory(exchanged + home, 2 * exchanged, exchanged, Fraction(0))
    if outer_mode == "gather":
        copies = rows // len(tokens.documents)
        most = _most(_transfers(shape, outside, inside), parts, several=copies > 1, keep=keep)
        forward, backward, arriving = (2 * key_width * copies * number for number in most)
        kept = exchanged + keep * arriving
    else:
        arriving, kept = 2 * tokens.local * rows * key_width, exchanged
        forward = 2 * arriving
        # With more than two hops, a gradient is received while another one is sent and a third is computed.
        backward = 5 * arriving if hops(_transfers(shape, outside, inside)).steps > 2 else 4 * arriving
    return AttentionMemory(exchanged + max(forward, home), 2 * exchanged + backward, kept, arriving)


def _most(table: KeyTransfers, parts: int, *, several: bool, keep: bool) -> tuple[Fraction, Fraction, int]:
    """Count the keys that gather holds in forward, holds in backward and fetches, each on the rank with the most.

    Args:
        table: Keys that ranks fetch from each other.
        parts: Number of parts.
        several: Whether several sequences have the same documents.
        keep: Whether the fetched keys are saved for backward.
    """
    # A message stays allocated until the exchange is complete. The next part arrives while a part is computed. Keys
    # that arrive out of order are copied into the order of tokens. In backward, the gradients of a part are received
    # before the gradients of the next part are sent.
    received, sent = table.received(), table.sent()
    also = np.where(table.ordered(several), sent, np.maximum(received, sent))
    if parts == 1:
        forward = received + also
        backward = received + np.maximum(received, sent) + keep * np.minimum(received, sent)
    else:
        forward, backward = 2 * received + also, np.maximum(3 * received + sent, 2 * (received + sent))
        if keep:
            forward, backward = parts * received + also, (parts + 1) * received + sent
    return Fraction(int(forward.max()), parts), Fraction(int(backward.max()), parts), int(received.max())


def num_gather_parts(elements: float, key_heads: int, most: int | None = None) -> int:
    """Return the number of parts that gather fetches consecutively, each with some of the key heads. Pure.

    More parts overlap transfer and computation and need less memory, but each part calls the kernels again. The default
    is two parts if each of them has at least a million elements, else one.

    Args:
        elements: Number of elements of keys and values per sequence that the rank with the most fetches.
        key_heads: Number of key heads of a rank. The number of parts divides it.
        most: Maximum number of parts; None uses the default.
    """
    if most is None:
        # More parts overlap better, but a small message costs its latency.
        most = min(PARTS, max(1, int(elements // PART)))
    # A part consists of full key heads, so only divisors of their number are possible.
    return next(number for number in range(min(most, key_heads), 0, -1) if key_heads % number == 0)


def _factors(mode: str, sizes: Mapping[str, int], outer: Outer) -> tuple[int, int, Outer]:
    """Return the number of ranks that exchange keys, the number that exchange tokens for heads, and the keys' mode."""
    if mode not in MODES:
        raise ValueError(f"there are no formulas of attention for mode {mode!r}; there are for {', '.join(MODES)}")
    missing = [axis for axis in MODES[mode] if axis not in sizes]
    if missing:
        raise ValueError(f"mode {mode!r} needs the sizes of {', '.join(MODES[mode])}; {missing[0]!r} is missing")
    if mode == "2d":
        if outer not in {"ring", "gather"}:
            raise ValueError(f"outer must be 'ring' or 'gather'; it is {outer!r}")
        return sizes["ring"], sizes["ulysses"], outer
    ranks = sizes["sequence"]
    return (1, ranks, "gather") if mode == "ulysses" else (ranks, 1, "gather" if mode == "gather" else "ring")


def _key_width(shape: AttentionShape, inside: int) -> Fraction:
    """Return the number of key features per rank after the exchange of tokens for heads, averaged over ranks.

    A key head counts on each rank whose queries use it.
    """
    if shape.heads is None or shape.key_heads is None:
        return Fraction(shape.key_width, inside)
    if shape.heads % inside:
        raise ValueError(
            f"heads {shape.heads} do not divide by {inside} ranks of ulysses; use mode 'ring' or 'gather', or '2d' "
            "with fewer ranks of ulysses"
        )
    each, shared = shape.heads // inside, shape.heads // shape.key_heads
    # With fewer key heads than ranks, neighbours share a key head, and each of them receives it.
    number = sum(((rank + 1) * each - 1) // shared - rank * each // shared + 1 for rank in range(inside))
    return Fraction(number * shape.key_width, inside * shape.key_heads)


def _transfers(shape: AttentionShape, outside: int, inside: int) -> KeyTransfers:
    """Return the keys that ranks fetch from each other, for one sequence of each set of documents.

    Heads and repeated sequences do not change these keys, so shapes that differ only in them share one cache entry.
    """
    rows = len(shape.documents or ()) or 1
    plain = replace(shape, tokens=rows * shape.length, rows=rows, width=1, key_width=1, heads=None, key_heads=None)
    return _counted(plain, outside, inside)


@lru_cache(maxsize=64)
def _counted(shape: AttentionShape, outside: int, inside: int) -> KeyTransfers:
    tokens = shape.over(outside, inside)
    return transfers(*shape.mask.intervals(tokens), tokens)
