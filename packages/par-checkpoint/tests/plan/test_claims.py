import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from par_checkpoint.plan import coverage
from par_checkpoint.plan.claims import Claims, LocalTensor, key_of, name_of, section_of, with_unique_keys
from par_checkpoint.plan.coverage import check_covered, is_covered, row_major
from par_checkpoint.plan.merging import merge
from par_groups import Box, Sharding, whole

from ..helpers import rectangle


def entry(name, sharding, dtype=torch.float32, section="model"):
    local = torch.zeros(sharding.local_numel, dtype=dtype)
    return LocalTensor(key=key_of(section, name), dtype=dtype, sharding=sharding, local=local)


def rows(name, begin, end, dtype=torch.float32):
    return entry(name, rectangle((6, 4), 0, begin, end, 0), dtype)


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


def test_they_survive_the_way_to_another_rank():
    claims = Claims.of(MANY)
    again = received(claims)
    assert (tuple(again.tensors), again.may_differ) == (claims.tensors, claims.may_differ)
    assert {dims: each.tolist() for dims, each in again.rows.items()} == {
        0: [[1, 1, 1]],
        1: [[4, 1, 1, 0, 1], [4, 1, 1, 3, 1]],
        2: [[0, 1, 1, 0, 0, 3, 4]],
    }
    assert tuple(received(Claims.of([])).tensors) == ()


def test_tensors_that_are_cut_alike_are_one_row():
    layers = [
        [rows(f"{layer}.w", 0, 3), rows(f"{layer}.v", 3, 6), entry(f"{layer}.b", whole((3,), ()))] for layer in range(9)
    ]
    claims = Claims.of([each for layer in layers for each in layer])
    assert {dims: each.tolist() for dims, each in claims.rows.items()} == {
        1: [[18, 1, 9, 0, 3]],
        2: [[9, 1, 9, 0, 0, 3, 4], [0, 1, 9, 3, 0, 3, 4]],
    }
    merged = merge([([0], received(claims)), ([1], received(claims))])
    assert [tensor.name for tensor in merged] == [f"{layer}.{name}" for layer in range(9) for name in "wvb"]
    assert len({id(tensor.boxes) for tensor in merged}) == 3
    assert all(tensor.boxes.holders(0).tolist() == [0, 1] for tensor in merged)


def test_equal_claims_have_equal_bytes_and_others_do_not():
    same = sent(MANY)
    assert same == sent(list(MANY))
    others = [MANY[1:], MANY[::-1], [rows("w", 0, 4), *MANY[1:]], [rows("v", 0, 3), *MANY[1:]]]
    others.append([rows("w", 0, 3, torch.int32), *MANY[1:]])
    assert len({sent(each) for each in others} - {same}) == 5


def test_holders_of_one_box_are_replicas():
    low, high = Claims.of([rows("w", 0, 2)]), Claims.of([rows("w", 2, 6), entry("b", whole((3,), ()))])
    w, b = merge([([0, 2], low), ([1], high), ([3], low)])
    assert (w.key, w.shape, len(w.boxes)) == ("model:w", (6, 4), 2)
    assert w.boxes.starts.tolist() == [[0, 0], [2, 0]]
    assert w.boxes.sizes.tolist() == [[2, 4], [4, 4]]
    assert [w.boxes.holders(box).tolist() for box in (0, 1)] == [[0, 2, 3], [1]]
    assert (b.key, b.boxes.holders(0).tolist()) == ("model:b", [1])


def test_boxes_are_sorted_by_where_they_begin():
    (held,) = merge([([rank], Claims.of([rows("w", begin, begin + 2)])) for rank, begin in enumerate((4, 0, 2))])
    assert held.boxes.starts[:, 0].tolist() == [0, 2, 4]
    assert [held.boxes.holders(box).tolist() for box in range(3)] == [[1], [2], [0]]


def test_a_tensor_that_nobody_holds_is_known_all_the_same():
    (held,) = merge([([0], Claims.of([entry("none", Sharding((0, 3), ()))]))])
    assert len(held.boxes) == 0
    check_covered([held])


