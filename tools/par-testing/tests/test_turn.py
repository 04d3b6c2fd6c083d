import subprocess
import sys
import time

import pytest

from par_testing._turn import turn

WORKER = """
import sys, time
from pathlib import Path
from par_testing._turn import turn
print("ready", flush=True)
with turn(Path(sys.argv[1]), int(sys.argv[2])):
    print(time.monotonic(), flush=True)
    sys.stdin.read()
    print(time.monotonic(), flush=True)
"""


@pytest.fixture
def start_worker(tmp_path, monkeypatch):
    """Starts a process that runs one world, as a worker of pytest-xdist, until its stdin is closed."""
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    workers = []

    def start(ranks):
        command = [sys.executable, "-c", WORKER, str(tmp_path), str(ranks)]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        workers.append(worker)
        assert worker.stdout.readline() == "ready\n"
        return worker

    yield start
    for worker in workers:
        worker.kill()
        worker.communicate()


@pytest.mark.parametrize(("one", "other"), [(4, 4), (3, 8)])
def test_large_worlds_never_overlap(start_worker, one, other):
    first = start_worker(one)
    first_begin = float(first.stdout.readline())
    second = start_worker(other)
    time.sleep(0.2)
    first_end = float(first.communicate()[0])
    second_begin = float(second.communicate()[0].splitlines()[0])
    assert first_begin < first_end < second_begin


@pytest.mark.parametrize(("one", "other"), [(1, 2), (8, 2), (1, 4)])
def test_a_small_world_overlaps_with_any(start_worker, one, other):
    first, second = start_worker(one), start_worker(other)
    float(first.stdout.readline())
    second_begin = float(second.stdout.readline())  # while the first one still runs
    assert second_begin < float(first.communicate()[0])


def test_no_lock_without_xdist(monkeypatch, tmp_path):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    with turn(tmp_path, 8), turn(tmp_path, 8):
        pass
