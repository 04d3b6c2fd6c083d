"""The dense mask, from the definitions alone, and random rows to try it on."""

import numpy as np
from hypothesis import strategies as st

from par_layers import Mask, Tokens


def dense(mask, tokens):
    """Which pairs are visible, bool [rows, padded, padded], pair by pair, without the intervals of a mask."""
    result = np.zeros((len(tokens.documents), tokens.padded, tokens.padded), bool)
    given = None if mask._given is None else [np.frombuffer(each, np.int64) for each in mask._given]
    for row, documents in enumerate(tokens.documents):
        start = 0
        for length in documents:
            query, key = np.arange(length)[:, None], np.arange(length)[None]
            visible = np.ones((length, length), bool)
            if mask.causal:
                visible &= key <= query
            if mask.window is not None:
                visible &= abs(query - key) < mask.window
            if mask.chunk is not None:
                visible &= query // mask.chunk == key // mask.chunk
            visible |= key < mask.prefix
            if given is not None:
                rows = slice(start, start + length)
                visible &= (key + start >= given[0][rows, None]) & (key + start < given[1][rows, None])
            result[row, start : start + length, start : start + length] = visible
            start += length
    return result


LENGTHS = (1, 2, 15, 16, 17, 40, 123, 300)


def documents(length):
    """Lengths of documents that fill a row, short and long ones."""

    @st.composite
    def draw(draw_one):
        lengths, left = [], length
        while left:
            lengths.append(min(left, draw_one(st.sampled_from((1, 2, 5, 31, 40, 100, 300)))))
            left -= lengths[-1]
        return tuple(lengths)

    return draw()


@st.composite
def masks(draw, length):
    kind = draw(
        st.sampled_from(("full", "causal", "window", "two-sided", "prefix", "chunk", "steps", "any", "any last"))
    )
    number = draw(st.sampled_from((1, 3, 7, 33, 64, 100, length)))
    if kind in {"full", "causal"}:
        return Mask(causal=kind == "causal")
    if kind in {"window", "two-sided"}:
        return Mask(causal=kind == "window", window=number)
    if kind == "prefix":
        return Mask(causal=True, prefix=number)
    if kind == "chunk":
        return Mask(causal=draw(st.booleans()), chunk=number)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    first = rng.integers(0, length + 1, length)
    last = first + (rng.random(length) * (length + 1 - first)).astype(np.int64)
    if kind == "any last":
        first = np.sort(first)
        last = np.maximum(first, last)
    if kind == "steps":  # ascending, in steps of any size
        first, last = np.sort(first), np.maximum(np.sort(first), np.sort(last))
    return Mask.from_intervals(first, last)


@st.composite
def cut_rows(draw, *, most_rows=2):
    """A row of any length on 1 to 4 ranks, cut anyhow, with documents, and a mask."""
    length, ranks = draw(st.sampled_from(LENGTHS)), draw(st.integers(1, 4))
    each, rows = draw(st.integers(1, 3)), draw(st.integers(1, most_rows))
    padded = -(-length // (ranks * each)) * ranks * each
    chunk = padded // (ranks * each)
    order = draw(st.permutations(range(ranks * each)))
    runs = []
    for rank in range(ranks):
        of_rank: list[tuple[int, int]] = []
        for place in sorted(order[rank * each : (rank + 1) * each]):
            if of_rank and of_rank[-1][1] == place * chunk:
                of_rank[-1] = (of_rank[-1][0], (place + 1) * chunk)
            else:
                of_rank.append((place * chunk, (place + 1) * chunk))
        runs.append(tuple(of_rank))
    packed = tuple(draw(documents(length)) for _ in range(rows))
    return Tokens(length, padded, packed, tuple(runs)), draw(masks(length))
