"""Costs of attention over several ranks: the formulas in closed form, and rows counted one by one."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from par_layers import AttentionShape, Mask, Tokens, attention_memory, attention_pairs, layer_cost, num_gather_parts
from par_layers.context.balance import cut_tokens

from .dense import LENGTHS, cut_rows, dense, documents, masks

S, B, H, K = 96, 2, 64, 16
M = B * S
CAUSAL, FULL = Mask(causal=True), Mask()


def shape(mask=CAUSAL, split="auto", **more):
    return AttentionShape(tokens=M, width=H, key_width=K, rows=B, mask=mask, split=split, **more)


def elements(mode, sizes, of, **options):
    predicted = layer_cost(mode, {"sequence": sizes} if isinstance(sizes, int) else sizes, of, **options)
    assert predicted.once == 0
    return predicted.each


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_formulas(ranks):
    others = Fraction(ranks - 1, ranks)
    assert elements("ring", ranks, shape(FULL, "contiguous")) == 6 * others * M * K
    assert elements("ring", ranks, shape(CAUSAL, "zigzag")) == 6 * others * M * K
    rows = {
        shape(CAUSAL, "contiguous"): Fraction(ranks - 1, 2 * ranks) * S,
        shape(CAUSAL, "zigzag"): Fraction(3 * (ranks - 1), 4 * ranks) * S,
        shape(FULL, "contiguous"): others * S,
        shape(FULL, "zigzag"): others * S,
        shape(Mask(causal=True, window=6), "contiguous"): others * 5,
    }
    for of, seen in rows.items():
        assert elements("gather", ranks, of) == 6 * B * seen * K
        assert elements("gather", ranks, of, keep=True) == 4 * B * seen * K
        assert elements("gather", ranks, of, recompute=True) == 8 * B * seen * K
    assert elements("ulysses", ranks, shape()) == Fraction(4 * (ranks - 1), ranks**2) * M * (H + K)


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 2), (2, 4), (1, 4), (4, 1)])
def test_formulas_of_both_at_once(ring, ulysses):
    inside = Fraction(4 * (ulysses - 1), ulysses**2) * Fraction(M, ring) * (H + K)
    outside = 6 * Fraction(ring - 1, ring) * M * Fraction(K, ulysses)
    sizes = {"ring": ring, "ulysses": ulysses}
    assert elements("2d", sizes, shape(split="zigzag")) == inside + outside
    seen = Fraction(3 * (ring - 1), 4 * ring) * S
    assert elements("2d", sizes, shape(split="zigzag"), outer="gather") == inside + 6 * B * seen * Fraction(K, ulysses)


def test_hops_that_nobody_needs():
    """A window within one chunk makes one hop of each chunk but the last; gradients come straight back."""
    window = shape(Mask(causal=True, window=5), "contiguous")
    assert elements("ring", 4, window) == 6 * Fraction(3, 4) * Fraction(M, 4) * K
    whole = shape(CAUSAL, "contiguous", documents=[24, 24, 24, 24])
    assert elements("ring", 4, whole) == elements("gather", 4, whole) == 0


def test_ranks_that_share_key_heads():
    """Two key heads on four ranks: each rank has one whole, as if there were four."""
    shared = AttentionShape(tokens=M, width=64, key_width=16, heads=8, key_heads=2)
    alone = AttentionShape(tokens=M, width=64, key_width=32, heads=8, key_heads=4)
    assert elements("ulysses", 4, shared) == elements("ulysses", 4, alone)
    # Twelve heads, six key heads, four ranks: heads 0 to 2 use key heads 0 and 1, heads 3 to 5 use 1 and 2.
    across = AttentionShape(tokens=M, width=96, key_width=48, heads=12, key_heads=6)
    assert elements("ulysses", 4, across) == Fraction(4 * 3, 16) * M * (96 + 64)
    assert attention_memory("ulysses", {"sequence": 4}, across).kept == Fraction(2 * M * (96 + 64), 4)


def test_where_ulysses_moves_less_than_a_ring():
    def less(ranks, key_width):
        of = AttentionShape(tokens=1680 * 16, width=64, key_width=key_width, mask=FULL, split="contiguous")
        return elements("ulysses", ranks, of) < elements("ring", ranks, of)

    assert all(less(ranks, 64) for ranks in (2, 3, 4))  # P > 2 (h/k + 1) / 3
    assert not less(6, 8)
    assert less(7, 8)


@st.composite
def shapes(draw):
    length, rows = draw(st.sampled_from(LENGTHS)), draw(st.integers(1, 3))
    packed = [draw(documents(length)) for _ in range(draw(st.sampled_from((1, rows))))]
    cut = draw(st.sampled_from(("auto", "contiguous", "zigzag", "balanced")))
    return AttentionShape(
        tokens=rows * length, width=8, key_width=4, rows=rows, documents=packed, mask=draw(masks(length)), split=cut
    )


@settings(max_examples=60)
@given(shapes(), st.integers(1, 4))
def test_rows_counted_one_by_one(of, ranks):
    tokens = cut_tokens(of.length, ranks, of.split, documents=of.documents, masks=(of.mask,), pad=True)
    visible = dense(of.mask, tokens)
    copies = of.rows // len(tokens.documents)
    places = [tokens.index(rank) for rank in range(ranks)]
    fetched = []
    for index in places:
        needed = visible[:, index].any(1)
        needed[:, index] = False
        fetched.append(int(needed.sum()) * copies)
    assert elements("gather", ranks, of) == 6 * Fraction(sum(fetched), ranks) * of.key_width
    assert attention_memory("gather", {"sequence": ranks}, of).arriving == 2 * max(fetched) * of.key_width
    sent = 0  # messages of a ring that hold one rank's keys and values, or their gradients
    for owner in range(ranks):
        seen = [hop for hop in range(1, ranks) if visible[:, places[(owner + hop) % ranks]][:, :, places[owner]].any()]
        if seen:
            sent += 2 * seen[-1] + seen[-1] - seen[0] + 1
    assert elements("ring", ranks, of) == 2 * Fraction(sent * tokens.local * of.rows, ranks) * of.key_width
    pairs = [int(visible[:, index].sum()) for index in places]
    assert [attention_pairs(of.mask, tokens, rank) for rank in range(ranks)] == pairs
    assert of.flops() == 14 * sum(pairs) * copies * of.width
    assert of.flops(recompute=True) == 18 * sum(pairs) * copies * of.width


@settings(max_examples=30)
@given(cut_rows())
def test_work_is_what_is_seen(row):
    tokens, mask = row
    visible = dense(mask, tokens)
    assert sum(attention_pairs(mask, tokens, rank) for rank in range(tokens.ranks)) == visible.sum()


def test_parts_of_what_gather_fetches():
    million = 1 << 20
    assert [num_gather_parts(elements, 8) for elements in (0, million, 2 * million - 1, 2 * million, 9 * million)] == [
        1, 1, 1, 2, 2,
    ]  # fmt: skip
    assert [num_gather_parts(9 * million, key_heads) for key_heads in (1, 3, 6)] == [1, 1, 2]
    assert [num_gather_parts(1, key_heads, 4) for key_heads in (1, 6, 8)] == [1, 3, 4]  # as the topology says


def test_memory():
    ranks = {"sequence": 4}
    ring = attention_memory("ring", ranks, shape())
    assert (ring.forward, ring.backward) == (M * K, Fraction(5, 2) * M * K)  # 4 and 10 M k / P
    few = attention_memory("ring", ranks, shape(Mask(causal=True, window=5), "contiguous"))
    assert (few.forward, few.backward) == (M * K, 2 * M * K)  # 4 and 8: keys make one hop
    fetched = Fraction(6 * M * K, 4)  # and as much is sent
    for parts, forward, backward in ((1, 2, 2), (2, 3, 4), (4, 3, 4)):
        gather = attention_memory("gather", ranks, shape(FULL), parts=parts)
        assert (gather.forward, gather.backward) == (forward * fetched / parts, backward * fetched / parts)
        kept = attention_memory("gather", ranks, shape(FULL), parts=parts, keep=True)
        assert (kept.kept, kept.backward) == (fetched, fetched + 2 * fetched / parts)
        assert (gather.kept, gather.arriving, kept.arriving) == (0, fetched, fetched)
    ulysses = attention_memory("ulysses", ranks, shape())
    assert (ulysses.kept, ulysses.backward) == (Fraction(2 * M * (H + K), 4), M * (H + K))
    assert ulysses.forward == ulysses.kept + Fraction(M * H, 4)
    both = attention_memory("2d", {"ring": 2, "ulysses": 2}, shape())
    assert both.forward == Fraction(2 * M * (H + K), 4) + 4 * Fraction(M, 2) * Fraction(K, 2)
    assert attention_memory("ring", {"sequence": 1}, shape()).forward == 0


def test_lengths_that_do_not_divide_are_filled_up():
    odd = AttentionShape(tokens=15, width=8, key_width=8, mask=FULL, split="contiguous")
    assert elements("ring", 4, odd) == 6 * Fraction(3, 4) * 16 * 8
    assert elements("gather", 4, odd) == 6 * Fraction(3 * (15 - 4) + 12, 4) * 8  # padding is no key, and sees none
    assert isinstance(odd.over(4), Tokens)
    assert np.isclose(float(elements("ulysses", 4, odd)), 3 / 16 * 4 * 16 * 16)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: layer_cost("1d", {"sequence": 4}, shape()),
            "there are no formulas of attention for mode '1d'; there are for",
        ),
        (
            lambda: layer_cost("ring", {"ring": 4}, shape()),
            "mode 'ring' needs the sizes of sequence; 'sequence' is missing",
        ),
        (lambda: layer_cost("2d", {"ring": 4}, shape()), "needs the sizes of ring, ulysses; 'ulysses' is missing"),
        (
            lambda: layer_cost("2d", {"ring": 4, "ulysses": 2}, shape(), outer="star"),
            "outer must be 'ring' or 'gather'",
        ),
        (
            lambda: layer_cost("ulysses", {"sequence": 4}, shape(heads=6, key_heads=6)),
            "heads 6 do not divide by 4 ranks of ulysses; use mode 'ring' or 'gather', or '2d'",
        ),
        (lambda: attention_memory("gather", {"sequence": 4}, shape(), parts=0), "parts must be 1 at least; it is 0"),
        (lambda: shape(heads=6, key_heads=4), "heads 6 are not a multiple of key_heads 4"),
        (lambda: shape(heads=6), "give heads and key_heads together; they are 6 and None"),
        (lambda: AttentionShape(tokens=15, width=8, key_width=8, rows=2), "15 tokens are not those of 2 rows"),
        (lambda: shape(documents=[[96], [90, 6], [96]]), "documents are those of 3 rows, but there are 2"),
    ],
)
def test_what_has_no_cost(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_rows_may_be_cut_for_other_masks_and_into_longer_chunks():
    """As a model with windows in some layers cuts them, and sequence parallelism a rank's tokens further."""
    window = Mask(causal=True, window=6)
    alone, beside = shape(window), shape(window, masks=(CAUSAL,))
    assert alone.over(4).runs == cut_tokens(S, 4, masks=(window,)).runs
    assert beside.over(4).runs == cut_tokens(S, 4, masks=(CAUSAL,)).runs != alone.over(4).runs
    assert elements("gather", 4, beside) > elements("gather", 4, alone)
    assert shape(split="contiguous", multiple=10).over(4).padded == 120
