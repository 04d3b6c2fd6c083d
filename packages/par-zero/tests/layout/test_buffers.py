"""Buffers that are lent and used again."""

import torch

from par_zero.layout.buffers import Buffers
from par_zero.layout.meter import Meter

CPU = torch.device("cpu")


def test_a_buffer_that_came_back_is_lent_again():
    buffers = Buffers()
    first = buffers.take(100, torch.float32, CPU)
    place = first.data_ptr()
    buffers.give_back(first)
    again = buffers.take(150, torch.bfloat16, CPU)
    assert (again.data_ptr(), again.shape, again.dtype) == (place, (150,), torch.bfloat16)


def test_the_smallest_that_has_room_is_lent():
    buffers = Buffers()
    large, small = (buffers.take(count, torch.float32, CPU) for count in (200, 100))
    places = large.data_ptr(), small.data_ptr()
    buffers.give_back(large)
    buffers.give_back(small)
    assert buffers.take(80, torch.float32, CPU).data_ptr() == places[1]
    assert buffers.take(80, torch.float32, CPU).data_ptr() == places[0]


def test_one_that_is_too_small_is_replaced_so_that_their_number_does_not_grow():
    buffers = Buffers()
    for count in (10, 20, 30):
        buffers.give_back(buffers.take(count, torch.float32, CPU))
    assert buffers.sizes == (120,)


def test_two_that_are_lent_at_a_time_share_nothing():
    buffers = Buffers()
    first, second = (buffers.take(10, torch.float32, CPU).fill_(value) for value in (1.0, 2.0))
    assert first.eq(1).all()
    assert second.eq(2).all()


def test_buffers_in_another_order_grow_to_the_largest_chunk():
    """The small chunk has the large buffer that was kept when the large chunk needs one."""
    meter = Meter()
    buffers = Buffers(meter)
    for sizes in ((100, 30), (30, 100)):
        for each in [buffers.take(size, torch.float32, CPU) for size in sizes]:
            buffers.give_back(each)
        buffers.keep(1)
    assert meter.fullest["buffers"] == 4 * 200
