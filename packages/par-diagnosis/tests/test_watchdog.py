"""The watchdog in plain programs: one process, all groups of torch, errors, and what it leaves behind."""

import faulthandler
import os
import signal
import threading
import time
from contextlib import redirect_stderr
from io import StringIO

import pytest
import torch
import torch.distributed as dist

from par_diagnosis import Activity, Watchdog, _watchdog
from par_diagnosis._exchange import DumpExchange
from par_diagnosis._signals import QuitSignal


@pytest.fixture
def _patient(monkeypatch):
    """Make ranks wait for each other's dumps, however long the machine has stopped one of them."""
    monkeypatch.setattr(_watchdog, "DumpExchange", lambda *given: DumpExchange(*given[:3], 250.0))


def lines(path):
    """Return the reported lines, without their details."""
    text = path.read_text().splitlines() if path.exists() else []
    return [line for line in text if not line.startswith(" ")]


def wait_for(path, *words):
    """Wait until a line has these words; earlier lines may describe earlier moments."""
    while not any(all(word in line for word in words) for line in lines(path)):
        time.sleep(0.02)


@pytest.mark.ranks(1, init=False)
def test_watchdog_without_torch_distributed_reports(tmp_path):
    err = StringIO()
    with redirect_stderr(err), Watchdog(tmp_path, timeout=0.3) as watchdog:
        watchdog.activity.update(7, "data")
        wait_for(tmp_path / "diagnosis.txt", "in wait_for()")
    assert "rank 0 is waiting for its data" in watchdog.last
    assert "(step 8)" in watchdog.last
    assert watchdog.last in err.getvalue()


@pytest.mark.ranks(3, backend="gloo")
@pytest.mark.usefixtures("_patient")
def test_watchdog_names_the_rank_in_a_group_made_later(tmp_path):
    with Watchdog(tmp_path, timeout=1.0, report=lambda _: None):
        pair = dist.new_group([0, 2], group_desc="pair")
        if dist.get_rank() == 2:
            wait_for(tmp_path / "diagnosis.txt", "rank 2 is at", "in wait_for()", "pair group [0, 2]")
        if dist.get_rank() != 1:
            dist.all_reduce(torch.ones(5), group=pair)
        dist.barrier()
    line = next(line for line in lines(tmp_path / "diagnosis.txt") if "pair group" in line)
    assert "rank 2 is at" in line
    assert "has not called all_reduce number 1 of the pair group [0, 2], in which rank 0 waits at " in line


@pytest.mark.ranks(2, backend="gloo")
@pytest.mark.usefixtures("_patient")
def test_watchdog_reports_the_error_of_a_rank_once(tmp_path):
    reported = []
    with pytest.raises(OSError, match="disk"), Watchdog(tmp_path, report=reported.append):  # noqa: PT012
        if dist.get_rank() == 1:
            raise OSError("the disk is full")
        wait_for(tmp_path / "diagnosis.txt", "rank 1 failed")
        raise OSError("disk, as on rank 1")
    everything = [None, None]
    dist.all_gather_object(everything, reported)
    (line,) = (line for lines in everything for line in lines)
    assert line.startswith("par-diagnosis: error: rank 1 failed at ")
    assert ": OSError: the disk is full; dumps are in" in line


@pytest.mark.ranks(2, backend="gloo")
def test_watchdog_that_reports_nothing_restores_the_process(tmp_path):
    before = signal.getsignal(signal.SIGQUIT), faulthandler.is_enabled(), threading.active_count()
    with Watchdog(tmp_path / "dumps"):
        dist.all_reduce(torch.ones(2))
    assert (signal.getsignal(signal.SIGQUIT), faulthandler.is_enabled(), threading.active_count()) == before
    dist.barrier()
    assert not (tmp_path / "dumps").exists()


@pytest.mark.ranks(1, init=False)
def test_quit_signal_passes_bytes_to_the_program():
    read_end, write_end = os.pipe()
    for end in (read_end, write_end):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(write_end)  # as asyncio does
    received = QuitSignal()
    os.kill(os.getpid(), signal.SIGQUIT)
    assert received.wait(10)
    assert os.read(read_end, 10) == bytes([signal.SIGQUIT])
    received.restore()
    received.close()
    assert signal.set_wakeup_fd(-1) == write_end


@pytest.mark.parametrize("option", ["timeout", "patience"])
def test_watchdog_refuses_seconds_that_are_not_positive(tmp_path, option):
    with pytest.raises(ValueError, match=f"{option}=0: the number of seconds must be above 0"):
        Watchdog(tmp_path, **{option: 0})


def test_activity_names_logged_values_that_are_not_finite():
    activity = Activity({"batch": 8})
    activity.log({"loss": torch.tensor(1.0), "norm": float("inf")})
    activity.log({"loss": torch.tensor(float("nan")), "parts": torch.ones(2)})
    assert activity.non_finite() == "loss is nan, norm is inf"
    assert activity.facts == {"batch": "8"}
