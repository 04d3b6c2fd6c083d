"""However pytest ends, no process is left."""

import signal
import sys

import pytest

from .helpers import is_running, pids_below


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, id="ctrl-c", marks=pytest.mark.storm), pytest.param(signal.SIGKILL, id="kill")],
)
def test_no_process_outlives_pytest(number, start_inner, tmp_path, monkeypatch, eventually):
    monkeypatch.setenv("PIDS", str(tmp_path))
    expected = 3  # two ranks and the forkserver
    if number == signal.SIGINT:  # a SIGKILL leaves pytest no time to end what the ranks have started
        monkeypatch.setenv("CHILDREN", "1")
        expected = 5
    pytest_process = start_inner("hanging.py")
    eventually(lambda: len(pids_below(tmp_path)) == expected)
    pytest_process.send_signal(number)
    pytest_process.wait(120)
    eventually(lambda: not any(map(is_running, pids_below(tmp_path))))
