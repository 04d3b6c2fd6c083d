"""Collectives are in flight while there is something to compute, as torch's profiler sees it.

gloo runs on threads of its own. What is launched before what does not depend on the machine; what is in flight during
what does, so that is seen in one of several runs.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from par_zero import shard

from .helpers import for_each_stage

WIDTH, BLOCKS, BATCH = 256, 4, 512
TRIES = 10  # on a busy machine a collective may end before a product gets a core


def sharded(stage):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    optimizer = torch.optim.SGD(model.parameters())
    shard(model, optimizer, stage=stage, group=dist.group.WORLD, overlap={"bucket": 4 * WIDTH * WIDTH})
    return model, optimizer


def intervals(trace, name):
    return sorted((each.time_range.start, each.time_range.end) for each in trace.events() if each.name == name)


def overlap(one, other):
    return min(one[1], other[1]) > max(one[0], other[0])


def traced(run):
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
        run()
    return trace


def seen_in_flight(run, collective, product, which):
    """Whether, on some rank in one of a few runs, the chosen collectives and products overlap."""
    for _ in range(TRIES):
        trace = traced(run)
        seen = torch.tensor(float(which(intervals(trace, collective), intervals(trace, product))))
        dist.all_reduce(seen)  # so that all ranks try equally often
        if seen:
            return True
    return False


def any_overlap(flights, products):
    return any(overlap(flight, product) for flight in flights for product in products)


@pytest.mark.ranks(2, backend="gloo")
@for_each_stage
def test_a_reduction_is_in_flight_while_backward_goes_on(stage):
    (model, optimizer), x = sharded(stage), torch.randn(BATCH, WIDTH)
    launch, flight = ("allreduce_", "all_reduce") if stage == 0 else ("alltoall_base_", "all_to_all")
    trace = traced(model(x).sum().backward)
    launched, products = intervals(trace, f"c10d::{launch}"), intervals(trace, "aten::mm")
    assert len(launched) >= BLOCKS
    for number in range(BLOCKS - 1):  # the products of the blocks below are still to come
        assert launched[number][0] < products[-1][0]

    def run():
        optimizer.zero_grad()  # else later gradients are added, which takes another way
        model(x).sum().backward()

    assert seen_in_flight(run, f"gloo:{flight}", "aten::mm", any_overlap)


@pytest.mark.ranks(2, backend="gloo")
def test_stage_3_begins_to_gather_the_next_unit_before_it_computes_the_current_one():
    (model, _), x, ranks = sharded(3), torch.randn(BATCH, WIDTH), dist.get_world_size()

    def run():
        model(x).sum().backward()

    run()  # records the order
    trace = traced(run)
    launched, products = intervals(trace, "c10d::broadcast_"), intervals(trace, "aten::addmm")
    for number in range(BLOCKS - 1):
        assert launched[(number + 2) * ranks - 1][0] < products[number][0]  # a broadcast for each share of a unit
    assert seen_in_flight(run, "gloo:broadcast", "aten::addmm", any_overlap)
