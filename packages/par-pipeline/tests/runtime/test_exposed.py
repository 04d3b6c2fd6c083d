"""A step in virtual time, beside the simulator: how much of the transfers hides behind what ranks compute.

Stages are alike, and a microbatch's forward F, input gradient and weight gradient take a stage the same time; the first
stage's first layer has no input gradient. Virtual time depends on the order of issues and waits alone, so these are
figures, not measurements. The simulator has every transfer begin when its sender is done, as here those do whose
receives are posted by then.
"""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_pipeline import Costs, Shared, simulate
from par_testing import Compute, Links, Strict, for_each, strict_time

from ..runtime_helpers import SCHEDULES, pipeline, strict_apart

RANKS, MICROBATCHES, WIDTH, ROWS = 4, 8, 32, 16
LAYER, TRANSFER = 0.25, 0.5  # seconds of a layer's forward, and of a message
LAYERS = {0.1: 20, 0.25: 8, 0.5: 4}  # of a rank, by the share of its forward that a message takes
MESSAGE = ROWS * WIDTH * 4  # bytes of an output in fp32
VIRTUAL = Strict(
    links=Links(inside=(0.0, MESSAGE / TRANSFER)),
    compute=Compute(flops=2 * ROWS * WIDTH * WIDTH / LAYER, memory=1e30),
)


def prepared(name, share):
    """A schedule, its stages, and seconds of a step in the simulator."""
    schedule = SCHEDULES[name](RANKS, MICROBATCHES)
    layers = LAYERS[share] * RANKS // schedule.stages
    forward = layers * LAYER
    inputs = [forward - LAYER, *([forward] * (schedule.stages - 1))]
    torch.manual_seed(0)
    stages = [
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))) for _ in range(schedule.stages)
    ]
    return schedule, stages, simulate(schedule, Costs(forward, inputs, forward, TRANSFER)).makespan


def makespan(run):
    """Virtual seconds of a step, until the last rank is done; what messages look like is known from the one before."""
    for _ in range(2):
        dist.barrier()
        strict_time()
        run.step(torch.ones(MICROBATCHES * ROWS, WIDTH), target=torch.ones(MICROBATCHES * ROWS, WIDTH))
        total = torch.tensor(strict_time().total, dtype=torch.float64)
    dist.all_reduce(total, dist.ReduceOp.MAX)
    return total.item()


def check(name, share):
    schedule, stages, expected = prepared(name, share)
    takes = makespan(pipeline(stages, schedule, transport={"lanes": strict_apart}))
    if name == "dualpipe_v":  # whose whole backwards are split, too: gradients leave before those of weights are there
        expected = min(takes, expected)
    # Transfers of a lane follow each other here, and the simulator has them overlap.
    assert takes == pytest.approx(expected, rel=0.01)


TYPICAL = [("gpipe", 0.25), ("interleaved", 0.25), ("zb_v", 0.25), ("1f1b", 0.5), ("zb_h1", 0.5)]
"""1f1b and zb_h1 at 0.25 are in the test of hooks, which hold nothing up."""


@for_each(case=TYPICAL)
@pytest.mark.ranks(RANKS, backend="strict", strict=VIRTUAL)
def test_a_step_takes_what_the_simulator_says(case):
    check(*case)


@for_each(case=[case for case in product(SCHEDULES, LAYERS) if case not in TYPICAL])
@pytest.mark.storm
@pytest.mark.ranks(RANKS, backend="strict", strict=VIRTUAL, timeout=180)
def test_a_step_of_any_schedule_takes_what_the_simulator_says(case):
    check(*case)


@pytest.mark.storm
@for_each(name=["1f1b", "zb_h1"])
@pytest.mark.ranks(RANKS, backend="strict", strict=VIRTUAL)
def test_hooks_hold_nothing_up_and_shared_parameters_add_no_more_than_their_exchange(name):
    """One weight of the first and the last stage, whose gradients are exchanged when both are done."""
    schedule, stages, expected = prepared(name, 0.25)
    heard, rank = [], dist.get_rank()
    for parameter in stages[rank].parameters():
        parameter.register_hook(lambda gradient: heard.append(gradient.shape))
    takes = makespan(pipeline(stages, schedule, transport={"lanes": strict_apart}))
    assert takes == pytest.approx(expected, rel=0.01)
    assert len(heard) == 2 * MICROBATCHES * LAYERS[0.25]  # in two steps
    mine = {"0.weight": stages[rank][0].weight} if rank in (0, RANKS - 1) else {}
    shared = makespan(
        pipeline(stages, schedule, transport={"lanes": strict_apart}, shared=[Shared(mine, dist.group.WORLD)])
    )
    exchange = TRANSFER * WIDTH / ROWS  # in each direction at once
    assert takes < shared < takes + 1.05 * exchange  # and small numbers: whether there was a gradient
