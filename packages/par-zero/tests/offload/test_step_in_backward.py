"""Pieces on the host of an accelerator that are stepped within backward, as soon as their gradients are reduced."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_testing import Accelerator, for_each, storm
from par_zero import Offload, no_sync, reset, shard
from par_zero.offload.offloaded import OffloadedStep

from ..helpers import STAGES, assert_same
from .test_accelerator import BF16, HALF, HOST, WIDER_SUMS, Blocks, trained

BACKWARD = {**HOST, "overlap": "backward"}
HALF_IN_BACKWARD = {**HALF, "overlap": "backward"}
SHARDS_IN_BACKWARD = {**BACKWARD, "parameters": "host"}

alone = pytest.mark.ranks(1, backend="strict", accelerator=Accelerator())
on_ranks = pytest.mark.ranks([storm(1), 2], backend="strict", accelerator=Accelerator())


class SkipsBlocks(Blocks):
    """Every second rank leaves out a block, and all ranks another one in every second step."""

    steps = 0

    def forward(self, x):
        self.steps += 1
        for number, block in enumerate(self.blocks):
            skipped = (number == 0 and dist.get_rank() % 2) or (number == 1 and self.steps % 2)
            x = x if skipped else x + block(x)
        return x


def check(stage, *offloads, **how):
    expected = trained(stage, schedules_last=True, **how)
    for offload in offloads:
        assert_same(trained(stage, Offload(**offload), schedules_last=True, **how), expected)


@for_each(stage=STAGES, make=("fused", storm("foreach"), storm("sgd")), precision=(None, storm(BF16)))
@on_ranks
def test_steps_in_backward_change_no_number(stage, make, precision):
    check(stage, BACKWARD, HALF_IN_BACKWARD, make=make, precision=precision)


@for_each(precision=(storm(None), BF16, storm(WIDER_SUMS)))
@on_ranks
def test_steps_in_backward_of_shards_change_no_number(precision):
    check(3, SHARDS_IN_BACKWARD, precision=precision)


@for_each(stage=(0, storm(1), storm(2), 3))
@on_ranks
def test_steps_in_backward_follow_the_last_microbatch(stage):
    check(stage, BACKWARD, microbatches=3, sync=False)


@for_each(stage=(0, storm(1), 2))
@pytest.mark.ranks(2, backend="strict", accelerator=Accelerator())
def test_chunks_with_unused_parameters_are_stepped_after_backward(stage):
    check(stage, BACKWARD, blocks=SkipsBlocks, steps=5)


def sharded(**offload):
    module = Blocks().to("strict")
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    how = {"overlap": {"bucket": 9_000}, "offload": {**BACKWARD, **offload}}
    shard(module, optimizer, stage=2, group=dist.group.WORLD, **how)

    def backward():
        module(torch.ones(4, 32, device="strict")).sum().backward()

    return module, optimizer, backward


@alone
def test_pieces_are_stepped_before_the_optimizers_own_step(monkeypatch):
    seen = []

    def update_(step, piece, fetched, original=OffloadedStep.update_):
        original(step, piece, fetched)
        seen.append(piece.tensor)

    monkeypatch.setattr(OffloadedStep, "update_", update_)
    module, optimizer, backward = sharded()
    backward()
    optimizer.state_dict()  # waits for the thread
    used = sum(parameter.numel() for parameter in module.blocks.parameters())
    # The chunk with parameters that are never used waits for `step`.
    assert used / 2 < sum(tensor.numel() for tensor in seen) < used
    optimizer.step()
    optimizer.state_dict()
    assert len(set(seen)) == len(seen)
    assert sum(tensor.numel() for tensor in seen) >= used


@alone
def test_backward_without_a_step_after_it_raises():
    module, optimizer, backward = sharded()
    loss = module(torch.ones(4, 32, device="strict")).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"a forward begins before step\(\)"):
        backward()
    with pytest.raises(RuntimeError, match=r"another backward begins before step\(\)"):
        loss.backward()
    reset(module)
    optimizer.zero_grad()
    backward()
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) is called before step\(\)"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    with no_sync(module):
        backward()
    backward()
    optimizer.step()


@alone
def test_gradients_that_backward_has_applied_cannot_be_read():
    _, optimizer, backward = sharded()
    backward()
    gradients = [tensor.grad for tensor in optimizer.param_groups[0]["params"] if tensor.grad is not None]
    with pytest.raises(RuntimeError, match="nothing can read, clip or scale it"):
        torch.nn.utils.get_total_norm(gradients)
    optimizer.step()


@for_each(change=("lr", "found_inf", "grad"))
@alone
def test_change_between_backward_and_step_raises(change):
    _, optimizer, backward = sharded()
    backward()
    if change == "lr":
        optimizer.param_groups[0]["lr"] *= 0.5
    elif change == "found_inf":
        optimizer.found_inf = torch.tensor(0.0)
    else:
        for tensor in optimizer.param_groups[0]["params"]:
            tensor.grad = None
    with pytest.raises(RuntimeError, match=f"'{change}' was changed between backward and step"):
        optimizer.step()


@alone
def test_overlap_with_backward_needs_the_host_of_an_accelerator(tmp_path):
    for device, tiers in (
        ("cpu", {"optimizer": "host"}),
        ("strict", {"optimizer": "disk", "path": tmp_path}),
        ("strict", {"optimizer": "device"}),
    ):
        module = nn.Linear(4, 4, device=device)
        optimizer = torch.optim.AdamW(module.parameters())
        offload = Offload(overlap="backward", **tiers)
        with pytest.raises(ValueError, match="overlap='backward', optimizer="):
            shard(module, optimizer, stage=2, group=dist.group.WORLD, offload=offload)
