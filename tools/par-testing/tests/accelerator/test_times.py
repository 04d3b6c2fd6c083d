"""Virtual time: what a program takes on the device, as computed by hand."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from par_testing import Costs, device_times, host_moment, host_works, own_host_time, wait_until_moment

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


@pytest.mark.accelerator(costs=Costs(flops=1e30, memory=1e30, link=4.0, latency=0.0, launch=0.0, host=1.0))
def test_two_threads_get_the_same_turns_in_each_run():
    def copy(seconds):
        host, stream = torch.zeros(seconds, pin_memory=True), module().Stream()
        with module().stream(stream):
            kept.append((host, host.to("strict", non_blocking=True)))
        return stream

    def worker(real_seconds):
        time.sleep(real_seconds)
        host_works(1)
        copy(4)  # may begin at 1, and does
        host_works(4)
        copy(3)  # may begin at 5, when the main thread's copy has waited for longer

    kept, found = [], []
    with ThreadPoolExecutor(1) as pool:
        for slow_worker, slow_main in ((0.0, 0.0), (0.2, 0.0), (0.0, 0.2), (0.1, 0.1), (0.0, 0.0)):
            torch.accelerator.synchronize()
            device_times()
            job = pool.submit(own_host_time(worker), slow_worker)
            time.sleep(slow_main)
            host_works(2)
            copy(6).synchronize()  # may begin at 2, and begins at 5
            times = device_times()
            job.result()
            begin = times.timeline[0].begin - 1
            found.append((times.total, [(span.begin - begin, span.end - begin) for span in times.timeline]))
    assert found == [(11.0, [(1.0, 5.0), (5.0, 11.0)])] * 5


@pytest.mark.accelerator(costs=Costs(memory=1e30, launch=0.0, host=1.0))
def test_wait_for_another_thread_takes_its_virtual_time():
    def worker():
        host_works(3)
        moments.append(host_moment())
        host_works(5)

    moments = []
    with ThreadPoolExecutor(1) as pool:
        x = torch.ones(8, device="strict")
        torch.accelerator.synchronize()
        device_times()
        pool.submit(own_host_time(worker)).result()
        host_works(1)
        wait_until_moment(moments[0])
        x.add_(1)
        assert device_times().total == pytest.approx(3.0)
        wait_until_moment(moments[0])
        assert device_times().total == 0


@pytest.mark.accelerator
def test_times_are_refused_while_a_job_does_not_return(monkeypatch):
    monkeypatch.setattr("par_testing.accelerator.times._PATIENCE", 0.1)
    job = own_host_time(lambda: None)
    with pytest.raises(RuntimeError, match=r"own_host_time\(\) has not returned after 0 s"):
        device_times()
    job()
