"""What a rank does with its connections, without another rank."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from par_pipeline._program import STATUS, Arrival
from par_pipeline.runtime.pipeline import _device_of
from par_pipeline.wire import channel as _wire
from par_pipeline.wire.channel import NOTHING, Channel
from par_pipeline.wire.message import HEADER, encode


class Lane:
    """A communicator that notes what was begun and what was waited for."""

    def __init__(self):
        self.begun, self.waited, self.buffers = [], [], []

    def send(self, tensors, peer, tag):
        return self.work("send")

    def recv(self, tensors, peer, tag):
        self.buffers += tensors
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


@pytest.mark.parametrize(("comes", "looks"), [(0, 0), (3, 3), (9, 5)])
def test_a_rank_that_waits_looks_for_a_while_before_it_sleeps(monkeypatch, comes, looks):
    up, down = Lane(), Lane()
    channel = Channel(1, (up, up), (down, down), device=torch.device("cpu"), timeout=timedelta(seconds=1), room=1)
    channel.begin((STATUS,), (Arrival(STATUS, -1),), {})
    channel.expect()
    (message,) = encode(NOTHING, [], NOTHING, HEADER, torch.device("cpu"))
    looked = []

    def write():
        down.buffers[0][:] = message

    def let_others_run():
        looked.append(list(down.waited))
        if len(looked) == comes:
            write()

    if comes == 0:
        write()
    monkeypatch.setattr(_wire, "_let_others_run", let_others_run)
    monkeypatch.setattr(_wire, "_AWAKE", 5.0)
    monkeypatch.setattr(_wire.time, "perf_counter", lambda: float(len(looked)))
    monkeypatch.setattr(Work, "wait", lambda work, timeout: (work.lane.waited.append(work.what), write()))
    assert channel.take(STATUS) == (NOTHING, [])
    assert looked == [[]] * looks
    assert down.waited == ["recv"]


@pytest.mark.ranks(1)
def test_a_group_of_gloo_sends_from_the_cpu_also_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert _device_of(dist.group.WORLD) == torch.device("cpu")
