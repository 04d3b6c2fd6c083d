"""Claims of ranks, their merge into global tensors, and arithmetic on rectangles."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from par_groups import (
    Box,
    Claims,
    Sharding,
    intersect_rectangles,
    merge_claims,
    subtract_rectangle,
    whole,
)


def entry(key, sharding, dtype=torch.float32):
    return key, dtype, sharding


def rows(key, begin, end, dtype=torch.float32):
    return entry(key, Sharding((6, 4), (Box((begin, 0), (end - begin, 4), 0, (4, 1), (0,)),)), dtype)


MANY = [
    rows("w", 0, 3),
    entry("scalar", whole((), (0,)), torch.bfloat16),
    entry("none", Sharding((0, 3), ())),
    entry("elsewhere", Sharding((2, 2), ()), torch.float8_e5m2),
    entry("two", Sharding((4,), (Box((0,), (1,), 0, (1,), (0,)), Box((3,), (1,), 1, (1,), (0,))))),
]


def sent(entries):
    """The bytes that a rank with these entries tells others."""
    claims = Claims.of(entries)
    return claims.table(), claims.boxes()


def received(claims):
    return Claims.decode_table(claims.table()).with_boxes(claims.boxes())


def test_claims_as_bytes_are_restored():
    claims = Claims.of(MANY)
    again = received(claims)
    assert (tuple(again.tensors), again.may_differ) == (claims.tensors, claims.may_differ)
    assert {dims: each.tolist() for dims, each in again.rows.items()} == {
        0: [[1, 1, 1]],
        1: [[4, 1, 1, 0, 1], [4, 1, 1, 3, 1]],
        2: [[0, 1, 1, 0, 0, 3, 4]],
    }
    assert tuple(received(Claims.of([])).tensors) == ()


def test_claims_with_equal_cuts_share_a_row():
    layers = [
        [rows(f"{layer}.w", 0, 3), rows(f"{layer}.v", 3, 6), entry(f"{layer}.b", whole((3,), ()))] for layer in range(9)
    ]
    claims = Claims.of([each for layer in layers for each in layer])
    assert {dims: each.tolist() for dims, each in claims.rows.items()} == {
        1: [[18, 1, 9, 0, 3]],
        2: [[9, 1, 9, 0, 0, 3, 4], [0, 1, 9, 3, 0, 3, 4]],
    }
    merged = merge_claims([([0], received(claims)), ([1], received(claims))])
    assert [tensor.key for tensor in merged] == [f"{layer}.{name}" for layer in range(9) for name in "wvb"]
    assert len({id(tensor.boxes) for tensor in merged}) == 3
    assert all(tensor.boxes.holders(0).tolist() == [0, 1] for tensor in merged)


def test_claims_have_equal_bytes_only_if_equal():
    same = sent(MANY)
    assert same == sent(list(MANY))
    others = [MANY[1:], MANY[::-1], [rows("w", 0, 4), *MANY[1:]], [rows("v", 0, 3), *MANY[1:]]]
    others.append([rows("w", 0, 3, torch.int32), *MANY[1:]])
    assert len({sent(each) for each in others} - {same}) == 5


def test_merge_lists_all_holders_of_a_box():
    low, high = Claims.of([rows("w", 0, 2)]), Claims.of([rows("w", 2, 6), entry("b", whole((3,), ()))])
    w, b = merge_claims([([0, 2], low), ([1], high), ([3], low)])
    assert (w.key, w.shape, len(w.boxes)) == ("w", (6, 4), 2)
    assert w.boxes.starts.tolist() == [[0, 0], [2, 0]]
    assert w.boxes.sizes.tolist() == [[2, 4], [4, 4]]
    assert [w.boxes.holders(box).tolist() for box in (0, 1)] == [[0, 2, 3], [1]]
    assert (b.key, b.boxes.holders(0).tolist()) == ("b", [1])


def test_merge_sorts_boxes_by_their_first_element():
    (held,) = merge_claims([([rank], Claims.of([rows("w", begin, begin + 2)])) for rank, begin in enumerate((4, 0, 2))])
    assert held.boxes.starts[:, 0].tolist() == [0, 2, 4]
    assert [held.boxes.holders(box).tolist() for box in range(3)] == [[1], [2], [0]]


def test_merge_keeps_a_tensor_without_boxes():
    (held,) = merge_claims([([0], Claims.of([entry("none", Sharding((0, 3), ()))]))])
    assert len(held.boxes) == 0


@pytest.mark.parametrize(
    "other", [rows("w", 0, 3, torch.float16), entry("w", whole((6, 5), ())), entry("w", whole((24,), ()))]
)
def test_merge_with_other_shape_or_dtype_raises(other):
    with pytest.raises(ValueError, match=r"'w' is torch.float32 \(6, 4\) on rank 1, but .* on rank 3; .*layout="):
        merge_claims([([1, 2], Claims.of([rows("w", 0, 3)])), ([3], Claims.of([other]))])


def test_merge_counts_a_rank_with_a_box_twice_once():
    count = entry("w.step", whole((), (0,)))
    twice, once = Claims.of([count, count]), Claims.of([count])
    [merged] = merge_claims([([0], twice), ([1], once)])
    assert merged.boxes.holders(0).tolist() == [0, 1]


shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4)


@st.composite
def pairs(draw):
    """Two rectangles of one tensor."""
    shape = draw(shapes)
    found = []
    for _ in range(2):
        start = tuple(draw(st.integers(0, n - 1)) for n in shape)
        found.append((start, tuple(draw(st.integers(1, n - a)) for n, a in zip(shape, start, strict=True))))
    return tuple(shape), *found


def marked(shape, *rectangles):
    """How many of the rectangles hold each element."""
    seen = torch.zeros(shape, dtype=torch.int64)
    for start, size in rectangles:
        seen[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))] += 1
    return seen


@given(pairs())
def test_rectangles_intersect_and_subtract_as_counted(case):
    shape, one, other = case
    both = intersect_rectangles(one, other)
    if both is None:
        assert marked(shape, one, other).max() <= 1
        return
    assert torch.equal(marked(shape, both), (marked(shape, one, other) == 2).long())
    rest = subtract_rectangle(one, both)
    assert len(rest) <= 2 * len(shape)
    assert torch.equal(marked(shape, both, *rest), marked(shape, one))
