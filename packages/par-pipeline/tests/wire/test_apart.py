"""When the receives of tensors that come apart are posted, and how many of them."""

from datetime import timedelta

import torch

from par_pipeline.wire.apart import Apart
from par_pipeline.wire.lanes import Lane


class Communicator:
    """A communicator that notes the sizes of what is received, and what was waited for."""

    def __init__(self):
        self.begun, self.waited = [], []

    def recv(self, tensors, peer, tag):
        self.begun += map(len, tensors)
        return Work(self, len(tensors[0]))


class Work:
    def __init__(self, communicator, size):
        self.communicator, self.size = communicator, size

    def wait(self):
        self.communicator.waited.append(self.size)


def receives(plan, budget=1 << 20):
    """The receives from rank 1 in a step of this plan, and the communicator that they use."""
    communicator = Communicator()
    apart = Apart(Lane(1, None, communicator, timedelta(seconds=1)), torch.device("cpu"), budget)
    apart.begin(plan)
    apart.post()
    return apart, communicator


def test_the_next_receive_is_posted_when_a_message_is_taken_and_no_other_one():
    apart, communicator = receives([(0, 64), (1, 128), (2, 64)])
    for count, size in enumerate((64, 128, 64)):
        assert len(communicator.begun) == count + 1
        assert len(communicator.waited) == count
        assert len(apart.receive(size)) == size
        apart.taken()
    assert communicator.begun == communicator.waited == [64, 128, 64]


def test_what_is_taken_before_an_earlier_message_is_posted_with_that_one_if_there_is_memory():
    for budget, ahead in ((1 << 20, 2), (64, 1)):
        apart, communicator = receives([(0, 64), (0, 64), (2, 64)], budget)
        assert len(communicator.begun) == ahead
        assert [len(apart.receive(64)), len(apart.receive(64))] == [64, 64]
        for posted in (2, 3):  # once both are taken
            apart.taken()
            assert len(communicator.begun) == posted


def test_a_message_of_unknown_size_is_posted_when_its_header_says_it_and_holds_the_next_ones_back():
    apart, communicator = receives([(0, None), (1, 64)])
    assert not communicator.begun
    assert len(apart.receive(192)) == 192
    apart.taken()
    assert communicator.begun == [192, 64]


def test_nothing_is_posted_for_what_has_no_bytes():
    apart, communicator = receives([(0, None), (1, 64)])
    assert len(apart.receive(0)) == 0
    apart.taken()
    assert (communicator.begun, communicator.waited) == ([64], [])