@pytest.mark.parametrize(
    "other", [rows("w", 0, 3, torch.float16), entry("w", whole((6, 5), ())), entry("w", whole((24,), ()))]
)
def test_ranks_must_agree_on_shape_and_dtype(other):
    with pytest.raises(ValueError, match=r"'w' is torch.float32 \(6, 4\) on rank 1, but .* on rank 3; .*layout="):
        merge([([1, 2], Claims.of([rows("w", 0, 3)])), ([3], Claims.of([other]))])


def test_gaps_are_named():
    claims = Claims.of([rows("whole", 0, 6), rows("low", 0, 3), rows("high", 3, 6), rows("x", 1, 2)])
    with pytest.raises(ValueError, match=r"of 'low' \(6, 4\) \(12 held\), 'high' .*, 'x' \(6, 4\) \(4 held\); pass"):
        check_covered(merge([([0], claims)]))
    check_covered(merge([([0], claims)])[:1])


def test_two_tensors_of_one_name_are_told_apart_by_key_alone():
    one, two, three = with_unique_keys([rows("w", 0, 3), rows("w", 3, 6), rows("v", 0, 6)])
    assert len({one.key, two.key, three.key}) == 3
    assert [each.name for each in (one, two, three)] == ["w", "w", "v"]
    assert section_of(two.key) == "model"
    assert name_of("optimizer:a:b.exp_avg") == "a:b.exp_avg"


shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)


@st.composite
def boxed(draw):
    """A shape and some boxes in it."""
    shape = draw(shapes)
    boxes = []
    for _ in range(draw(st.integers(0, 8))):
        start = [draw(st.integers(0, n - 1)) for n in shape]
        boxes.append((start, [draw(st.integers(1, n - a)) for n, a in zip(shape, start, strict=True)]))
    starts = torch.tensor([start for start, _ in boxes], dtype=torch.int64).view(len(boxes), len(shape))
    sizes = torch.tensor([size for _, size in boxes], dtype=torch.int64).view(len(boxes), len(shape))
    return shape, starts, sizes


def counted(shape, starts, sizes):
    """The same, element by element."""
    seen = torch.zeros(shape, dtype=torch.bool)
    for start, size in zip(starts.tolist(), sizes.tolist(), strict=True):
        seen[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))] = True
    return bool(seen.all())


@given(boxed())
def test_it_is_what_counting_finds(case):
    assert is_covered(*case) == counted(*case)


@given(boxed())
def test_slab_by_slab_it_is_the_same(case):
    cells, coverage._CELLS = coverage._CELLS, 1
    try:
        assert is_covered(*case) == counted(*case)
    finally:
        coverage._CELLS = cells


@pytest.mark.parametrize("hole", [None, (0, 0), (5, 3), (6, 7)])
def test_every_element_as_its_own_box(hole):
    starts = torch.tensor([(i, j) for i in range(7) for j in range(8) if (i, j) != hole])
    assert is_covered((7, 8), starts, torch.ones_like(starts)) == (hole is None)


def test_quarters_with_one_too_short():
    starts = torch.tensor([[0, 0], [0, 2], [2, 0], [2, 2]])
    sizes = torch.full((4, 2), 2)
    assert is_covered((4, 4), starts, sizes)
    sizes[2, 1] = 1
    assert not is_covered((4, 4), starts, sizes)
    assert not is_covered((4, 4), torch.cat([starts, starts]), torch.cat([sizes, sizes]))  # enough elements, same hole


def test_an_empty_tensor_needs_nobody():
    assert is_covered((3, 0), torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2, dtype=torch.int64))


def test_strides_of_a_contiguous_tensor():
    assert row_major((2, 3, 4)) == (12, 4, 1)
    assert row_major(()) == ()


def test_a_rank_that_has_a_box_twice_is_one_holder():
    count = entry("w.step", whole((), (0,)))
    twice, once = Claims.of([count, count]), Claims.of([count])
    [merged] = merge([([0], twice), ([1], once)])
    assert merged.boxes.holders(0).tolist() == [0, 1]
