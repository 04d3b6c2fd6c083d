"""What a rank does with its connections, without another rank."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from par_pipeline._program import STATUS, ExpectedMessage, Message
from par_pipeline.runtime.pipeline import _device_of
from par_pipeline.wire import inbox as _inbox
from par_pipeline.wire.inbox import Inbox
from par_pipeline.wire.lanes import Lane, Lanes, make_lanes
from par_pipeline.wire.message import HEADER, NOTHING, encode
from par_pipeline.wire.outbox import Outbox
from par_pipeline.wire.wire import Wire


class Communicator:
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
    def __init__(self, communicator, what):
        self.communicator, self.what = communicator, what

    def wait(self, timeout):
        self.communicator.waited.append(self.what)


def lane():
    """A lane to rank 1, and the communicator that it uses."""
    communicator = Communicator()
    return Lane(1, communicator, communicator, timedelta(seconds=1)), communicator


def test_a_rank_stays_until_its_word_is_sent_to_who_waits_for_it_and_not_for_who_may_have_left():
    up, communicator = lane()
    outbox = Outbox(up, torch.device("cpu"), are_apart=False)
    for awaited, waited in ((True, 1), (False, 1), (False, 2), (True, 4)):  # what was not waited for is, a step later
        outbox.begin((STATUS,), {})
        outbox.give_status(awaited=awaited)
        assert len(communicator.waited) == waited
    assert len(communicator.begun) == 4


@pytest.mark.parametrize(("budget", "posted"), [(0, 1), (1, 1), (HEADER, 1), (HEADER + 1, 2), (1 << 20, 3)])
def test_receives_are_posted_up_to_a_budget_and_one_always(budget, posted):
    down, communicator = lane()
    inbox = Inbox(down, torch.device("cpu"), budget, lambda position: None, are_apart=False, peer=0)
    messages = [Message(gradient=False, stage=1, microbatch=k) for k in range(2)]
    inbox.prepare((*map(ExpectedMessage, messages, range(2)), ExpectedMessage(STATUS, -1)))
    assert communicator.begun == ["recv"] * posted


@pytest.mark.parametrize(("comes", "looks"), [(0, 0), (3, 3), (9, 5)])
def test_a_rank_that_waits_looks_for_a_while_before_it_sleeps(monkeypatch, comes, looks):
    down, communicator = lane()
    inbox = Inbox(down, torch.device("cpu"), 1, lambda position: None, are_apart=False, peer=0)
    inbox.begin((ExpectedMessage(STATUS, -1),))
    inbox.expect()
    inbox.expect()  # which posts no other one
    assert (communicator.begun, communicator.waited) == (["recv"], [])
    ((_, message),) = encode(NOTHING, [], NOTHING, HEADER)
    looked = []

    def write():
        communicator.buffers[0][:] = message

    def let_others_run():
        looked.append(list(communicator.waited))
        if len(looked) == comes:
            write()

    if comes == 0:
        write()
    monkeypatch.setattr(_inbox, "_let_others_run", let_others_run)
    monkeypatch.setattr(_inbox, "_AWAKE", 5.0)
    monkeypatch.setattr(_inbox.time, "perf_counter", lambda: float(len(looked)))
    monkeypatch.setattr(Work, "wait", lambda work, timeout: (work.communicator.waited.append(work.what), write()))
    assert inbox.take(STATUS) == (NOTHING, [])
    assert looked == [[]] * looks
    assert communicator.waited == ["recv"]


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("looks", "timeout"), [(0, 900.0), (3, 900.0), (1 << 30, 0.1)])
def test_transfers_of_steps_that_are_over_end_before_the_rest_is_aborted_unless_a_rank_is_gone(looks, timeout):
    seen = []

    class Event:
        def query(self):
            seen.append("looks")
            return len(seen) > looks

    class Ends(Lanes):
        def abort(self):
            seen.append("aborts")

    def lanes(*given):
        return Ends(*make_lanes(*given))

    wire = Wire(dist.group.WORLD, torch.device("cpu"), timedelta(seconds=timeout), 1, lanes)
    wire._last_step = Event()
    wire.close("the test is over", is_idle=False)
    wire.close("the test is over", is_idle=False)
    if looks < 9:
        assert seen == ["looks"] * (looks + 1) + ["aborts"]
    assert seen.index("aborts") == len(seen) - 1


@pytest.mark.ranks(1)
def test_a_group_of_gloo_sends_from_the_cpu_also_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *, check_available: torch.device("cuda"))
    assert _device_of(dist.group.WORLD) == torch.device("cpu")
