"""Assignment of a sequence's tokens to ranks with balanced work: contiguous, zigzag, balanced, or the fastest."""

import heapq
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from .fetch import transfers
from .mask import Mask
from .tokens import Documents, Ints, Tokens, as_documents, joined

SPLITS = ("auto", "contiguous", "zigzag", "balanced")

CAUSAL = (Mask(causal=True),)

CHUNKS = (2, 4, 8, 16)
"""Numbers of chunks per rank that "balanced" tries."""

PAIRS_PER_ROW = 128
"""Number of pairs of query and key that a rank computes in the time of fetching one key and returning its gradient.

Both times grow with the number of heads, so the ratio depends only on the machine: about 100 over gloo and inside a
node of GPUs.
"""


def balance_chunks(work: Sequence[int] | Ints, ranks: int, each: int) -> tuple[tuple[int, ...], ...]:
    """Give equally many chunks to each rank, so that the ranks have about the same work.

    The heaviest chunk goes first, each to the rank with the least work that has room for it, ties to the lower rank. No
    rank gets more than the heaviest chunk above the mean.

    Args:
        work: Work of each chunk, `ranks` x `each` of them.
        ranks: Number of ranks.
        each: Number of chunks of each rank.

    Returns:
        For each rank the numbers of its chunks, ascending.

    Raises:
        ValueError: There is another number of chunks.
    """
    if len(work) != ranks * each:
        raise ValueError(f"{len(work)} chunks do not make {each} for each of {ranks} ranks")
    loads = [(0, rank) for rank in range(ranks)]
    places: list[list[int]] = [[] for _ in range(ranks)]
    # Largest chunks first, each to the rank with the least work so far: the small ones then even out the rest.
    for chunk in np.argsort(-np.asarray(work), kind="stable").tolist():
        load, rank = heapq.heappop(loads)
        places[rank].append(chunk)
        # A full rank leaves the heap, because all ranks must hold equally many tokens.
        if len(places[rank]) < each:
            heapq.heappush(loads, (load + int(work[chunk]), rank))
    return tuple(tuple(sorted(place)) for place in places)


def cut_tokens(
    length: int,
    ranks: int,
    how: str = "auto",
    *,
    documents: Documents | None = None,
    masks: Sequence[Mask] = CAUSAL,
    multiple: int = 1,
    pad: bool = False,
    inner: int = 1,
    block: int = 512,
    chunks: int | None = None,
) -> Tokens:
    """Split sequences over ranks, with the same number of tokens on each rank. Pure, cached, identical on all ranks.

    Args:
        length: Number of tokens of a sequence.
        ranks: Number of ranks.
        how: Assignment. "contiguous": one chunk per rank. "zigzag": rank r gets the chunks r and 2 ranks - 1 - r of
            2 ranks chunks. "balanced": chunks by the work of `masks` and `documents`. "auto": the assignment with the
            lowest predicted time.
        documents: Lengths of the documents of all sequences, or of each sequence; None is one document.
        masks: Masks of the layers, each as often as it occurs.
        multiple: Divisor of the length of each chunk, for layers that split a rank's tokens further.
        pad: Whether to pad sequences whose length does not divide.
        inner: Number of neighbouring ranks that exchange tokens for heads. They split the tokens that one of
            `ranks` / `inner` ranks would hold.
        block: Minimum number of tokens of a chunk, if "balanced" has a choice.
        chunks: Number of chunks of a rank for "balanced"; None tries 2, 4, 8 and 16.

    Raises:
        ValueError: The length does not divide and `pad` is not set, or an argument is out of range.
    """
    for name, value in (("length", length), ("ranks", ranks), ("multiple", multiple), ("inner", inner)):
        if value < 1:
            raise ValueError(f"{name} must be 1 at least; it is {value}")
    if how not in SPLITS:
        raise ValueError(f"there is no split {how!r}; there are {', '.join(map(repr, SPLITS))}")
    if ranks % inner:
        raise ValueError(f"{ranks} ranks do not divide into groups of inner={inner}")
    if chunks is not None and (how != "balanced" or chunks < 1):
        raise ValueError(f"chunks={chunks}: it must be 1 or more, and only cut='balanced' supports it; remove it")
    if not masks:
        raise ValueError("masks=() is empty; give the masks of the layers, by which work is balanced")
    rows = as_documents(documents, length)
    return _cut(length, ranks, how, rows, tuple(masks), multiple, pad, inner, block, chunks)


def static_tokens(local: int, ranks: int, how: str = "auto") -> Tokens:
    """Return the split of sequences of one document with `local` tokens per rank, for layers without `tokens`."""
    return cut_tokens(local * ranks, ranks, how)


