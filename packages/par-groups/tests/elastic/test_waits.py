"""Waits behave as torch's until the epoch ends, and raise then."""

import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from par_groups.elastic.waits import let_waits_end

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="losing a rank needs Linux")


def replaced(monkeypatch):
    """Replace torch's wait until the end of a test. Return the present epoch, as a list of one item."""
    monkeypatch.setattr(dist.Work, "wait", dist.Work.wait)
    epoch = [0]
    let_waits_end(lambda: epoch[0])
    return epoch


def waiters():
    return [each for each in threading.enumerate() if each.name == "par_groups-messages"]


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("timeout", [timedelta(0), timedelta(seconds=60), 60.0])
def test_values_arrive_while_the_epoch_lasts(monkeypatch, timeout):
    replaced(monkeypatch)
    peer, mine, theirs = 1 - dist.get_rank(), torch.ones(3), torch.empty(3)
    sent = dist.isend(mine, peer)
    dist.irecv(theirs, peer).wait(timeout)
    sent.wait(timeout)
    dist.all_reduce(theirs, async_op=True).wait(timeout)
    assert theirs.tolist() == [2, 2, 2]
    assert len(waiters()) == 1  # used again for each message


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.parametrize("operation", ["all_reduce", "irecv"])
def test_wait_raises_once_the_epoch_ends(monkeypatch, operation):
    epoch, tensor = replaced(monkeypatch), torch.ones(3)
    if dist.get_rank() == 0:
        begun = dist.all_reduce(tensor, async_op=True) if operation == "all_reduce" else dist.irecv(tensor, 1)
        if operation == "all_reduce":
            with pytest.raises(RuntimeError, match="timed out"):
                begun.wait(timedelta(seconds=0.3))
        threading.Timer(0.3, lambda: epoch.__setitem__(0, None)).start()
        with pytest.raises(dist.DistNetworkError, match=r"the epoch of this call has ended.*call Members\.form"):
            begun.wait()
    else:
        time.sleep(2)  # the other rank waits
        dist.all_reduce(tensor) if operation == "all_reduce" else dist.send(tensor, 0)
    epoch[0] = 0
    dist.barrier()  # the call has ended on both


@pytest.mark.parametrize("error", [RuntimeError("Connection closed by peer"), TypeError("incompatible arguments")])
def test_message_that_fails_raises_and_leaves_no_thread_behind(monkeypatch, error):
    class Message:
        def _get_op_type(self):
            return 13

    def fail(work, timeout):
        raise error

    monkeypatch.setattr(dist.Work, "wait", fail)
    let_waits_end(lambda: 0)
    before = len(waiters())
    for _ in range(5):
        with pytest.raises(type(error), match=str(error)):
            dist.Work.wait(Message())
    assert len(waiters()) == before + 1
