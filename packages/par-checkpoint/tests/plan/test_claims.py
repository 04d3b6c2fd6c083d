import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from par_checkpoint.plan import coverage
from par_checkpoint.plan.claims import LocalTensor, claims_of, key_of, name_of, section_of, with_unique_keys
from par_checkpoint.plan.coverage import check_covered, is_covered, row_major
from par_groups import merge_claims

from ..helpers import rectangle


def entry(name, sharding, dtype=torch.float32, section="model"):
    local = torch.zeros(sharding.local_numel, dtype=dtype)
    return LocalTensor(key=key_of(section, name), dtype=dtype, sharding=sharding, local=local)


def rows(name, begin, end, dtype=torch.float32):
    return entry(name, rectangle((6, 4), 0, begin, end, 0), dtype)


def test_gaps_are_named():
    claims = claims_of([rows("whole", 0, 6), rows("low", 0, 3), rows("high", 3, 6), rows("x", 1, 2)])
    with pytest.raises(ValueError, match=r"of 'low' \(6, 4\) \(12 held\), 'high' .*, 'x' \(6, 4\) \(4 held\); pass"):
        check_covered(merge_claims([([0], claims)]))
    check_covered(merge_claims([([0], claims)])[:1])


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
