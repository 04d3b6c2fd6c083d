"""What ranks log between two lines: other names on each, in any order, and what that costs."""

import json
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist

from par_testing import for_each
from par_train import LoggingPolicy, MonitoringPolicy, Run, Strategy

A, B = {"math": 1.0}, {"code": 3.0}
WHOLE = torch.tensor(0)


def train(folder, logged, until=4, parallel=None, *, log_every):
    """Takes steps, in which each rank logs what `logged` has for the parity of the step and for the rank."""
    logging, monitoring = LoggingPolicy(every=log_every, progress=False), MonitoringPolicy(diagnose=None)
    with Run(folder, Strategy(parallel=parallel), logging=logging, monitoring=monitoring) as run:
        linear = run.strategy.layers.Linear(2, 2)
        run.strategy.initialize(linear, torch.optim.SGD(linear.parameters()))
        for _ in run.steps([0], until):
            run.log(**logged[run.step % 2][dist.get_rank()])
    dist.barrier()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


LOGGED = {
    "alternating": ([[A, B], [B, A]], {"math": 1.0, "code": 3.0}),
    "names": ([[A, B]] * 2, {"math": 1.0, "code": 3.0}),
    "order": ([[{"a": 1.0, "b": 2.0}, {"b": 4.0, "a": 3.0}]] * 2, {"a": 2.0, "b": 3.0}),
    "rank 0": ([[{"loss": 1.0}, {}]] * 2, {"loss": 1.0}),
    "rank 1": ([[{}, {"loss": 5.0, "rows": 2}]] * 2, {"loss": 5.0, "rows": 8}),
    "kinds of ranks": ([[{"part": WHOLE}, {"part": 0.5}]] * 2, {"part": 0.25}),
    "kinds of steps": ([[{"part": 1}] * 2, [{"part": 0.5}] * 2], {"part": 0.75}),
    "numpy": ([[{"loss": np.float32(0.5), "rows": np.int64(2)}] * 2] * 2, {"loss": 0.5, "rows": 16}),
}


@for_each(name=LOGGED)
@pytest.mark.ranks(2)
def test_run_log_other_names_on_each_rank_have_own_means(tmp_path, name):
    logged, expected = LOGGED[name]
    lines = train(tmp_path / name, logged, log_every=2)
    found = [{name: value for name, value in line.items() if name in expected} for line in lines]
    assert found[-1] == expected
    assert [list(each) for each in found] == [list(expected)] * 2


@pytest.mark.ranks(2)
def test_run_log_name_that_comes_later_has_its_own_mean(tmp_path):
    lines = train(tmp_path, [[{"loss": 1.0}, {"loss": 3.0}], [{"loss": 2.0, "late": 7.0}, {"loss": 2.0}]], log_every=1)
    assert [(line["loss"], line.get("late")) for line in lines] == [(2.0, None), (2.0, 7.0)] * 2


@pytest.mark.ranks(2)
def test_run_log_count_that_becomes_a_mean_is_no_count(tmp_path):
    lines = train(tmp_path, [[{"part": 1}] * 2, [{"part": 1}, {"part": 0.5}]], log_every=1)
    assert [line["part"] for line in lines] == [2, 0.75, 1.0, 0.75]
    assert "part_per_second" in lines[0]
    assert "part_per_second" not in lines[1]


@for_each(logs=[(0, 1, 2, 3), (1, 3), (3,)])
@pytest.mark.ranks(4)
def test_run_log_ranks_of_a_tensor_group_count_once(tmp_path, logs):
    logged = [[{"loss": float(rank // 2), "rows": 5} if rank in logs else {} for rank in range(4)]] * 2
    (line,) = train(tmp_path / str(len(logs)), logged, log_every=4, parallel={"tensor": {"size": 2, "mode": "1d"}})
    data = {rank // 2 for rank in logs}
    assert (line["loss"], line["rows"]) == (sum(data) / len(data), 4 * 5 * len(data))


@pytest.mark.ranks(2)
def test_run_log_name_of_a_lower_rank_takes_over(tmp_path):
    logged = [[{}, {"loss": 1.0}], [{"loss": 3.0}, {"loss": 1.0}]]
    lines = train(tmp_path, logged, log_every=1, parallel={"tensor": {"size": 2, "mode": "1d"}})
    assert [line.get("loss") for line in lines] == [1.0, 3.0, 3.0]


@pytest.mark.ranks(2)
def test_run_log_of_known_names_reduces_once_a_line(tmp_path):
    logged, found = [[{"loss": 1.0}, {"loss": 2.0}]] * 2, []
    for number, until in enumerate((2, 12)):
        calls = []
        with counted(calls):
            train(tmp_path / str(number), logged, until, log_every=1)
        found.append((calls.count("all_reduce"), calls.count("all_gather_object")))
    assert found[1] == (found[0][0] + 20, found[0][1])  # in each of ten steps the vote, and the line


@contextmanager
def counted(calls):
    """Notes the names of the functions of torch.distributed that a run calls inside, for a line or to agree."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_reduce", "all_gather_object"):
            patch.setattr(dist, name, noting(calls, name, getattr(dist, name)))
        yield


def noting(calls, name, function):
    def call(*given, **keywords):
        if sys._getframe(1).f_globals["__name__"].startswith(("par_train.run.", "par_groups.")):
            calls.append(name)
        return function(*given, **keywords)

    return call
