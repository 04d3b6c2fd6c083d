"""Which elements a rank counts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from par_groups import Box, Segment, Segments, Sharding, cut, whole
from par_precision.norm.counted import EVERYTHING, counted


def one(name, sharding):
    return Segments([Segment(name, sharding)])


def test_a_tensor_of_this_rank_alone_is_counted_whole_and_not_viewed():
    assert counted(one("w", whole((3, 5), (2,))), 15, 2, {0, 1, 2}) is EVERYTHING
    local = torch.ones(3, 5)
    assert EVERYTHING.of(local)[0] is local


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_of_copies_the_lowest_rank_among_those_that_sum_counts(rank):
    segments = one("w", whole((3, 5), (0, 1, 2)))
    everything = counted(segments, 15, rank, {1, 2}).of(torch.ones(3, 5))
    assert sum(each.numel() for each in everything) == (15 if rank == 1 else 0)


def test_padding_is_never_counted():
    flat = torch.arange(20.0)
    segments = one("w", cut(whole((3, 5), (0,)), 0, 15, offset=2))
    assert torch.equal(torch.cat(counted(segments, 20, 0, {0}).of(flat)), flat[2:17])


def test_neighbours_in_a_flat_tensor_are_one_piece_whatever_their_boxes():
    names = [("a", (3, 5), 0), ("b", (17,), 15), ("c", (2, 3, 4), 32)]
    segments = Segments(
        Segment(name, cut(whole(shape, (0,)), 0, torch.Size(shape).numel(), offset=offset))
        for name, shape, offset in names
    )
    assert counted(segments, 56, 0, {0}) is EVERYTHING
    padded = counted(segments, 64, 0, {0}).of(torch.zeros(64))
    assert [each.numel() for each in padded] == [56]


def test_of_a_fused_matrix_only_what_is_no_copy_is_counted():
    """q is this rank's, k and v are copies of rank 0's."""
    q = Box((4, 0), (2, 3), 0, (3, 1), (1,))
    k = Box((8, 0), (2, 3), 6, (3, 1), (0, 1))
    segments = one("qkv", Sharding((12, 3), (q, k)))
    local = torch.arange(12.0).reshape(4, 3)
    pieces = counted(segments, 12, 1, {0, 1}).of(local)
    assert torch.cat([each.flatten() for each in pieces]).tolist() == [0, 1, 2, 3, 4, 5]


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_a_box_with_gaps_in_memory_and_any_cut_count_their_elements_once(rows, columns, data):
    """Columns of a wider local matrix, of which a range is taken."""
    box = Box((0, 0), (rows, columns), 1, (columns + 2, 1), (0,))
    numel = rows * (columns + 2) + 1
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    part = cut(Sharding((rows, columns), (box,)), start, stop)
    local = torch.arange(numel)
    expected = sorted(i for i in box.of(local).flatten().tolist() if start <= i < stop)
    pieces = counted(one("w", part), stop - start, 0, {0}).of(local[start:stop].clone())
    assert sorted(i for piece in pieces for i in piece.flatten().tolist()) == expected


def test_memory_that_is_not_contiguous_is_counted_by_a_copy():
    local = torch.arange(15.0).reshape(5, 3).t()
    segments = one("w", cut(whole((3, 5), (0,)), 0, 10))
    assert torch.equal(torch.cat(counted(segments, 15, 0, {0}).of(local)), local.reshape(-1)[:10])
