"""Streams in virtual time hold back nobody but themselves."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from par_testing import Compute, Links, Strict, strict_time, virtual_streams

FLOPS, BANDWIDTH = 1000.0, 100.0
VIRTUAL = Strict(links=Links(inside=(0.0, BANDWIDTH)), compute=Compute(flops=FLOPS, memory=1e30))
PRODUCT = 2 * 8 * 8 * 8 / FLOPS  # seconds of an 8 x 8 product
GATHER = 8 * 8 * 4 / 2 / BANDWIDTH  # of an 8 x 8 weight, between two ranks; as of its gradient


def product(count=1):
    for _ in range(count):
        _ = torch.ones(8, 8) @ torch.ones(8, 8)


@pytest.mark.ranks(1, backend="strict", strict=VIRTUAL)
def test_work_in_a_stream_goes_on_beside():
    strict_time()
    with virtual_streams():
        beside = torch.cpu.Stream()
        product()
        beside.wait_stream(torch.cpu.current_stream())
        with torch.cpu.stream(beside):
            product(3)
            event = beside.record_event()
            product()
        product()
        torch.cpu.current_stream().wait_event(event)
    times = strict_time()
    assert times.computing == pytest.approx(2 * PRODUCT, rel=1e-9)
    assert times.exposed == pytest.approx(2 * PRODUCT, rel=1e-9)
    assert times.total == pytest.approx(4 * PRODUCT, rel=1e-9)
    assert [(span.kind, round(span.begin / PRODUCT), round(span.end / PRODUCT)) for span in times.timeline] == [
        ("compute", 0, 2),
        ("stream 1", 1, 5),
    ]


@pytest.mark.ranks(2, backend="strict", strict=VIRTUAL)
def test_a_collective_in_a_stream_is_waited_for_there():
    strict_time()
    with virtual_streams():
        beside = torch.cpu.Stream()
        with torch.cpu.stream(beside):
            dist.all_reduce(torch.ones(8, 8))
        product()
        assert strict_time().exposed == 0.0
        done = torch.cpu.Event()
        done.record(beside)
        done.wait()
    assert strict_time().total == pytest.approx(2 * GATHER - PRODUCT, rel=1e-9)


@pytest.mark.ranks(2, backend="strict", strict=VIRTUAL)
@pytest.mark.parametrize("streams", [False, True])
def test_fsdp_gathers_ahead_in_its_streams_alone(streams):
    """Forward it gathers the next weight beside a product only if its streams have times; without, it waits at once."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))
    mesh = init_device_mesh("cpu", (2,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)

    def forward():
        strict_time()
        with torch.no_grad():
            model(torch.ones(8, 8))
        return strict_time()

    if streams:
        with virtual_streams():
            forward()
            times = forward()
    else:
        forward()
        times = forward()
    assert times.computing == pytest.approx(4 * PRODUCT, rel=1e-6)
    hidden = 3 * min(GATHER, PRODUCT) if streams else 0.0
    assert times.exposed == pytest.approx(4 * GATHER - hidden, rel=1e-6)


COPYING = Strict(links=Links(inside=(0.0, 1e30)), compute=Compute(flops=1e30, memory=100.0))


@pytest.mark.ranks(2, backend="strict", strict=COPYING)
def test_copies_of_fsdp_are_counted_where_they_are_made():
    model = nn.Linear(8, 8, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    inputs = torch.ones(8, 8)
    with virtual_streams(), torch.no_grad():
        for _ in range(2):
            strict_time()
            model(inputs)
            model.reshard()
            times = strict_time()
    weight = 8 * 8 * 4 / 100.0  # seconds to read or to write it
    product = 3 * weight
    assert times.computing == pytest.approx(2 * weight + product, rel=1e-6)  # out of what was gathered, whole
    assert times.exposed == pytest.approx(2 * weight / 2, rel=1e-6)  # into the gather, a half
