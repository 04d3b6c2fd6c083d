"""The watchdog of a run: a signal while a rank is stuck, and silence while nothing is wrong."""

import os
import signal
import sys
import threading
import time
from contextlib import redirect_stderr
from io import StringIO
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_diagnosis import Watchdog, _watchdog
from par_diagnosis._exchange import DumpExchange
from par_groups import FlightRecorder
from par_train import LoggingPolicy, MonitoringPolicy, Run, Strategy


def made(**options):
    strategy = Strategy(**options)
    linear = nn.Linear(2, 2)
    model, optimizer = strategy.initialize(linear, torch.optim.SGD(linear.parameters(), lr=0.1))[:2]
    return strategy, model, optimizer


def with_patience(monkeypatch):
    """Make ranks wait for each other's dumps, however long the machine has stopped one of them."""
    monkeypatch.setattr(_watchdog, "DumpExchange", lambda *given: DumpExchange(*given[:3], 250.0))


def first_lines(path):
    """Those of the diagnoses that there are up to now."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if not line.startswith(" ")]


def wait_for(path, *words):
    """Until a diagnosis has these words in its first line: there may be some of earlier moments."""
    while not any(all(word in line for word in words) for line in first_lines(path)):
        time.sleep(0.02)


def when(is_there, act):
    """Calls `act` in a thread as soon as something holds."""

    def look():
        while not is_there():
            time.sleep(0.01)
        act()

    threading.Thread(target=look, daemon=True).start()


@pytest.mark.ranks(2, backend="gloo")
def test_run_reports_after_sigquit_and_continues(tmp_path, monkeypatch):
    with_patience(monkeypatch)
    strategy, model, optimizer = made()
    before = signal.getsignal(signal.SIGQUIT), signal.set_wakeup_fd(-1)
    folder, told, recorder = tmp_path / "run", StringIO(), FlightRecorder(strategy.groups)
    said = folder / "diagnosis" / "diagnosis.txt"
    main, begun = threading.get_ident(), []

    def in_wait_for():
        return sys._current_frames()[main].f_code is wait_for.__code__

    def both_are_stuck():
        return recorder.begun() != begun[0] and (tmp_path / "waits").exists()

    with redirect_stderr(told), Run(folder, strategy, logging=LoggingPolicy(progress=False)) as run:
        for batch in run.steps([torch.ones(3, 2)], 4):
            if run.step == 2 and dist.get_rank() == 1:
                when(in_wait_for, (tmp_path / "waits").touch)
                wait_for(said)  # holds rank 0 up in its next collective
            if run.step == 2 and dist.get_rank() == 0:
                begun.append(recorder.begun())
                when(both_are_stuck, lambda: os.kill(os.getpid(), signal.SIGQUIT))
            strategy.backward(model(batch).sum(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()
    assert run.step == 4
    lines = said.read_text().splitlines()
    assert "par-diagnosis: SIGQUIT: rank 1 is at " in lines[0]
    assert "in wait_for()" in lines[0]
    assert "(step 3) and has not called all_reduce" in lines[0]
    assert [line.split(" is ")[0] for line in lines[1:]] == ["    rank 0", "    rank 1"]
    assert sorted(path.name for path in said.parent.glob("*.json")) == ["rank-0.json", "rank-1.json"]
    assert (signal.getsignal(signal.SIGQUIT), signal.set_wakeup_fd(-1)) == before


@pytest.mark.ranks(2, backend="gloo")
def test_run_without_a_hang_reports_nothing_and_leaves_no_file(tmp_path, monkeypatch):
    """Steps take longer than the limit together, by a clock that goes on only when the watch has looked at each."""
    strategy, model, optimizer = made()
    told, now, looks, state = StringIO(), [100.0], [], Watchdog._state
    monkeypatch.setattr(_watchdog, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(Watchdog, "_state", lambda watchdog: looks.append(1) or state(watchdog))
    quiet, watched = LoggingPolicy(progress=False), MonitoringPolicy(diagnose=0.2)
    with redirect_stderr(told), Run(tmp_path / "run", strategy, logging=quiet, monitoring=watched) as run:
        for batch in run.steps([torch.ones(3, 2)], 8):
            now[0] += 0.1
            looks.clear()
            while len(looks) < 2:
                time.sleep(0.01)
            strategy.backward(model(batch).sum(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
    assert "diagnosis" not in told.getvalue()
    dist.barrier()
    assert not (tmp_path / "run" / "diagnosis").exists()


@pytest.mark.ranks(2, backend="gloo")
def test_watchdog_follows_the_messages_of_a_pipeline(tmp_path, monkeypatch):
    """Rank 1 waits for what rank 0 does not send, and in no collective that torch knows."""
    with_patience(monkeypatch)
    strategy = Strategy(parallel={"pipeline": 2}, pipeline={"microbatches": 2})

    class Stuck(nn.Linear):
        def forward(self, inputs):
            if self.training:
                wait_for(said, "in wait_for()", "rank 1 waits for its message")
            return super().forward(inputs)

    model = strategy.build([Stuck(4, 4), nn.Linear(4, 4)])
    model, optimizer = strategy.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))[:2]
    folder = tmp_path / "dumps"
    said = folder / "diagnosis.txt"
    with Watchdog(folder, strategy.groups, timeout=0.5, report=lambda _: None) as watchdog:
        watchdog.activity.update(0, "step")
        batch = (torch.ones(4, 4), torch.ones(4, 4))
        strategy.execute_pipeline(iter([batch]), model, nn.functional.mse_loss, optimizer)
    line = next(line for line in first_lines(said) if "in wait_for()" in line and "rank 1 waits for" in line)
    assert "rank 0 is in the forward of microbatch 0 in stage 0 of the pipeline, at " in line
    assert "rank 1 waits for its message (in the forward of microbatch 0 in stage 1 of the pipeline)" in line


@pytest.mark.parametrize("limit", [0.0, -1.0])
@pytest.mark.ranks(1)
def test_run_refuses_a_timeout_that_is_not_positive(tmp_path, limit):
    strategy, *_ = made()
    with (
        pytest.raises(ValueError, match=r"monitoring\.diagnose="),
        Run(tmp_path, strategy, monitoring=MonitoringPolicy(diagnose=limit)),
    ):
        pass
