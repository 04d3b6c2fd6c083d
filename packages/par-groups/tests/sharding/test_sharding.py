import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from par_groups import Box, Sharding, cut, set_sharding, sharding_of, whole
from par_groups.sharding.sharding import row_major


def filled(sharding, numel):
    """The local tensor whose elements are their own global, row-major numbers; padding is -1."""
    numbers = torch.arange(sharding.numel).reshape(sharding.shape)
    local = torch.full((numel,), -1)
    for box in sharding.boxes:
        box.of(local).copy_(numbers[box.slices])
    return local


def column(rank, ranks, shape=(6, 4)):
    """A column shard of a weight [N, K]: N cut over the ranks."""
    rows = shape[0] // len(ranks)
    return Sharding(shape, (Box((rank * rows, 0), (rows, shape[1]), 0, (shape[1], 1), (ranks[rank],)),))


def test_a_box_is_a_view_of_the_local_tensor():
    local = torch.zeros(3, 4)
    box = column(1, (0, 1)).boxes[0]
    box.of(local).fill_(7)
    assert local.eq(7).all()
    assert box.slices == (slice(3, 6), slice(0, 4))
    assert box.numel == 12


def test_fused_qkv_is_three_boxes():
    boxes = tuple(Box((part * 8 + 4, 0), (4, 8), part * 32, (8, 1), (1,)) for part in range(3))
    local = filled(Sharding((24, 8), boxes), 96)
    expected = torch.arange(24 * 8).reshape(3, 2, 4, 8)[:, 1].reshape(-1)
    assert local.equal(expected)


def test_a_box_of_the_whole_tensor_needs_no_contiguity():
    image = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    box = whole(image.shape, (0,)).boxes[0]
    assert box.of(image).data_ptr() == image.data_ptr()
    part = Box((0, 0, 0, 0), (1, 3, 4, 4), 0, row_major((2, 3, 4, 4)), (0,))
    with pytest.raises(ValueError, match="contiguous"):
        part.of(image)


def test_a_view_of_a_larger_storage_starts_where_it_starts():
    storage = torch.arange(20)
    local = storage[5:15]
    assert Box((0,), (3,), 2, (1,), (0,)).of(local).tolist() == [7, 8, 9]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Box((0,), (2, 2), 0, (1,), (0,)), "differ in their dims"),
        (lambda: Box((-1,), (2,), 0, (1,), (0,)), "negative"),
        (lambda: Box((0,), (0,), 0, (1,), (0,)), "empty"),
        (lambda: Sharding((4,), (Box((3,), (2,), 0, (1,), (0,)),)), "leaves the tensor's shape"),
        (lambda: Sharding((4, 4), (Box((0,), (2,), 0, (1,), (0,)),)), "cannot lie"),
        (lambda: Box((0,), (4,), 0, (1,), (0,)).of(torch.zeros(3)), "local tensor has 3"),
        (lambda: set_sharding(torch.zeros(3), whole((4,), (0,))), "ends at local element 3, but the tensor has 3"),
        (lambda: set_sharding(torch.zeros(4), Sharding((4,), whole((4,), (0,)).boxes * 2)), "hold 8 elements"),
        (lambda: cut(whole((4,), (0,)), 3, 2), "needs 0 <= start <= stop"),
        (lambda: cut(whole((4,), (0,)), 0, 2, offset=-1), "offset >= 0"),
    ],
)
def test_a_wrong_record_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_plain_tensor_is_whole_and_this_ranks_own():
    for tensor in (torch.zeros(2, 3), torch.tensor(1.0), torch.zeros(0, 3), torch.nn.Parameter(torch.zeros(4))):
        sharding = sharding_of(tensor)
        assert sharding.shape == tuple(tensor.shape)
        assert sharding.owned(0, {0}) == tensor.numel()


def test_our_record_is_read_back():
    tensor = torch.nn.Parameter(torch.zeros(3, 4))
    record = column(1, (4, 5))
    set_sharding(tensor, record)
    assert sharding_of(tensor) is record


