"""`profile`: one valid trace for all ranks, with a pipeline's actions as tracks."""

import json
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_train import LoggingPolicy, MonitoringPolicy, Run, Strategy
from par_train.strategy.settings import read_steps


@pytest.mark.parametrize("text", ["", "10:15", "steps=5:5", "steps=-1:2", "steps=a:b"])
def test_what_is_no_range_of_steps_is_refused(text):
    with pytest.raises(ValueError, match="steps=10:15"):
        read_steps(text)


@pytest.mark.ranks(2, backend="gloo")
def test_a_run_leaves_one_trace_of_its_steps_with_the_actions_of_its_pipeline(tmp_path):
    strategy = Strategy(parallel={"pipeline": 2}, pipeline={"microbatches": 2})
    model = strategy.build([nn.Linear(4, 4), nn.Linear(4, 4)])
    model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))[:2]
    batches = [(torch.ones(4, 4), torch.ones(4, 4))]
    logging, monitoring = LoggingPolicy(progress=False), MonitoringPolicy(profile="steps=2:4")
    with Run(tmp_path / "run", strategy, logging=logging, monitoring=monitoring) as run:
        for batch in run.steps(batches, 6):
            strategy.execute_pipeline(iter([batch]), model, nn.functional.mse_loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    assert list((tmp_path / "run").glob("*.part")) == []
    events = trace["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    for event in events:
        assert {"ph", "name", "pid"} <= set(event)
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["ts"] >= 0
    for rank in (0, 1):
        actions = [event for event in events if event.get("cat") == "pipeline" and event["pid"] == rank]
        assert sorted(event["name"] for event in actions) == sorted(
            f"{rank}{letter}{microbatch}" for letter in "FB" for microbatch in (0, 1) for _ in range(2)
        )
        ordered = sorted(actions, key=lambda event: event["ts"])
        assert all(one["ts"] + one["dur"] <= two["ts"] for one, two in pairwise(ordered))
