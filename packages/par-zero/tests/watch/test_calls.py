"""Ranks that make different calls: all of them raise an error with both calls, before any timeout."""

import logging
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from par_groups.live import calls
from par_testing import for_each
from par_zero import no_sync, reset, shard, summon

from ..helpers import adamw, batch, loss_of, mlp, sgd, sharded, train, whole


def _train_with(module, optimizer, *, steps):
    """Three passes, each with some number of steps on this rank."""
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(module, batch(2, width=8)).backward()
        for _ in range(steps):
            optimizer.step()


def _sharded(stage, **options):
    """A model whose ranks have all stepped, so that stage 3 follows programs, and short looks of the watch."""
    calls._PERIOD = 0.2
    module, optimizer = sharded(mlp(), stage, sgd, **options)
    for step in range(2):
        train(module, optimizer, [[batch(step, width=8)]])
    return module, optimizer


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.ranks(2, backend="gloo")
def test_step_that_one_rank_leaves_out_is_named_on_all_ranks(stage):
    module, optimizer = _sharded(stage)
    with pytest.raises(
        RuntimeError,
        match=r"rank 1 reduces gradients in backward \(now at .*test_calls.py:\d+\) where rank 0 calls optimizer.step",
    ):
        _train_with(module, optimizer, steps=1 - dist.get_rank())


@pytest.mark.ranks(3, backend="gloo")
def test_left_out_step_is_named_among_three_ranks():
    """Three ranks send shards as messages, whose waits no timeout of ours may end."""
    module, optimizer = _sharded(1)
    with pytest.raises(RuntimeError, match=r"optimizer.step"):
        _train_with(module, optimizer, steps=int(dist.get_rank() != 1))


@pytest.mark.parametrize("extra", [-1, 1])
@pytest.mark.ranks(2)
def test_stage_0_compares_the_number_of_steps(extra):
    module, optimizer = sharded(mlp(), 0, sgd)
    train(module, optimizer, [[batch(0, width=8)]])
    with pytest.raises(RuntimeError, match=rf"rank 1 has taken {1 + extra} steps .* where rank 0 has taken 1"):
        _train_with(module, optimizer, steps=1 + extra * dist.get_rank())


def _evaluate(module):
    with torch.no_grad():
        module(batch(0, width=8))


def _summon(module):
    with summon(module):
        pass


def _train_after(call, module, optimizer):
    for step in range(3):
        if call is not None:
            call(module)
        train(module, optimizer, [[batch(step, width=8)]])


def _accumulate(module):
    with no_sync(module):
        loss_of(module, batch(0, width=8)).backward()


_ALONE = {
    "evaluate": (_evaluate, "begins a forward without gradients"),
    "summon": (_summon, "enters par_zero.summon"),
    "no_sync": (_accumulate, "begins a forward within no_sync"),
}


@pytest.mark.parametrize("call", _ALONE)
@pytest.mark.ranks(2, backend="gloo")
def test_call_of_one_rank_at_stage_3_is_named_on_all_ranks(call):
    module, optimizer = _sharded(3)
    alone, text = _ALONE[call]
    with pytest.raises(RuntimeError, match=rf"rank 1 {text}.* where rank 0 begins a forward|ends a forward without"):
        _train_after(alone if dist.get_rank() == 1 else None, module, optimizer)


@pytest.mark.ranks(2, backend="gloo")
def test_reset_of_one_rank_at_stage_1_is_named_on_all_ranks():
    module, _ = _sharded(1)
    with pytest.raises(RuntimeError, match=r"rank 1 calls par_zero.reset .* where rank 0 reduces gradients"):
        reset(module) if dist.get_rank() == 1 else loss_of(module, batch(2, width=8)).backward()


@pytest.mark.ranks(2, backend="gloo")
def test_timeout_names_the_line_of_the_rank_that_does_not_come():
    calls._PERIOD = 0.2
    group = dist.new_group(timeout=timedelta(seconds=2))
    module = mlp()
    optimizer = adamw(module.parameters())
    shard(module, optimizer, stage=3, group=group)
    train(module, optimizer, [[batch(0, width=8)]])
    if dist.get_rank() == 1:
        time.sleep(4)  # stands for a rank that has no more batches
        return
    calls._LOOKS_BEFORE_NOTICE = 3
    text = r"rank 0 begins a forward and waits for rank 1, which is at .*test_calls.py:\d+"
    warned = []
    handler = logging.Handler()
    handler.emit = lambda record: warned.append(record.getMessage())
    logging.getLogger(calls.__name__).addHandler(handler)
    with pytest.raises(RuntimeError, match=text):
        train(module, optimizer, [[batch(1, width=8)]])
    assert re.search(text, *warned)


@for_each(stage=(1, 3))
@pytest.mark.ranks(2)
def test_slow_ranks_that_make_the_same_calls_raise_nothing(stage):
    calls._PERIOD = 0.1
    module, optimizer = _sharded(stage)
    for step in range(2):
        time.sleep(0.3 * dist.get_rank())
        with no_sync(module):
            loss_of(module, batch(step, width=8)).backward()
        time.sleep(0.3 * (1 - dist.get_rank()))
        loss_of(module, batch(step, width=8)).backward()
        time.sleep(0.3 * dist.get_rank())
        optimizer.step()
        optimizer.zero_grad()
    whole(module)
