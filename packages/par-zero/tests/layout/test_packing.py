"""Where parameters lie in a buffer, and how it is dealt out."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from par_zero.layout.packing import ALIGNMENT, PackedItem, pack, pack_atomic

items = st.lists(st.builds(PackedItem, numel=st.integers(1, 300), group=st.integers(-1, 3)), min_size=1, max_size=12)
ranks = st.integers(1, 9)


@pytest.mark.parametrize("packed", [pack, pack_atomic])
@given(items=items, ranks=ranks)
def test_parameters_lie_apart_and_inside(packed, items, ranks):
    layout = packed(items, ranks)
    end = 0
    for start, stop in sorted(layout.slots):
        assert start >= end
        end = stop
    assert end <= layout.size == layout.shard * ranks
    assert [stop - start for start, stop in layout.slots] == [item.numel for item in items]
    assert layout.padding == layout.size - sum(item.numel for item in items)


@pytest.mark.parametrize("packed", [pack, pack_atomic])
@given(items=items, ranks=ranks)
def test_gaps_are_what_is_between(packed, items, ranks):
    layout = packed(items, ranks)
    covered = sorted([*layout.slots, *layout.gaps])
    assert covered[0][0] == 0
    assert covered[-1][1] == layout.size
    assert all(one[1] == other[0] for one, other in itertools.pairwise(covered))


@pytest.mark.parametrize("packed", [pack, pack_atomic])
@given(items=items, ranks=ranks)
def test_the_ranks_slices_are_the_regions_cut(packed, items, ranks):
    layout = packed(items, ranks)
    elements = [
        (each.group, element)
        for rank in range(ranks)
        for each in layout.slices(*layout.share(rank))
        for element in range(each.start, each.stop)
    ]
    expected = [(each.group, element) for each in layout.regions for element in range(each.start, each.stop)]
    assert sorted(elements) == sorted(expected)
    for (start, stop), item in zip(layout.slots, items, strict=True):
        inside = [each for each in layout.regions if each.start <= start and stop <= each.stop]
        assert [each.group for each in inside] == [item.group]


@given(items=items, ranks=ranks)
def test_a_rank_has_one_slice_of_a_param_group(items, ranks):
    layout = pack(items, ranks)
    for rank in range(ranks):
        groups = [each.group for each in layout.slices(*layout.share(rank))]
        assert len(groups) == len(set(groups))


@given(items=items, ranks=ranks)
def test_every_slice_begins_and_ends_on_a_multiple_of_16(items, ranks):
    layout = pack(items, ranks)
    for rank in range(ranks):
        for each in layout.slices(*layout.share(rank)):
            assert each.start % ALIGNMENT == each.stop % ALIGNMENT == 0


@given(items=items, ranks=ranks)
def test_padding_is_below_16_for_each_group_and_rank(items, ranks):
    layout = pack(items, ranks)
    assert layout.padding < ALIGNMENT * (len(layout.regions) + ranks)


@given(items=items, ranks=ranks)
def test_atomic_parameters_are_on_one_rank(items, ranks):
    layout = pack_atomic(items, ranks)
    assert layout.atomic
    for start, stop in layout.slots:
        assert start // layout.shard == (stop - 1) // layout.shard


@given(items=items, ranks=ranks)
def test_atomic_parameters_are_dealt_out_fairly(items, ranks):
    """The longest first: no rank has more than the average and one parameter."""
    layout = pack_atomic(items, ranks)
    aligned = [-(-item.numel // ALIGNMENT) * ALIGNMENT for item in items]
    assert layout.shard <= sum(aligned) / ranks + max(aligned)


def test_a_rank_that_has_little_of_other_buffers_is_chosen_before_one_that_has_much():
    items = [PackedItem(numel=16 * size, group=0) for size in (4, 4, 1, 1, 1, 1)]
    first = pack_atomic(items, 4).loads(items)
    assert first == [64, 64, 32, 32]
    second = pack_atomic(items, 4, first).loads(items)
    assert [one + other for one, other in zip(first, second, strict=True)] == [96] * 4


def test_packing_as_an_example():
    layout = pack([PackedItem(numel=20, group=1), PackedItem(numel=5, group=0), PackedItem(numel=3, group=0)], 2)
    assert layout.slots == ((16, 36), (0, 5), (5, 8))
    assert [(each.group, each.start, each.stop) for each in layout.regions] == [(0, 0, 16), (1, 16, 48)]
    assert layout.shard == 32
    assert layout.padding == 64 - 28
