"""The watch beside a run: signals where a program is stuck, and silence where nothing is wrong."""

import os
import signal
import sys
import threading
import time
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from par_diagnosis import Diagnosis, _watch
from par_diagnosis._meeting import Meeting
from par_groups import FlightRecorder
from par_train import Run, Strategy


def made(**options):
    strategy = Strategy(**options)
    linear = nn.Linear(2, 2)
    model, optimizer = strategy.initialize(linear, torch.optim.SGD(linear.parameters(), lr=0.1))[:2]
    return strategy, model, optimizer


def with_patience(monkeypatch):
    """Ranks wait for each other when they meet, however long one of them has been stopped."""
    monkeypatch.setattr(_watch, "Meeting", lambda store, rank, world, _: Meeting(store, rank, world, 250.0))


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
def test_sigquit_to_a_rank_that_is_stuck_has_all_say_what_they_do_and_training_goes_on(tmp_path, monkeypatch):
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

    with redirect_stderr(told), Run(folder, strategy, progress=False) as run:
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
    assert "diagnosis (SIGQUIT): rank 1 is at " in lines[0]
    assert "in wait_for()" in lines[0]
    assert "(step 3) and has not come to all_reduce" in lines[0]
    assert [line.split(" is ")[0] for line in lines[1:]] == ["    rank 0", "    rank 1"]
    assert sorted(path.name for path in said.parent.glob("*.json")) == ["rank-0.json", "rank-1.json"]
    assert (signal.getsignal(signal.SIGQUIT), signal.set_wakeup_fd(-1)) == before


@pytest.mark.ranks(2, backend="gloo")
def test_a_run_that_goes_on_says_nothing_and_leaves_nothing(tmp_path, monkeypatch):
    """Steps take longer than the limit together, by a clock that goes on only when the watch has looked at each."""
    strategy, model, optimizer = made()
    told, now, looks, state = StringIO(), [100.0], [], Diagnosis._state
    monkeypatch.setattr(_watch, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(Diagnosis, "_state", lambda diagnosis: looks.append(1) or state(diagnosis))
    with redirect_stderr(told), Run(tmp_path / "run", strategy, progress=False, diagnose=0.2) as run:
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
def test_the_stages_of_a_pipeline_are_followed_along_their_messages(tmp_path, monkeypatch):
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
    with Diagnosis(strategy.groups, folder, timeout=0.5, tell=lambda _: None) as diagnosis:
        diagnosis.place.at(0, "step")
        batch = (torch.ones(4, 4), torch.ones(4, 4))
        strategy.execute_pipeline(iter([batch]), model, nn.functional.mse_loss, optimizer)
    line = next(line for line in first_lines(said) if "in wait_for()" in line and "rank 1 waits for" in line)
    assert "rank 0 is in the forward of microbatch 0 in stage 0 of the pipeline, at " in line
    assert "rank 1 waits for its message (in the forward of microbatch 0 in stage 1 of the pipeline)" in line


@pytest.mark.ranks(1)
def test_a_single_process_is_watched_too(tmp_path):
    strategy, *_ = made()
    with Diagnosis(strategy.groups, tmp_path, timeout=0.3, tell=lambda _: None) as diagnosis:
        diagnosis.place.at(7, "data")
        wait_for(tmp_path / "diagnosis.txt", "in wait_for()")
    assert "rank 0 is waiting for its data" in diagnosis.last
    assert f"in {wait_for.__name__}() (step 8)" in diagnosis.last.replace(f" < {Path(__file__).name}", "")


@pytest.mark.parametrize("limit", [0.0, -1.0])
@pytest.mark.ranks(1)
def test_a_limit_that_is_none_is_refused(tmp_path, limit):
    strategy, *_ = made()
    with pytest.raises(ValueError, match="diagnose is"), Run(tmp_path, strategy, diagnose=limit):
        pass
    with pytest.raises(ValueError, match="seconds above 0"):
        Diagnosis(strategy.groups, tmp_path, timeout=limit)
