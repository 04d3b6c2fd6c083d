"""Collectives are in flight during products, as torch's profiler sees it: gloo runs on threads of its own."""

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from par_groups import ProcessGroups, Topology
from par_layers import initialize, layer_set

TRIES = 10  # on a busy machine a collective may end before the product gets a core


def intervals(events, name):
    return [(each.time_range.start, each.time_range.end) for each in events if each.name == name]


def overlap(one, other):
    return min(one[1], other[1]) > max(one[0], other[0])


def seen_in_flight(run, collective, product, which):
    """Whether, on some rank in one of a few runs, the chosen collective and product overlap."""
    seen = torch.zeros(1)
    for _ in range(TRIES):  # equally often on every rank
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace:
            run()
        flights, products = intervals(trace.events(), collective), intervals(trace.events(), product)
        seen += which(sorted(flights), sorted(products))
    dist.all_reduce(seen)
    return seen.item() > 0


@pytest.mark.ranks(2, backend="gloo")
def test_the_input_gradients_all_reduce_is_in_flight_during_the_weight_gradient():
    with ProcessGroups(Topology.from_config({"tensor": {"size": 2, "mode": "1d"}}, 2)) as groups:
        column = layer_set("auto", groups).ColumnLinear(512, 512)
        initialize(column, seed=0)
        x = torch.randn(2048, 512, requires_grad=True)
        y = column(x)
        gradient = torch.ones_like(y)

        def backward():
            y.backward(gradient, retain_graph=True)

        def second_product(flights, products):  # the first one is the input gradient itself
            return len(flights) == 1 and overlap(flights[0], products[-1])

        assert seen_in_flight(backward, "gloo:all_reduce", "aten::mm", second_product)


@pytest.mark.ranks(4, backend="gloo")
def test_summas_next_broadcasts_are_in_flight_during_the_current_product():
    with ProcessGroups(Topology.from_config({"tensor": {"size": 4, "mode": "2d"}}, 4)) as groups:
        column = layer_set("auto", groups).ColumnLinear(512, 512, bias=False)
        initialize(column, seed=0)
        x = torch.randn(1024, 256)

        def forward():
            with torch.no_grad():
                column(x)

        def next_during_first(flights, products):  # 2 of block 0, then 2 of block 1
            return len(flights) == 4 and any(overlap(flight, products[0]) for flight in flights[2:])

        assert seen_in_flight(forward, "gloo:broadcast", "aten::addmm_", next_during_first)
