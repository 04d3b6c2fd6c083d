"""One trace for all ranks: one clock, a process for each rank, and a track for the actions of a pipeline."""

import json

import pytest
import torch
import torch.distributed as dist

from par_diagnosis import StepProfiler, merge_traces


def test_merge_traces_gives_each_rank_a_process_on_one_clock(tmp_path):
    def trace(base, ts):
        return {
            "baseTimeNanoseconds": base,
            "traceEvents": [
                {"ph": "M", "name": "process_name", "pid": 77, "tid": 0, "args": {"name": "python"}},
                {"ph": "X", "name": "aten::mm", "pid": 77, "tid": 9, "ts": ts, "dur": 2.0},
                {"ph": "X", "name": "pipeline 1F0", "pid": 77, "tid": 9, "ts": ts, "dur": 5.0},
            ],
        }

    parts = [tmp_path / "0", tmp_path / "1"]
    parts[0].write_text(json.dumps(trace(1_000_000, 10.0)))
    parts[1].write_text(json.dumps(trace(1_500_000, 10.0)))
    merge_traces(parts, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [(e["pid"], e["ts"]) for e in events if e["name"] == "aten::mm"] == [(0, 10.0), (1, 510.0)]
    assert [(e["pid"], e["dur"]) for e in events if e["name"] == "1F0"] == [(0, 5.0), (1, 5.0)]
    names = [(e["pid"], e["args"]["name"]) for e in events if e["name"] in ("process_name", "thread_name")]
    assert names == [(0, "rank 0"), (0, "pipeline"), (1, "rank 1"), (1, "pipeline")]


@pytest.mark.ranks(2, backend="gloo")
def test_step_profiler_writes_one_trace_of_its_steps(tmp_path):
    profiler = StepProfiler(range(1, 3), tmp_path / "trace.json")
    for step in range(4):
        profiler.update(step)
        with torch.profiler.record_function(f"step {step}"):
            torch.ones(2) + 1
    profiler.stop()
    dist.barrier()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    found = {(event["pid"], event["name"]) for event in events if event["name"].startswith("step ")}
    assert found == {(rank, f"step {step}") for rank in (0, 1) for step in (1, 2)}
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_step_profiler_without_steps_writes_nothing(tmp_path):
    profiler = StepProfiler(range(0), tmp_path / "trace.json")
    profiler.update(0)
    profiler.stop()
    assert not list(tmp_path.iterdir())
