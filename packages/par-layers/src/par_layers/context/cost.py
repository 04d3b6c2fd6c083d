"""What attention over several ranks costs: elements received, memory, and work, counted by the plan of each mode."""

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
"""The modes that cut a sequence, and the axes whose sizes their costs depend on."""

Outer = Literal["ring", "gather"]

PARTS, PART = 2, 1 << 20
"""Most parts that gather fetches in, where nobody says, and the least elements of one."""


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """One attention, over rows of a sequence that is cut across ranks.

    Args:
        tokens: Number of tokens, batch x sequence.
        width: Features of the queries, heads x their size.
        key_width: Features of the keys, key heads x their size; those of the values are as many.
        mask: What a token sees.
        documents: Lengths of the documents of a row, or of each row of the batch; None is one document a row.
        rows: Number of rows of the batch.
        heads: Number of query heads, which modes that cut heads need where ranks share key heads.
        key_heads: Number of key heads.
        cut: How the sequence is cut.
        multiple: What a rank's chunks of tokens are a multiple of, as sequence parallelism of the mode 1d asks for.
        masks: The masks by which rows are cut, those of all layers; None: `mask` alone.

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
    cut: Literal["auto", "contiguous", "zigzag", "balanced"] = "auto"
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
        """How rows are cut over ranks, or over groups of `inner` ranks each that exchange tokens for heads.

        Args:
            ranks: Number of ranks, or of groups. Rows are filled up where their length does not divide.
            inner: Number of ranks in each group.
        """
        tokens = cut_tokens(
            self.length,
            ranks * inner,
            self.cut,
            documents=self.documents,
            masks=(self.mask,) if self.masks is None else self.masks,
            multiple=self.multiple,
            pad=True,
            inner=inner,
        )
        return tokens.merged(inner)

    def flops(self, *, recompute: bool = False) -> int:
        """Floating-point operations of all ranks, forward and backward, of visible pairs alone.

        Args:
            recompute: Whether forward is computed once more in backward.
        """
        alone = self.over(1)
        pairs = attention_pairs(self.mask, alone, 0) * (self.rows // len(alone.documents))
        return (18 if recompute else 14) * pairs * self.width


@dataclass(frozen=True)
class AttentionMemory:
    """Elements that the rank with the most of them holds beside its own q, k, v, output and log-sum-exp.

    Args:
        forward: Elements in forward.
        backward: Elements in backward, before the gradients of q, k and v by tokens are there.
        kept: Elements that are kept from forward to backward.
        arriving: Elements of keys and values that arrive at a time, where they travel: around a ring those of one
            rank, else what is fetched, in all parts.
    """

    forward: Fraction
    backward: Fraction
    kept: Fraction
    arriving: Fraction


def attention_pairs(mask: Mask, tokens: Tokens, rank: int) -> int:
    """Number of pairs of query and key that a rank computes, summed over the rows that have documents of their own.

    Args:
        mask: What a token sees.
        tokens: How rows are cut; of rows that have the same documents, one is counted.
        rank: Which rank.
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
    """Elements that a rank receives in forward and backward, the mean over ranks.

    Args:
        mode: "gather", "ring", "ulysses" or "2d".
        sizes: Number of ranks on "sequence", or on "ring" and "ulysses".
        shape: The attention.
        keep: Whether gather keeps what it fetched in forward for backward.
        recompute: Whether forward is computed, and its keys fetched, once more in backward.
        outer: The mode between the groups that exchange tokens for heads, in mode "2d".

    Raises:
        ValueError: The mode has no formulas, a size is missing, or heads do not divide.
    """
    outside, inside, outer_mode = _factors(mode, sizes, outer)
    key_width = _key_width(shape, inside)
    tokens, rows = shape.over(outside, inside), shape.rows
    others = Fraction(tokens.local * rows * (inside - 1), inside)  # tokens of which a rank is sent its heads
    forward = backward = 2 * others * (Fraction(shape.width, inside) + key_width)  # q, k and v there, the output back
    table = _transfers(shape, outside, inside)
    if outer_mode == "gather":
        seen = Fraction(int(table.received().sum()), outside) * (rows // len(tokens.documents))
        forward += 2 * seen * key_width
        backward += (2 if keep else 4) * seen * key_width
    else:
        plan = hops(table)
        there = sum(plan.far)
        # Gradients set out where a chunk was seen first, and the last rank that saw it sends them home.
        home = sum(far - near + 1 for near, far in zip(plan.near, plan.far, strict=True) if far)
        one = Fraction(2 * tokens.local * rows, outside) * key_width
        forward += there * one
        backward += (there + home) * one
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
    """Elements that attention holds beside this rank's own q, k, v, output and log-sum-exp.

    A ring holds the keys and values that it computes and those that arrive, and in backward gradients of both, from
    three hops on also those that are on their way to the next rank. Gather holds what it sends while it fetches, and
    in backward gradients of what it fetched, and what comes home. Ulysses holds q, k, v and the output by heads, which
    it keeps for backward, and there their gradients.

    Args:
        mode: "gather", "ring", "ulysses" or "2d".
        sizes: Number of ranks on "sequence", or on "ring" and "ulysses".
        shape: The attention.
        parts: Number of groups of key heads that gather fetches one after the other.
        keep: Whether gather keeps what it fetched until backward.
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
        backward = 5 * arriving if hops(_transfers(shape, outside, inside)).steps > 2 else 4 * arriving
    return AttentionMemory(exchanged + max(forward, home), 2 * exchanged + backward, kept, arriving)


def _most(table: KeyTransfers, parts: int, *, several: bool, keep: bool) -> tuple[Fraction, Fraction, int]:
    """Number of keys that gather holds in forward, in backward, and that it fetches, each on the rank with the most.

    A message lives until what it brings has arrived, and a part arrives while the one before is computed. What was
    fetched is put in the order of tokens where it arrives in another. In backward the gradients of a part are at
    home before those of the next go.

    Args:
        table: What ranks fetch.
        parts: Number of parts.
        several: Whether there are several rows of the same documents.
        keep: Whether what was fetched is kept until backward.
    """
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
    """Number of parts that gather fetches one after the other, each with some of the key heads. Pure.

    A part travels while another is computed, and less is held at once; but every part calls the kernels again. So,
    where nobody says how many there may be, there are two, if each of them has a million elements.

    Args:
        elements: Number of elements of a row's keys and values that the rank which fetches most fetches.
        key_heads: Number of key heads that a rank computes with, which the parts must divide.
        most: Most parts.
    """
    if most is None:
        most = min(PARTS, max(1, int(elements // PART)))
    return next(number for number in range(min(most, key_heads), 0, -1) if key_heads % number == 0)


def _factors(mode: str, sizes: Mapping[str, int], outer: Outer) -> tuple[int, int, Outer]:
    """Ranks between which keys travel, ranks that exchange tokens for heads, and how keys travel."""
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
    """Features of the key heads that a rank of an exchange computes with, the mean over ranks.

    Ranks whose queries share a key head have it each.
    """
    if shape.heads is None or shape.key_heads is None:
        return Fraction(shape.key_width, inside)
    if shape.heads % inside:
        raise ValueError(
            f"heads {shape.heads} do not divide by {inside} ranks of ulysses; use mode 'ring' or 'gather', or '2d' "
            "with fewer ranks of ulysses"
        )
    each, shared = shape.heads // inside, shape.heads // shape.key_heads
    number = sum(((rank + 1) * each - 1) // shared - rank * each // shared + 1 for rank in range(inside))
    return Fraction(number * shape.key_width, inside * shape.key_heads)


def _transfers(shape: AttentionShape, outside: int, inside: int) -> KeyTransfers:
    """What ranks need of each other, which depends on masks, documents and the cut alone, not on heads and rows."""
    rows = len(shape.documents or ()) or 1
    plain = replace(shape, tokens=rows * shape.length, rows=rows, width=1, key_width=1, heads=None, key_heads=None)
    return _counted(plain, outside, inside)


@lru_cache(maxsize=64)
def _counted(shape: AttentionShape, outside: int, inside: int) -> KeyTransfers:
    tokens = shape.over(outside, inside)
    return transfers(*shape.mask.intervals(tokens), tokens)