def test_ownership_is_the_lowest_copy_within_the_group():
    box = Box((0,), (2,), 0, (1,), (1, 3, 5))
    assert [rank for rank in range(6) if box.owns(rank, range(6))] == [1]
    assert [rank for rank in range(6) if box.owns(rank, {3, 4, 5})] == [3]
    assert not any(box.owns(rank, {0, 2}) for rank in range(6))


def test_every_covering_group_of_a_hybrid_sharded_tensor_counts_each_element_once():
    """Two replicas (ranks 01 and 23) of a tensor that is cut in two."""
    shardings = {
        rank: Sharding((4,), (Box((rank % 2 * 2,), (2,), 0, (1,), (rank % 2, rank % 2 + 2)),)) for rank in range(4)
    }
    for ranks in ({0, 1}, {2, 3}, {0, 3}, {1, 2}, {0, 1, 2, 3}):
        assert sum(shardings[rank].owned(rank, ranks) for rank in ranks) == 4


@st.composite
def layouts(draw):
    """A box of up to 4 dims anywhere in a larger tensor, its dims in any order and with gaps in the local one."""
    size = draw(st.lists(st.integers(1, 4), min_size=0, max_size=4))
    order = draw(st.permutations(range(len(size))))
    stride, step = [0] * len(size), draw(st.integers(1, 3))
    for dim in order:
        stride[dim] = step
        step *= size[dim] + draw(st.integers(0, 2))
    start = [draw(st.integers(0, 3)) for _ in size]
    shape = tuple(first + length + draw(st.integers(0, 2)) for first, length in zip(start, size, strict=True))
    return Sharding(shape, (Box(tuple(start), tuple(size), draw(st.integers(0, 5)), tuple(stride), (0,)),))


def interleaved():
    """Rows that interleave in memory: addresses 0 2 4 and 3 5 7."""
    return Sharding((2, 3), (Box((0, 0), (2, 3), 0, (3, 2), (0,)),))


@given(layouts(), st.data())
def test_a_flat_range_of_any_box_is_boxes_that_cover_it_exactly(sharding, data):
    check_cut(sharding, data)


@given(st.data())
def test_a_flat_range_of_interleaved_rows(data):
    check_cut(interleaved(), data)


def check_cut(sharding, data):
    last = sharding.boxes[0].last
    start = data.draw(st.integers(0, last + 2))
    stop = data.draw(st.integers(start, last + 4))
    offset = data.draw(st.integers(0, 3))
    local = filled(sharding, last + 5)
    piece = cut(sharding, start, stop, offset=offset)
    assert filled(piece, stop - start + offset)[offset:].equal(local[start:stop])
    counts = torch.zeros(sharding.shape, dtype=torch.int64)
    for box in piece.boxes:
        counts[box.slices] += 1
    assert counts.max() <= 1
    assert counts.sum() == (local[start:stop] >= 0).sum() == piece.local_numel


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_a_flat_range_of_a_whole_tensor_is_few_boxes(shape, data):
    start = data.draw(st.integers(0, math.prod(shape)))
    stop = data.draw(st.integers(start, math.prod(shape)))
    assert len(cut(whole(shape, (0,)), start, stop).boxes) <= 2 * len(shape) - 1


def test_cutting_keeps_the_copies_that_hold_the_same_range():
    """ZeRO over ranks 0 and 2 of a box that ranks 0 to 3 hold: 0 and 1 keep the first half, 2 and 3 the second."""
    sharding = whole((4,), (0, 1, 2, 3))
    halves = {rank: cut(sharding, rank // 2 * 2, rank // 2 * 2 + 2, holders={rank, rank ^ 1}) for rank in range(4)}
    assert halves[1].boxes[0].copies == (0, 1)
    assert halves[2].boxes[0].copies == (2, 3)
    for ranks in itertools.product((0, 1), (2, 3)):
        assert sum(halves[rank].owned(rank, set(ranks)) for rank in ranks) == 4


def test_sum_over_survives_a_cut():
    box = Box((0,), (4,), 0, (1,), (0, 1), sum_over=("row",))
    assert all(piece.sum_over == ("row",) for piece in cut(Sharding((4,), (box,)), 1, 3).boxes)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (4, 1, 5), (0, 3), (3, 0)])
def test_row_major_strides_are_torchs(shape):
    assert row_major(shape) == torch.zeros(shape).stride()
