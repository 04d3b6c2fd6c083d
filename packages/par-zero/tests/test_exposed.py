"""What a step waits for, in virtual time: how well communication hides behind what is computed.

A rank computes 400e12 operations and communicates 2e12 bytes a second, so that a unit's gradients are reduced in less
time than its backward pass takes. Virtual time depends on the order of issues and waits alone, so these are figures,
not measurements: a wait that comes too early shows here, on any machine.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_testing import Compute, Links, Strict, strict_time
from par_zero import shard

WIDTH, BLOCKS, ROWS = 256, 8, 256
BANDWIDTH, FLOPS = 2e12, 400e12
BLOCK = 3 * WIDTH * WIDTH * 4  # bytes of three linears in fp32
FORWARD = 3 * 2 * ROWS * WIDTH * WIDTH / FLOPS  # seconds of a block
GATHER = BLOCK / 2 / BANDWIDTH  # seconds of an all-gather or a reduce-scatter of a block between two ranks
COMPUTED = (3 * BLOCKS * 3 - 1) * FORWARD / 3  # backward is twice forward; the first linear's input wants no gradient
SLACK = 0.1e-6  # seconds: norms, flags and the like
LINKS = Links(inside=(0.0, BANDWIDTH))
VIRTUAL = Strict(links=LINKS, compute=Compute(flops=FLOPS, memory=1e30))

EXPOSED = {
    0: 2 * GATHER,  # the last gradients, which are there when backward ends
    1: GATHER + BLOCKS * GATHER,  # and after the step, all parameters
    2: GATHER + BLOCKS * GATHER,
    3: GATHER + GATHER,  # the first block's parameters, for which nothing can be computed before
}


def steps(stage, count):
    """Virtual time of some steps."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))) for _ in range(BLOCKS))
    model = nn.Sequential(*blocks)
    optimizer = torch.optim.AdamW(model.parameters())
    shard(model, optimizer, stage=stage, group=dist.group.WORLD, bucket=BLOCK)
    inputs = torch.ones(ROWS, WIDTH)
    for _ in range(count):
        strict_time()
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield strict_time()


@pytest.mark.ranks(2, backend="strict", strict=VIRTUAL)
@pytest.mark.parametrize("stage", range(4))
def test_a_step_is_exposed_to_what_nothing_can_hide(stage):
    *_, last = steps(stage, 3)
    assert last.computing == pytest.approx(COMPUTED, rel=0.01)
    assert last.exposed == pytest.approx(EXPOSED[stage], abs=SLACK), last.by_site


@pytest.mark.ranks(2, backend="strict", strict=VIRTUAL)
def test_the_first_step_of_stage_3_waits_for_every_gather():
    """It does not know yet what comes next.

    Once forward and once backward, but for the block that is still there; backward perhaps behind the reduction of the
    block before, if that goes over the same communicator.
    """
    first, *_ = steps(3, 1)
    backward = BLOCKS - 1
    assert (BLOCKS + backward) * GATHER < first.exposed < (BLOCKS + 2 * backward + 1) * GATHER + SLACK, first.by_site
