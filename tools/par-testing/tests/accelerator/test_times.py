"""Virtual time: what a program takes on the device, as computed by hand."""

import json

import pytest
import torch

from par_testing import Costs, device_times, host_works

LAYERS, SIZE = 4, 64
COPY, PRODUCT = 4 * SIZE * SIZE / 1e6, 2 * SIZE**3 / 1e8  # seconds, by the rates below
COSTS = Costs(flops=1e8, memory=1e30, link=1e6, latency=0.0, launch=0.0)


def module():
    return torch.get_device_module("strict")


def measured(run):
    weights = [torch.randn(SIZE, SIZE, pin_memory=True) for _ in range(LAYERS)]
    x = torch.ones(SIZE, SIZE, device="strict")
    torch.accelerator.synchronize()
    device_times()
    run(weights, x)
    return device_times()


@pytest.mark.accelerator(costs=COSTS)
def test_copies_on_the_current_stream_add_to_products():
    def serial(weights, x):
        for weight in weights:
            x = x @ weight.to("strict", non_blocking=True)

    times = measured(serial)
    assert times.total == pytest.approx(LAYERS * (COPY + PRODUCT))
    assert times.computing == pytest.approx(LAYERS * PRODUCT)
    assert times.exposed == 0


@pytest.mark.accelerator(costs=COSTS)
def test_prefetched_copies_hide_behind_products(tmp_path):
    def prefetched(weights, x):
        into, there = module().Stream(), []
        for weight in weights:
            with module().stream(into):
                there.append((weight.to("strict", non_blocking=True), into.record_event()))
        for weight, done in there:
            module().current_stream().wait_event(done)
            x = x @ weight
        into.synchronize()

    times = measured(prefetched)
    exposed = COPY + (LAYERS - 1) * max(0.0, COPY - PRODUCT)
    assert times.total == pytest.approx(LAYERS * PRODUCT + exposed)
    assert times.exposed == pytest.approx(exposed)
    ((where, seconds),) = times.by_site.items()
    assert where.startswith("test_times.py:")
    assert seconds == pytest.approx(exposed)
    times.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["cat"] for event in events} == {"stream 0 compute", "stream 1 into"}


@pytest.mark.accelerator(costs=Costs(launch=0.0, host=1e9))
def test_work_of_the_host_holds_back_later_launches():
    x = torch.ones(8, device="strict")
    torch.accelerator.synchronize()
    device_times()
    host_works(1_000_000)
    x.add_(1)
    assert device_times().total == pytest.approx(1e-3, rel=1e-6)
