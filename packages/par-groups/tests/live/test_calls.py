"""Ranks that make different calls: all of them get a text with both calls and their lines."""

import time

import pytest
import torch.distributed as dist

from par_groups import CallWatch
from par_groups.live import calls


@pytest.mark.ranks(2, backend="gloo")
def test_ranks_that_make_different_calls_are_named():
    calls._PERIOD = 0.1
    parted = []
    watch = CallWatch(dist.group.WORLD, parted.append, waits_in="some_package/wire.py", resets="calls reset")
    watch.note("opens a file")
    watch.agree()
    watch.note(("saves", "loads")[dist.get_rank()])
    while not parted:  # stands for a call that the other rank does not make
        time.sleep(0.01)
    assert parted == [watch]
    text = str(watch.explained(RuntimeError("a collective has failed")))
    assert "rank 1 loads (now at" in text
    assert "where rank 0 saves (now at" in text
    assert "test_calls.py:" in text


@pytest.mark.ranks(2, backend="gloo")
def test_rank_that_is_slow_makes_the_same_calls():
    calls._PERIOD = 0.05
    watch = CallWatch(dist.group.WORLD, pytest.fail, waits_in="some_package/wire.py", resets="calls reset")
    watch.note("opens a file")
    time.sleep(0.3 * dist.get_rank())
    watch.note("saves")
    watch.await_reset()
    watch.agree()
    error = RuntimeError("a collective has failed")
    assert watch.explained(error) is error
    dist.barrier()
