"""Where a sequence is cut: the cuts, their balance, padding, and what is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from par_layers import Mask, balance_chunks
from par_layers.context.balance import cut_tokens
from par_layers.context.fetch import transfers


@settings(max_examples=100)
@given(st.integers(1, 8), st.integers(1, 6), st.data())
def test_no_rank_has_more_than_the_heaviest_chunk_above_the_mean(ranks, each, data):
    numbers = st.one_of(st.integers(0, 1000), st.sampled_from((0, 0, 1, 10**9)))
    work = data.draw(st.lists(numbers, min_size=ranks * each, max_size=ranks * each))
    places = balance_chunks(work, ranks, each)
    assert sorted(chunk for place in places for chunk in place) == list(range(ranks * each))
    assert {len(place) for place in places} == {each}
    loads = [sum(work[chunk] for chunk in place) for place in places]
    assert max(loads) <= sum(work) / ranks + max(work)


def test_chunks_go_to_the_least_loaded_rank_that_has_room():
    assert balance_chunks([5, 1, 1, 1], 2, 2) == ((0, 3), (1, 2))
    assert balance_chunks([1, 1, 1, 1], 2, 2) == ((0, 2), (1, 3))  # ties to the lower rank
    assert balance_chunks(np.array([9, 0, 4, 5]), 2, 2) == ((0, 1), (2, 3))
    with pytest.raises(ValueError, match="3 chunks do not make 2 for each of 2 ranks"):
        balance_chunks([1, 2, 3], 2, 2)


@pytest.mark.parametrize("length", [1, 15, 17, 123])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_any_length_on_any_ranks(length, ranks):
    for how in ("contiguous", "zigzag", "balanced", "auto"):
        for multiple, inner in ((1, 1), (2, 1), (1, ranks)):
            tokens = cut_tokens(length, ranks, how, multiple=multiple, inner=inner, pad=True)
            assert tokens.length == length
            assert tokens.padded >= length
            assert tokens.local % multiple == 0
            assert tokens.ranks == ranks
            assert sorted(np.concatenate([tokens.index(rank) for rank in range(ranks)])) == list(range(tokens.padded))


def test_the_cuts():
    assert cut_tokens(16, 2, "contiguous").runs == (((0, 8),), ((8, 16),))
    assert cut_tokens(16, 2, "zigzag").runs == (((0, 4), (12, 16)), ((4, 12),))
    packed = cut_tokens(16, 2, "balanced", documents=[8, 4, 4], chunks=2)  # the work of chunks is 10, 26, 10, 10
    assert packed.runs == (((4, 8), (12, 16)), ((0, 4), (8, 12)))
    assert cut_tokens(16, 1, "balanced").runs == (((0, 16),),)


def test_one_cut_for_all_rows():
    """Rows of other documents are cut in the same places: by the work of all rows together."""
    tokens = cut_tokens(16, 2, "balanced", documents=[[16], [4, 4, 4, 4]], chunks=2)
    work = np.zeros(16)
    for first, last in zip(*Mask(causal=True).intervals(tokens), strict=True):
        work += last - first
    assert tokens.runs == cut_tokens(16, 2, "zigzag").runs
    assert work[tokens.index(0)].sum() == work[tokens.index(1)].sum()


def test_the_choice():
    """By predicted time: computation of the slowest rank, and what it fetches."""
    causal, window = (Mask(causal=True),), (Mask(causal=True, window=64),)
    assert cut_tokens(8192, 4, masks=causal) == cut_tokens(8192, 4, "zigzag")
    assert cut_tokens(8192, 4, masks=window) == cut_tokens(8192, 4, "contiguous")
    assert cut_tokens(8192, 4, masks=(Mask(),)) == cut_tokens(8192, 4, "contiguous")
    documents = [2048, 2048, 2048, 2048]  # one on each rank
    assert cut_tokens(8192, 4, documents=documents).runs == cut_tokens(8192, 4, "contiguous").runs
    uneven = [6000, 100, 900, 500, 692]
    assert max(imbalance(cut_tokens(8192, 4, documents=uneven)), 1.1) == 1.1
    assert imbalance(cut_tokens(8192, 4, "zigzag", documents=uneven)) > 1.5
    assert cut_tokens(4100, 4) == cut_tokens(4100, 4, "contiguous")  # does not divide by 8


def imbalance(tokens):
    """The work of the slowest rank, over the mean."""
    first, last = Mask(causal=True).intervals(tokens)
    work = (last - first).sum(0)
    of_rank = [work[tokens.index(rank)].sum() for rank in range(tokens.ranks)]
    return max(of_rank) / np.mean(of_rank)


def lognormal(mean, seed, length=65_536):
    rng, documents, left = np.random.default_rng(seed), [], length
    while left:
        documents.append(min(left, max(1, int(rng.lognormal(np.log(mean) - 0.5)))))
        left -= documents[-1]
    return documents


@pytest.mark.parametrize(
    ("mean", "contiguous", "zigzag", "fetched"),
    [(8192, (1.5, 3.2), (1.3, 2.4), 0.7), (1024, (1.5, 4), (1.5, 3.1), 0.25)],
)
def test_packed_documents_are_balanced(mean, contiguous, zigzag, fetched):
    """Means over six draws of lognormal documents; other draws gave 1.7 to 3.5 contiguous, 1.4 to 2.8 zigzag."""
    for ranks in (4, 8, 16):
        drawn = [lognormal(mean, seed) for seed in range(6)]
        found = {
            how: np.mean([imbalance(cut_tokens(65_536, ranks, how, documents=each)) for each in drawn])
            for how in ("contiguous", "zigzag")
        }
        assert contiguous[0] < found["contiguous"] < contiguous[1]
        assert zigzag[0] < found["zigzag"] < zigzag[1]
        cuts = [cut_tokens(65_536, ranks, "balanced", documents=each, chunks=8) for each in drawn]
        assert np.mean([imbalance(tokens) for tokens in cuts]) < (1.015 if mean == 8192 else 1.05)
        rows = [transfers(*Mask(causal=True).intervals(tokens), tokens).received().max() for tokens in cuts]
        assert np.mean(rows) / 65_536 < fetched


def test_masks_of_several_layers_are_balanced_together():
    masks = (Mask(causal=True), Mask(causal=True, window=128))
    documents = lognormal(512, 3, 4096)
    tokens = cut_tokens(4096, 2, "balanced", documents=documents, masks=masks, chunks=8)
    work = sum((last - first)[0] for first, last in (mask.intervals(tokens) for mask in masks))
    loads = [work[tokens.index(rank)].sum() for rank in range(2)]
    assert max(loads) / np.mean(loads) < 1.02


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            (15, 4, "zigzag"),
            "length 15 does not divide by 4 ranks x 2 chunks; use 16, or pad=True and give tokens to the",
        ),
        ((15, 4), "length 15 does not divide by 4 ranks; use 16, or pad=True"),
        ((0, 4), "length must be 1 at least; it is 0"),
        ((16, 0), "ranks must be 1 at least; it is 0"),
        ((16, 4, "striped"), "there is no split 'striped'; there are 'auto', 'contiguous', 'zigzag', 'balanced'"),
    ],
)
def test_what_cannot_be_cut(arguments, words):
    with pytest.raises(ValueError, match=words):
        cut_tokens(*arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"multiple": 3}, "length 16 does not divide by 4 ranks x 3; use 24"),
        ({"multiple": 0}, "multiple must be 1 at least; it is 0"),
        ({"inner": 3}, "4 ranks do not divide into groups of inner=3"),
        ({"chunks": 2}, "chunks=2: it must be 1 or more, and only cut='balanced' supports it"),
        ({"documents": []}, r"documents=\[\] is empty; leave it out for rows of one document"),
        ({"documents": [[]]}, r"documents must have 1 token at least each; their lengths are \[\]"),
        ({"documents": [16, 0]}, r"documents must have 1 token at least each; their lengths are \[16, 0\]"),
        ({"documents": [[16], [17, -1]]}, "documents must have 1 token at least each"),
        ({"documents": [[16], [8, 4]]}, r"documents \[8, 4\] have 12 tokens together, but the row has 16"),
        ({"documents": [8.5, 7.5]}, "documents must have whole numbers of tokens; there is 8.5"),
        ({"masks": ()}, r"masks=\(\) is empty; give the masks of the layers"),
    ],
)
def test_what_cannot_be_cut_so(arguments, words):
    with pytest.raises(ValueError, match=words):
        cut_tokens(16, 4, **arguments)
