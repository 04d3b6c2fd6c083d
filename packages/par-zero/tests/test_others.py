"""Parameters that not all ranks have, such as experts: those who have them share them, and all chunks have one order."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_testing import for_each
from par_zero import Share, no_sync, shard, summon

from .helpers import adamw, for_each_stage
from .routed import Routed, copies, holding, loss_of, norm_of, part_of, subgroup

EXACT = {"rtol": 1e-9, "atol": 1e-10}
"""Of fp64: some roundings of sums in another order, which AdamW divides by roots of small moments."""


def alone(ranks, left_out, *, steps=3, microbatches=1):
    """The model on one device after some steps, and the norm of the gradients of each."""
    module = Routed()
    optimizer = adamw(module.parameters())
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(microbatches):
            losses = [loss_of(module, step, rank, ranks, left_out(step, rank), micro) for rank in range(ranks)]
            (sum(losses) / ranks).backward()
        norms.append(torch.cat([each.grad.flatten() for each in module.parameters() if each.grad is not None]).norm())
        optimizer.step()
    return module, norms


def together(parallel, stage, left_out, *, microbatches=1, bucket=300, steps=3, deferred=False, **groups):
    """The same over ranks that have some of the experts each."""
    module = Routed(parallel)
    optimizer = adamw(module.parameters())
    shard(module, optimizer, stage=stage, bucket=bucket, **groups)
    rank, ranks, norms = dist.get_rank(), dist.get_world_size(), []
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(microbatches):
            loss = loss_of(module, step, rank, ranks, left_out(step, rank), micro)
            if deferred and micro < microbatches - 1:
                with no_sync(module):
                    loss.backward()
            else:
                loss.backward()
        norms.append(norm_of(optimizer))
        optimizer.step()
    return module, norms


def assert_like_alone(result, expected, parallel):
    torch.testing.assert_close(result[1], expected[1], **EXACT)
    with summon(result[0]):
        for (name, mine), value in zip(result[0].named_parameters(), expected[0].parameters(), strict=True):
            torch.testing.assert_close(
                mine, part_of(name, value, parallel), **EXACT, msg=lambda text, name=name: name + text
            )


def everything(step, rank):
    """No rank leaves out anything."""


def above_and_below(step, rank):
    """After the first step, one rank leaves out a linear above the experts, and then another one below."""
    return {(1, 1): 5, (2, 1): 0, (1, 0): 3}.get((step, rank))


@for_each(stage=(0, 1, 2, 3), left_out=(everything, above_and_below))
@pytest.mark.parametrize("parallel", [2, 4])
@pytest.mark.ranks(4, timeout=20)
def test_experts_train_as_on_one_device(stage, left_out, parallel):
    groups = {"group": dist.group.WORLD, "others": [Share(holding(parallel))]}
    assert_like_alone(together(parallel, stage, left_out, **groups), alone(4, left_out), parallel)
