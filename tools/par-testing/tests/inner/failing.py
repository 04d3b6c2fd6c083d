"""Worlds that end badly, each in its own way. Run by test_failures.py, never by itself."""

import os
import signal
import threading
import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

from par_testing import fail_at

LIMIT = 8  # seconds, of worlds that hang: their ranks have long begun by then, also where a machine is busy


def wait_for_the_end_of(rank):
    """Returns when that rank, which sends nothing, has ended."""
    with suppress(RuntimeError):
        dist.recv(torch.zeros(1), rank)


@pytest.mark.ranks(1)
def test_first():
    """The start of the forkserver is in the seconds of the first test."""


@pytest.mark.ranks(2)
def test_raise():
    print("a word on stdout")
    os.write(2, b"a word on file descriptor 2\n")
    value = 3
    if dist.get_rank() == 1:
        assert value + 1 == dist.get_world_size()
    dist.barrier()


@pytest.mark.ranks(3, timeout=LIMIT)
def test_hang():
    fail_at(rank=1, step=0, how="hang").check(dist.get_rank(), 0)
    dist.barrier()


@pytest.mark.ranks(2, timeout=LIMIT, init=False)
def test_hang_before_the_others_give_up():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        time.sleep(100)
    dist.all_reduce(torch.ones(1))


@pytest.mark.ranks(2, timeout=LIMIT, init=False)
def test_hang_below_backward():
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    if dist.get_rank() == 1:
        time.sleep(100)
    model(torch.ones(2)).sum().backward()


@pytest.mark.ranks(3)
def test_kill():
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


@pytest.mark.ranks(2)
def test_crash():
    if dist.get_rank() == 1:
        signal.raise_signal(signal.SIGSEGV)
    dist.barrier()


@pytest.mark.ranks(2)
def test_exit():
    if dist.get_rank() == 1:
        os._exit(0)
    dist.barrier()


@pytest.mark.ranks(3)
def test_two_fail_by_themselves():
    if dist.get_rank() == 0:
        wait_for_the_end_of(1)
    if dist.get_rank() < 2:
        raise ValueError(f"from rank {dist.get_rank()}")


@pytest.mark.ranks(2, timeout=LIMIT)
def test_stopped():
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.ranks(2, timeout=LIMIT)
def test_thread_left_behind():
    if dist.get_rank() == 1:
        threading.Thread(target=time.sleep, args=(100,)).start()


@pytest.mark.ranks(2)
def test_skip():
    if dist.get_rank() == 1:
        pytest.skip("not today")
    dist.barrier()


@pytest.mark.ranks(2)
def test_skip_hides_no_failure():
    if dist.get_rank() == 1:
        wait_for_the_end_of(0)
        pytest.skip("not today")
    raise ValueError("a failure of its own")


@pytest.mark.ranks(2)
def test_xfail():
    pytest.xfail("known")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("function", [lambda: None], ids=["lambda"])
def test_unpicklable(function):
    pass


@pytest.mark.ranks(2, dies=(1,))
def test_survives():
    pass


@pytest.mark.ranks(2, dies=(1,))
def test_raises_instead_of_dying():
    if dist.get_rank() == 1:
        raise ValueError("I only raise")


@pytest.mark.ranks(1)
def test_warning_is_an_error():
    import warnings

    warnings.warn("a leak", stacklevel=1)


@pytest.mark.ranks(1)
async def test_async():
    raise AssertionError("never reached")
