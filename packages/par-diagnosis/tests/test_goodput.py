"""The phases of a job, and the waits for other ranks that a thread samples."""

import pytest
import torch
import torch.distributed as dist

from par_diagnosis import CollectiveWaits, Goodput, PhaseClock
from par_groups import ProcessGroups, Topology
from par_testing import observe_results, wait_until


@pytest.mark.ranks(2, backend="gloo")
def test_collective_waits_name_the_axis_of_a_group(tmp_path, monkeypatch):
    """Rank 1 comes when both have been looked at many times: rank 0 in the collective, rank 1 elsewhere."""
    looks, inside, elsewhere = 10, [], []

    def note(label):
        (inside if label else elsewhere).append(label)
        if len(inside) == looks:
            (tmp_path / "seen").touch()

    if dist.get_rank() == 0:
        observe_results(monkeypatch, CollectiveWaits, "_waits_in", note)
    else:
        observe_results(monkeypatch, CollectiveWaits, "_waits_in", elsewhere.append)
    with ProcessGroups(Topology.from_config({"tensor": {"size": 2, "mode": "1d"}}, 2)) as groups:
        waits = CollectiveWaits(groups)
        with waits.sampled():
            if dist.get_rank() == 1:
                wait_until((tmp_path / "seen").exists)
                wait_until(lambda: len(elsewhere) >= looks)
                assert not any(elsewhere)
            dist.all_reduce(torch.ones(1), group=groups["tensor"])
        waited = waits.take()
        assert waits.take() == dict.fromkeys(waited, 0.0)
        label = next(iter(groups.named()))
        if dist.get_rank() == 0:
            assert waited[label] >= 0.05 * (looks - 1)  # the pause between two looks
        assert waited.keys() <= {label}


def test_phase_clock_adds_up_to_the_wall_time(monkeypatch):
    now = [10.0]
    monkeypatch.setattr("par_diagnosis._goodput.time.monotonic", lambda: now[0])
    clock = PhaseClock()
    for phase, seconds in (("data", 1.0), ("step", 2.0), ("data", 3.0), ("checkpoint", 4.0)):
        clock.enter(0, phase)
        now[0] += seconds
    assert clock.seconds() == {
        "restart": 0.0, "data": 4.0, "step": 2.0, "validation": 0.0, "log": 0.0, "checkpoint": 4.0
    }  # fmt: skip
    goodput = Goodput(clock=clock, waits=None, flops=10.0, peak=None)
    line = goodput.line({"tokens": 5}, 10.0)
    assert line == {"time_data": 0.4, "time_step": 0.2, "time_checkpoint": 0.4, "flops_per_second": 5.0}
    assert goodput.summary() == "00:10: steps 20.0%, data 40.0%, checkpoint 40.0%; 5 model FLOPs/s"
    assert goodput.line({}, 1.0) == {}
