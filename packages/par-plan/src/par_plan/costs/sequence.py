"""Context parallelism: traffic, memory and work of attention over a split sequence, and states of recurrent layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from par_groups import Topology, axis_size
from par_layers import AttentionShape, Mask, attention_memory, attention_pairs, layer_cost, num_gather_parts

from ..experts.costs import all_reduced
from ..shape import tensor_split
from .traffic import AxisTraffic

CAUSAL = Mask(causal=True)
"""A token sees those before it, and itself."""


@dataclass(frozen=True, kw_only=True)
class SequenceSplit:
    """Assignment of a row's tokens to ranks, and the mode of attention between ranks. The default is one rank.

    Args:
        mode: "gather", "ring", "ulysses" or "2d".
        ranks: Number of ranks of a sequence.
        inner: Number of neighbouring ranks that exchange tokens for heads; all ranks in "ulysses", 1 in "gather" and
            "ring".
        outer: Mode in which groups of these neighbours exchange keys and values.
        how: Assignment of tokens to ranks, such as "zigzag"; "auto" for the assignment with the fastest attention.
        parts: Maximum number of parts in which heads are fetched; None: the number that par-layers computes.
        keep: Whether fetched keys and values are kept until backward.
        multiple: Divisor of a rank's runs of tokens, so that sequence parallelism can split them further.
    """

    mode: str = "gather"
    ranks: int = 1
    inner: int = 1
    outer: Literal["ring", "gather"] = "gather"
    how: Literal["auto", "contiguous", "zigzag", "balanced"] = "auto"
    parts: int | None = None
    keep: bool = False
    multiple: int = 1

    @property
    def groups(self) -> int:
        """Number of groups of ranks between which keys and values travel."""
        return self.ranks // self.inner

    @property
    def label(self) -> str:
        """Text for a table, such as "ring 4", "2d 2x4", or "-" on one rank."""
        if self.ranks == 1:
            return "-"
        sizes = f"{self.groups}x{self.inner}" if self.mode == "2d" else str(self.ranks)
        return f"{self.mode} {sizes}{' gather' if self.mode == '2d' and self.outer == 'gather' else ''}"


def sequence_split(topology: Topology) -> SequenceSplit:
    """Return how a topology splits a sequence.

    Raises:
        ValueError: There are no formulas for its mode, or for its tensor mode.
    """
    ranks = axis_size(topology, "sequence")
    if ranks == 1:
        return SequenceSplit()
    split, (mode, options) = tensor_split(topology), topology.modes.get("sequence", ("gather", {}))
    common: dict[str, Any] = {
        "mode": mode,
        "ranks": ranks,
        "how": options.get("split", "auto"),
        "parts": options.get("parts"),
        "keep": options.get("keep", False),
        "multiple": split.ranks if split.sequence else 1,
    }
    if mode == "gather":
        return SequenceSplit(**common)
    if mode == "ring":
        return SequenceSplit(**common, outer="ring")
    if mode == "ulysses":
        return SequenceSplit(**common, inner=ranks)
    if mode == "2d":
        return SequenceSplit(**common, inner=topology.axes["ulysses"], outer=options.get("outer", "ring"))
    raise ValueError(f"there are no formulas for sequence mode {mode!r}; there are for gather, ring, ulysses, 2d")


@dataclass(frozen=True, kw_only=True)
class RankAttention:
    """One attention of a model, as one tensor rank computes it.

    Args:
        heads: Number of query heads.
        key_heads: Number of key heads, which is the number of value heads.
        width: Mean number of features of a query head and an output head.
        key_width: Mean number of features of a key head and a value head.
        mask: Tokens that a token sees.
    """

    heads: int
    key_heads: int
    width: int
    key_width: int
    mask: Mask = CAUSAL


@dataclass(frozen=True, kw_only=True)
class AttentionTraffic:
    """Traffic and memory of one attention over sequence ranks, in elements per row of a microbatch.

    All figures count forward and backward, and are means over ranks unless stated otherwise.

    Args:
        keys: Keys and values that a rank receives, and their gradients.
        most_keys: Keys, values and their gradients that the rank with the most traffic receives.
        key_messages: Number of exchanges, or of messages around a ring, for a microbatch.
        heads: Queries, keys, values and outputs that a rank receives in exchange of tokens for heads.
        head_messages: Number of exchanges of tokens for heads for a microbatch.
        kept: Largest number of elements saved for backward, in addition to attention over a rank's own tokens.
        held: Largest number of elements held during backward, in addition to `kept`.
        work: Work of the busiest rank, relative to the mean for a row of one document.
    """

    keys: float = 0.0
    most_keys: float = 0.0
    key_messages: float = 0.0
    heads: float = 0.0
    head_messages: int = 0
    kept: float = 0.0
    held: float = 0.0
    work: float = 1.0


@lru_cache(maxsize=4096)
def local_tokens(sequence: SequenceSplit, length: int, documents: tuple[int, ...] | None = None) -> int:
    """Return the number of tokens of a row on each rank, with padding if they do not divide.

    Args:
        sequence: Split of the sequence over ranks.
        length: Number of tokens in a row.
        documents: Lengths of the documents of a row; None: the row is one document.
    """
    if sequence.ranks == 1:
        return length
    # The padding of tokens depends only on the split, so the smallest attention that the split accepts is enough.
    alone = RankAttention(heads=sequence.inner, key_heads=sequence.inner, width=1, key_width=1)
    return _shape(sequence, alone, length, documents).over(sequence.groups, sequence.inner).local // sequence.inner


@lru_cache(maxsize=4096)
def reach(
    sequence: SequenceSplit,
    attention: RankAttention,
    length: int,
    documents: tuple[int, ...] | None = None,
    *,
    again: bool = False,
) -> AttentionTraffic:
    """Return the traffic and memory of one attention.

    Args:
        sequence: Split of the sequence over ranks.
        attention: Attention of one rank.
        length: Number of tokens in a row.
        documents: Lengths of the documents of a row; None: the row is one document.
        again: Whether backward recomputes the forward, as activation checkpointing does. Default: False.

    Raises:
        ValueError: The heads do not divide, or documents do not fill the row.
    """
    shape = _shape(sequence, attention, length, documents)
    busiest = _work(shape, sequence)
    if sequence.ranks == 1:
        return AttentionTraffic(work=busiest)
    groups, inner = sequence.groups, sequence.inner
    exchanged = to_heads = 0.0  # held after an exchange of tokens for heads, and received in all of them
    if inner > 1:
        of_group = {"sequence": inner}
        exchanged = float(attention_memory("ulysses", of_group, shape).kept) / groups
        to_heads = float(layer_cost("ulysses", of_group, shape, recompute=again).each) / groups
    sizes = {"ring": groups, "ulysses": inner}
    received = float(layer_cost("2d", sizes, shape, keep=sequence.keep, recompute=again, outer=sequence.outer).each)
    taken = attention_memory("2d", sizes, shape, outer=sequence.outer)
    arriving, keys = float(taken.arriving), received - to_heads
    most, kept, messages = keys, 0.0, 0.0
    if sequence.outer == "ring":
        messages = keys / arriving if arriving else 0.0  # of keys and values, or their gradients, in one
    elif keys:
        parts = num_gather_parts(arriving, max(1, attention.key_heads // inner), sequence.parts)
        # Keys and values arrive for forward, for a recomputed forward, and for backward unless they were kept. Their
        # gradients return once.
        fetches, homes = 1 + again + (not sequence.keep), 1
        most, messages = arriving * (fetches + homes), parts * (fetches + homes)
        kept = arriving if sequence.keep else 0.0
        taken = attention_memory("2d", sizes, shape, parts=parts, keep=sequence.keep, outer=sequence.outer)
    held = float(taken.backward) - 2 * exchanged - kept
    if inner > 1:  # queries, keys, values and outputs by heads; outputs by tokens are what the next layer keeps
        own = (attention.heads * attention.width + 2 * attention.key_heads * attention.key_width) * length
        kept += exchanged - own / sequence.ranks
    return AttentionTraffic(
        keys=keys,
        most_keys=most,
        key_messages=messages,
        heads=to_heads,
        # Each pass exchanges tokens for heads before attention, and heads for tokens after it.
        head_messages=(6 if again else 4) * (inner > 1),
        kept=kept,
        held=held + exchanged,
        work=busiest,
    )


def crossed_edges(sequence: SequenceSplit, length: int, documents: tuple[int, ...] | None = None) -> int:
    """Return the number of borders between neighbouring ranks that are inside a document.

    Args:
        sequence: Split of the sequence over ranks, which hold consecutive tokens.
        length: Number of tokens in a row.
        documents: Lengths of the documents of a row; None: the row is one document.
    """
    local = local_tokens(sequence, length, documents)
    # The padding at the end is one more document.
    ends = {*accumulate(documents or (length,))}
    return sum(rank * local not in ends for rank in range(1, sequence.ranks))


def sequence_traffic(
    sequence: SequenceSplit,
    attentions: Mapping[RankAttention, int],
    states: Sequence[float],
    length: int,
    documents: tuple[int, ...] | None,
    microbatches: Mapping[float, int],
    *,
    width: int,
    again: bool,
    loss: bool,
) -> list[AxisTraffic]:
    """Return the traffic over the sequence axis, the mean over its ranks.

    Attention exchanges keys and values, or tokens for heads. Recurrent layers pass states, and the loss is summed.

    Args:
        sequence: Split of the sequence over ranks.
        attentions: Number of this rank's layers with each attention.
        states: Bytes per row of the states that each of this rank's recurrent layers passes on.
        length: Number of tokens in a row.
        documents: Lengths of the documents of a row; None: the row is one document.
        microbatches: Number of microbatches, by the number of their rows whose attention this rank computes.
        width: Size of a number, in bytes.
        again: Whether backward recomputes the forward, as activation checkpointing does.
        loss: Whether the rank computes the loss.
    """
    if sequence.ranks == 1:
        return []
    rows, times = sum(size * number for size, number in microbatches.items()), sum(microbatches.values())
    found = [(reach(sequence, one, length, documents, again=again), number) for one, number in attentions.items()]
    transfers = []
    for what, operations, elements in (
        ("keys and values", _sum_of(found, "key_messages"), _sum_of(found, "keys")),
        ("tokens for heads", _sum_of(found, "head_messages"), _sum_of(found, "heads")),
    ):
        if operations:
            transfers.append(
                AxisTraffic(axis="sequence", what=what, operations=operations * times, bytes=elements * rows * width)
            )
    if states:
        # Forward passes states to the right, and backward passes their gradients to the left. No state crosses the
        # border of a document.
        messages = crossed_edges(sequence, length, documents) * (2 + again) / sequence.ranks
        transfers.append(
            AxisTraffic(
                axis="sequence",
                what="states",
                operations=messages * len(states) * times,
                bytes=messages * sum(states) * rows,
            )
        )
    if loss:  # its sum and the number of targets, in fp64
        received = all_reduced(sequence.ranks, 2 * 8)
        transfers.append(AxisTraffic(axis="sequence", what="sums of losses", operations=times, bytes=received * times))
    return transfers


def _sum_of(found: list[tuple[AttentionTraffic, int]], name: str) -> float:
    total: float = sum(getattr(one, name) * number for one, number in found)
    return total


def _work(shape: AttentionShape, sequence: SequenceSplit) -> float:
    """Return the work of the busiest group of ranks; see `AttentionTraffic.work`."""
    alone = replace(shape, documents=None)
    if sequence.ranks == 1 and shape.documents == alone.documents:
        return 1.0
    tokens, whole = shape.over(sequence.groups, sequence.inner), alone.over(1)
    first, last = shape.mask.intervals(tokens)
    # With prefix sums over the tokens, the pairs of a run are the difference of two numbers.
    before = np.concatenate([[0], np.cumsum((last - first).sum(0))])
    # A rank computes the attention of its own queries only, so its work is the number of pairs that they see.
    most = max(sum(int(before[stop] - before[start]) for start, stop in runs) for runs in tokens.runs)
    return most * sequence.groups / attention_pairs(shape.mask, whole, 0)


def _shape(
    sequence: SequenceSplit, attention: RankAttention, length: int, documents: tuple[int, ...] | None
) -> AttentionShape:
    """Return an attention over one row, split by a causal mask as in jobs, whatever mask the layers use."""
    return AttentionShape(
        tokens=length,
        width=attention.heads * attention.width,
        key_width=attention.key_heads * attention.key_width,
        mask=attention.mask,
        documents=documents,
        heads=attention.heads,
        key_heads=attention.key_heads,
        split=sequence.how,
        multiple=sequence.multiple,
        masks=(CAUSAL,),
    )