@lru_cache(maxsize=256)
def _cut(  # noqa: PLR0917
    length: int,
    ranks: int,
    how: str,
    documents: tuple[tuple[int, ...], ...],
    masks: tuple[Mask, ...],
    multiple: int,
    pad: bool,
    inner: int,
    block: int,
    chunks: int | None,
) -> Tokens:
    outer = ranks // inner
    # A chunk is split over the inner ranks again, so each of their parts must be divisible as well.
    multiple *= inner
    candidates = {"contiguous": (1,), "zigzag": (2,), "balanced": CHUNKS if chunks is None else (chunks,)}
    kinds = ("contiguous", "zigzag", "balanced") if how == "auto" else (how,)
    tried = [(kind, each) for kind in kinds for each in candidates[kind]]
    if chunks is None:  # chunks of at least `block`, else the fewest
        tried = [
            (kind, each)
            for kind, each in tried
            if kind != "balanced" or each == CHUNKS[0] or length >= outer * each * block
        ]
    # Without ranks that exchange keys there is nothing to balance.
    if outer == 1:
        tried = [("contiguous", 1)]
    fitting = [(kind, each) for kind, each in tried if pad or length % (outer * each * multiple) == 0]
    if not fitting:
        raise ValueError(_indivisible(length, ranks, tried[0][1], multiple // inner))
    whole = Tokens(length, length, documents, (((0, length),),))
    intervals = [mask.intervals(whole) for mask in masks]
    work: Ints = np.zeros(length, np.int64)
    for first, last in intervals:
        # A query's work is the number of keys that it sees, summed over the layers.
        work += (last - first).sum(0)
    options = [_laid_out(kind, each, whole, work, outer, multiple) for kind, each in fitting]
    best = options[0] if len(options) == 1 else _fastest(options, work, intervals)
    if inner == 1:
        return best
    parts = tuple(part for rank in range(outer) for part in _split(best, rank, inner))
    return Tokens(length, best.padded, documents, parts)


def _laid_out(kind: str, each: int, whole: Tokens, work: Ints, ranks: int, multiple: int) -> Tokens:
    """Return the split of one kind, with `each` chunks per rank."""
    length = whole.length
    step = ranks * each * multiple
    padded = -(-length // step) * step
    chunk = padded // (ranks * each)
    if kind == "contiguous":
        places: tuple[tuple[int, ...], ...] = tuple((rank,) for rank in range(ranks))
    elif kind == "zigzag":
        # Under a causal mask the work of a chunk grows along the sequence. The r-th chunk from the start and the r-th
        # from the end add up to the same work for every r.
        places = tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks))
    else:
        filled = np.concatenate([work, np.zeros(padded - length, np.int64)])
        places = balance_chunks(filled.reshape(ranks * each, chunk).sum(1), ranks, each)
    runs = tuple(joined([(place * chunk, (place + 1) * chunk) for place in of_rank]) for of_rank in places)
    return Tokens(length, padded, whole.documents, runs)


def _fastest(options: list[Tokens], work: Ints, intervals: list[tuple[Ints, Ints]]) -> Tokens:
    """Return the split whose slowest rank has the lowest predicted time; the first one of equals."""
    best, least = options[0], float("inf")
    length = len(work)
    # Prefix sums give the work of any range of tokens by one difference.
    before = np.concatenate([[0], np.cumsum(work)])
    for tokens in options:
        # Padding behind the last token costs nothing.
        edges = np.array([run for runs in tokens.runs for run in runs]).clip(max=length)
        of_rank = np.repeat(np.arange(tokens.ranks), [len(runs) for runs in tokens.runs])
        pairs = np.zeros(tokens.ranks, np.int64)
        np.add.at(pairs, of_rank, before[edges[:, 1]] - before[edges[:, 0]])
        # Computation only is already slower than the best split with communication, so the costlier count of transfers
        # is skipped.
        if pairs.max() >= least:
            continue
        rows = np.zeros(tokens.ranks, np.int64)
        for first, last in intervals:
            rows += transfers(_padded(first, tokens), _padded(last, tokens), tokens).received()
        time = float((pairs + PAIRS_PER_ROW * rows).max())
        if time < least:
            best, least = tokens, time
    return best


def _padded(ends: Ints, tokens: Tokens) -> Ints:
    """Ends of intervals [rows, length], with those of padding, which sees nothing, behind them."""
    if tokens.padded == tokens.length:
        return ends
    padding = np.arange(tokens.length, tokens.padded)
    return np.concatenate([ends, np.broadcast_to(padding, (len(ends), len(padding)))], 1)


def _split(tokens: Tokens, rank: int, parts: int) -> list[tuple[tuple[int, int], ...]]:
    """Split a rank's tokens into `parts` neighbouring parts of equal size."""
    size = tokens.local // parts
    index = tokens.index(rank).reshape(parts, size)
    result = []
    for part in index:
        edges = np.flatnonzero(np.diff(part) != 1)
        starts, stops = part[np.append(0, edges + 1)], part[np.append(edges, size - 1)] + 1
        result.append(tuple(zip(starts.tolist(), stops.tolist(), strict=True)))
    return result


def _indivisible(length: int, ranks: int, each: int, multiple: int) -> str:
    step = ranks * each * multiple
    parts = f"{ranks} ranks" + (f" x {each} chunks" if each > 1 else "") + (f" x {multiple}" if multiple > 1 else "")
    return (
        f"length {length} does not divide by {parts}; use {-(-length // step) * step}, or pad=True and give tokens to "
        "the layers"
    )
