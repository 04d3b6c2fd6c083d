"""Pieces cover each visible pair once and no other, for any mask, cut and block; and how many there are."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from par_layers import Mask, Tokens
from par_layers.context.balance import cut_tokens
from par_layers.context.fetch import Fetch, transfers
from par_layers.context.pieces import AttentionPiece, pieces, seen

from .dense import cut_rows, dense


def covered(found, queries, keys, low, high):
    """How often the pieces compute each pair, int [queries, keys]."""
    times = np.zeros((queries, keys), int)
    for q0, q1, k0, k1, kind, left, lengths in found:
        assert 0 <= q0 < q1 <= queries
        assert 0 <= k0 < k1 <= keys
        assert not lengths or np.array_equal(np.sum(lengths, 0), (q1 - q0, k1 - k0))
        query, key = np.arange(q0, q1)[:, None], np.arange(k0, k1)[None]
        if kind == "band":
            times[q0:q1, k0:k1] += (key >= low[q0:q1, None]) & (key < high[q0:q1, None])
            continue
        q, k = q0, k0
        for rows, columns in lengths or ((q1 - q0, k1 - k0),):  # of each document by itself
            query, key = np.arange(rows)[:, None], np.arange(columns)[None]
            match kind:
                case "full":
                    visible = np.ones((rows, columns), bool)
                case "causal":
                    visible = key - query <= columns - rows
                case "anti":
                    visible = key >= query
                case "window":
                    visible = (key - query <= columns - rows) & (key - query >= columns - rows - left)
            assert visible.any(1).all()  # kernels are wrong, or die, where a query sees nothing
            times[q : q + rows, k : k + columns] += visible
            q, k = q + rows, k + columns
    return times


def held(runs):
    return np.concatenate([np.arange(0), *(np.arange(start, stop) for start, stop in runs)])


@settings(max_examples=100)
@given(
    cut_rows(),
    st.sampled_from((16, 64, 512)),
    st.sampled_from(
        ((), ("narrow",), ("causal",), ("window",), ("causal", "documents"), ("causal", "window", "documents"))
    ),
)
def test_each_visible_pair_once(row, block, joins):
    tokens, mask = row
    first, last = mask.intervals(tokens)
    table = transfers(first, last, tokens)
    visible = dense(mask, tokens)
    for rank in range(tokens.ranks):
        queries = tokens.runs[rank]
        for number in range(len(tokens.documents)):
            buffers = [queries, Fetch(table, rank).keys[number]]  # local keys, fetched ones
            buffers += [tokens.runs[(rank + 1) % tokens.ranks]]  # and those that a ring brings
            for keys in buffers:
                found = pieces(first[number], last[number], queries, keys, block=block, joins=joins)
                low, high = seen(first[number], last[number], queries, keys)
                times = covered(found, tokens.local, len(held(keys)), low, high)
                assert np.array_equal(times, visible[number][np.ix_(held(queries), held(keys))])
                square = all(p.q1 - p.q0 == p.k1 - p.k0 for p in found if p.kind == "causal")
                assert square or "causal" in joins
                masked = {"band"} if "window" in joins else {"anti", "band"}
                assert all(p.q1 - p.q0 <= block for p in found if p.kind in masked)
                assert "documents" in joins or not any(p.lengths for p in found)
                assert found == sorted(found)


@pytest.mark.parametrize("block", [16, 64, 512])
@pytest.mark.parametrize("window", [31, 32, 33, 63, 64, 65, 128, 129])
@pytest.mark.parametrize("causal", [True, False])
def test_windows_as_long_as_blocks(window, block, causal):
    check_one_rank(Mask(causal=causal, window=window), block)


@pytest.mark.parametrize("ragged", ["left", "right", "both"])
def test_what_all_queries_of_a_block_see_needs_no_mask(ragged):
    rng = np.random.default_rng(0)
    first = np.sort(rng.choice(40, 300)) if ragged != "right" else np.zeros(300, int)
    last = 260 + np.sort(rng.choice(40, 300)) if ragged != "left" else np.full(300, 300)
    found = check_one_rank(Mask.from_intervals(first, last), 64)
    full = sum((q1 - q0) * (k1 - k0) for q0, q1, k0, k1, kind, *_ in found if kind == "full")
    assert full > 0.8 * (last - first).sum()


def check_one_rank(mask, block):
    """The pieces of a row of 300 tokens on one rank, which cover what the dense mask shows."""
    tokens = cut_tokens(300, 1)
    first, last = mask.intervals(tokens)
    found = pieces(first[0], last[0], tokens.runs[0], tokens.runs[0], block=block)
    assert np.array_equal(covered(found, 300, 300, first[0], last[0]), dense(mask, tokens)[0])
    return found


def of_one_rank(mask, length, *documents, block=512, joins=()):
    tokens = Tokens(length, length, (documents or (length,),), (((0, length),),))
    first, last = mask.intervals(tokens)
    return pieces(first[0], last[0], tokens.runs[0], tokens.runs[0], block=block, joins=joins)


def test_plain_masks_are_few_pieces():
    assert of_one_rank(Mask(), 4096) == [AttentionPiece(0, 4096, 0, 4096, "full")]
    assert of_one_rank(Mask(causal=True), 4096) == [AttentionPiece(0, 4096, 0, 4096, "causal")]
    assert of_one_rank(Mask(causal=True, prefix=1000), 4096) == [
        AttentionPiece(0, 1000, 0, 1000, "full"),
        AttentionPiece(1000, 4096, 0, 1000, "full"),
        AttentionPiece(1000, 4096, 1000, 4096, "causal"),
    ]
    assert of_one_rank(Mask(causal=True), 4096, 1000, 3096) == [
        AttentionPiece(0, 1000, 0, 1000, "causal"),
        AttentionPiece(1000, 4096, 1000, 4096, "causal"),
    ]
    assert of_one_rank(Mask(causal=True, window=1024), 2048, block=512) == [
        AttentionPiece(0, 1024, 0, 1024, "causal"),
        AttentionPiece(1024, 1536, 1, 513, "anti"),
        AttentionPiece(1024, 1536, 513, 1024, "full"),
        AttentionPiece(1024, 1536, 1024, 1536, "causal"),
        AttentionPiece(1536, 2048, 513, 1025, "anti"),
        AttentionPiece(1536, 2048, 1025, 1536, "full"),
        AttentionPiece(1536, 2048, 1536, 2048, "causal"),
    ]


def test_a_block_of_a_narrow_window_is_one_piece_with_a_mask():
    mask = Mask(causal=True, window=512)
    assert of_one_rank(mask, 704, block=128, joins=("narrow",)) == [
        AttentionPiece(0, 512, 0, 512, "causal"),
        *(AttentionPiece(q, q + 64, q - 511, q + 64, "band") for q in (512, 576, 640)),
    ]
    wide = Mask(causal=True, window=1024)
    assert of_one_rank(wide, 2048, joins=("narrow",)) == of_one_rank(wide, 2048)


def test_what_kernels_join():
    tokens = cut_tokens(4096, 2, "zigzag")
    first, last = Mask(causal=True).intervals(tokens)
    joined = pieces(first[0], last[0], ((1024, 3072),), ((0, 3072),), joins=("causal",))
    assert joined == [AttentionPiece(0, 2048, 0, 3072, "causal")]
    assert of_one_rank(Mask(causal=True, window=512), 4096, joins=("causal", "window")) == [
        AttentionPiece(0, 512, 0, 512, "causal"),
        AttentionPiece(512, 4096, 1, 4096, "window", 511),
    ]


@pytest.mark.parametrize("window", [64, 100, 512, 513, 4000])
def test_windows_compute_little_that_they_hide(window):
    """At most 1 + block/window times the pairs that are visible, an anti-causal square counted whole."""
    found = of_one_rank(Mask(causal=True, window=window), 8192)
    block = min(512, max(window, 64))
    computed = sum((q1 - q0) * (k1 - k0) // (2 if kind == "causal" else 1) for q0, q1, k0, k1, kind, *_ in found)
    visible = sum(min(query + 1, window) for query in range(8192))
    assert computed <= (1 + block / window) * visible


def test_short_documents_share_masks():
    """Thousands of documents of a few tokens are not thousands of calls, and no wide masks either."""
    found = of_one_rank(Mask(causal=True), 8192, *(2, 3, 5, 6) * 512)
    assert len(found) < 8192 / 32
    assert sum((q1 - q0) * (k1 - k0) for q0, q1, k0, k1, *_ in found) < 8192 * 256


def test_irregular_masks_are_computed_in_blocks():
    rng = np.random.default_rng(0)
    last = np.minimum(np.sort(rng.integers(1, 4096, 4096)) + 1, 4096)
    found = of_one_rank(Mask.from_intervals(np.zeros(4096, int), last), 4096)
    masked = sum((q1 - q0) * (k1 - k0) for q0, q1, k0, k1, kind, *_ in found if kind == "band")
    assert len(found) < 300
    assert masked < 4096 * 4096 / 16
