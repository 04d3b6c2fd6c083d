import subprocess
import sys
import time

import pytest

from par_testing._alone import alone

WORKER = """
import sys, time
from pathlib import Path
from par_testing._alone import alone
print("ready", flush=True)
with alone(Path(sys.argv[1])):
    print(time.monotonic(), flush=True)
    sys.stdin.read()
    print(time.monotonic(), flush=True)
"""


@pytest.fixture
def start_worker(tmp_path, monkeypatch):
    """Starts a process that runs one world, as a worker of pytest-xdist, until its stdin is closed."""
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    workers = []

    def start():
        command = [sys.executable, "-c", WORKER, str(tmp_path)]
        worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        workers.append(worker)
        assert worker.stdout.readline() == "ready\n"
        return worker

    yield start
    for worker in workers:
        worker.kill()
        worker.communicate()


def test_workers_take_turns(start_worker):
    first = start_worker()
    first_begin = float(first.stdout.readline())
    second = start_worker()
    time.sleep(0.2)
    first_end = float(first.communicate()[0])
    second_begin = float(second.communicate()[0].splitlines()[0])
    assert first_begin < first_end < second_begin


def test_no_lock_without_xdist(monkeypatch, tmp_path):
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    with alone(tmp_path), alone(tmp_path):
        pass
