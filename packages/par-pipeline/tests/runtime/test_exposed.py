"""A step in virtual time, beside the simulator: how much of the transfers hides behind what ranks compute.

Stages are alike, and a microbatch's forward F, input gradient and weight gradient take a stage the same time; the first
stage's first layer has no input gradient. Virtual time depends on the order of issues and waits alone, so these are
figures, not measurements. The simulator has every transfer begin when its sender is done. A receive of a tensor that
comes apart, as over NCCL, is posted when its stage needs it, so that in the steady part of a step ranks wait for it.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_pipeline import Costs, Shared, one_f_one_b, simulate, zb_h1
from par_testing import Compute, Links, Strict, strict_time

from ..runtime_helpers import pipeline, strict_apart

RANKS, MICROBATCHES, LAYERS, WIDTH, ROWS = 4, 8, 4, 32, 16
FORWARD = 1.0  # seconds
FLOPS = LAYERS * 2 * ROWS * WIDTH * WIDTH / FORWARD
MESSAGE = ROWS * WIDTH * 4  # bytes of an output in fp32
SCHEDULES = {"1f1b": one_f_one_b, "zb_h1": zb_h1}


def virtual(share):
    """Ranks between which a message takes that share of a forward."""
    return Strict(links=Links(inside=(0.0, MESSAGE / (share * FORWARD))), compute=Compute(flops=FLOPS, memory=1e30))


def expected(schedule, share):
    inputs = [FORWARD * (1 - 1 / LAYERS), *([FORWARD] * (RANKS - 1))]
    return simulate(schedule, Costs(FORWARD, inputs, FORWARD, share * FORWARD)).makespan


def stages():
    torch.manual_seed(0)
    return [nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))) for _ in range(RANKS)]


def makespan(run, count=3):
    """Virtual seconds of the last of some steps, until the last rank is done."""
    for _ in range(count):
        dist.barrier()
        strict_time()
        run.step(torch.ones(MICROBATCHES * ROWS, WIDTH), target=torch.ones(MICROBATCHES * ROWS, WIDTH))
        total = torch.tensor(strict_time().total, dtype=torch.float64)
    dist.all_reduce(total, dist.ReduceOp.MAX)
    return total.item()


TAKES = {  # seconds, by the share of a forward that a message takes; the simulator says 34.15, 36.5, 40.5 and ...
    "1f1b": {0.1: 34.65, 0.25: 37.5, 0.5: 42.25},
    "zb_h1": {0.1: 28.8, 0.25: 31.5, 0.5: 36.25},  # ... 27.9, 29.5, 32.5
}


def check(name, share):
    schedule = SCHEDULES[name](RANKS, MICROBATCHES)
    takes = makespan(pipeline(stages(), schedule, lanes=strict_apart))
    assert takes == pytest.approx(TAKES[name][share], rel=1e-3)  # losses and barriers are small
    assert expected(schedule, share) < takes < 1.12 * expected(schedule, share)


@pytest.mark.ranks(RANKS, backend="strict", strict=virtual(0.1))
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_waits_for_receives_alone(name):
    check(name, 0.1)


@pytest.mark.ranks(RANKS, backend="strict", strict=virtual(0.25))
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_waits_for_longer_receives_alone(name):
    check(name, 0.25)


@pytest.mark.ranks(RANKS, backend="strict", strict=virtual(0.5))
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_step_waits_for_receives_of_half_a_forward_alone(name):
    check(name, 0.5)


@pytest.mark.ranks(RANKS, backend="strict", strict=virtual(0.25))
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_gradient_hook_holds_nothing_up(name):
    own, heard = stages(), []
    for parameter in own[dist.get_rank()].parameters():
        parameter.register_hook(lambda gradient: heard.append(gradient.shape))
    run = pipeline(own, SCHEDULES[name](RANKS, MICROBATCHES), lanes=strict_apart)
    assert makespan(run) == pytest.approx(TAKES[name][0.25], rel=1e-3)
    assert len(heard) == 3 * MICROBATCHES * LAYERS  # in three steps


@pytest.mark.ranks(RANKS, backend="strict", strict=virtual(0.25))
@pytest.mark.parametrize("name", SCHEDULES)
def test_shared_parameters_add_no_more_than_their_exchange(name):
    """One weight of the first and the last stage, whose gradients are exchanged when both are done."""
    own, rank = stages(), dist.get_rank()
    mine = {"0.weight": own[rank][0].weight} if rank in (0, RANKS - 1) else {}
    shared = [Shared(mine, dist.group.WORLD)]
    run = pipeline(own, SCHEDULES[name](RANKS, MICROBATCHES), lanes=strict_apart, shared=shared)
    exchange = 0.25 * FORWARD * WIDTH / ROWS  # in each direction at once
    before = TAKES[name][0.25]
    assert before < makespan(run) < before + 1.05 * exchange  # and small numbers: whether there was a gradient
