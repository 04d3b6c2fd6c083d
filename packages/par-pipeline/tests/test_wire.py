"""What a rank does with its connections, without another rank."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from par_pipeline._compile import STATUS, Arrival
from par_pipeline._pipeline import _device_of
from par_pipeline._wire import Channel


class Lane:
    """A communicator that notes what was begun and what was waited for."""

    def __init__(self):
        self.begun, self.waited = [], []

    def send(self, tensors, peer, tag):
        return self.work("send")

    def recv(self, tensors, peer, tag):
        return self.work("recv")

    def work(self, what):
        self.begun.append(what)
        return Work(self, what)


class Work:
    def __init__(self, lane, what):
        self.lane, self.what = lane, what

    def wait(self, timeout):
        self.lane.waited.append(self.what)


def test_a_rank_stays_until_its_word_is_sent_to_who_waits_for_it_and_not_for_who_may_have_left():
    up, down = Lane(), Lane()
    channel = Channel(1, (up, up), (down, down), device=torch.device("cpu"), timeout=timedelta(seconds=1), room=1)
    for heard, waited in ((True, 1), (False, 1), (False, 2), (True, 4)):  # what was not waited for is, a step later
        channel.begin((STATUS,), (Arrival(STATUS, -1),), {})
        channel.expect()
        channel.tell(heard=heard)
        assert len(up.waited) == waited
    assert len(up.begun) == 4
    assert (down.begun, down.waited) == (["recv"], [])


@pytest.mark.ranks(1)
def test_a_group_of_gloo_sends_from_the_cpu_also_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert _device_of(dist.group.WORLD) == torch.device("cpu")
