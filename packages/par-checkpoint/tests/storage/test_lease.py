"""Who lives and who is dead, as their processes, other machines and clocks that jump tell it."""

import json
import os
import threading
import time

import pytest

from par_checkpoint._errors import CheckpointError
from par_checkpoint.storage.lease import Lease, is_held

from ..forks import forked

SECONDS = 0.6


def said(path, **fields):
    """A lease as another machine writes it."""
    holder = {"host": "far", "boot": "other", "pid": os.getpid(), "began": "1", "beat": 1, "time": 0.0, **fields}
    path.write_text(json.dumps(holder).ljust(512))
    return path


def test_a_lease_is_held_until_it_is_released(tmp_path):
    path = tmp_path / "lease"
    assert not is_held(path, SECONDS)
    lease = Lease(path, SECONDS)
    first = json.loads(path.read_text())
    assert is_held(path, SECONDS)
    lease.check()
    time.sleep(SECONDS / 2)
    assert json.loads(path.read_text())["beat"] > first["beat"] == 1
    with pytest.raises(FileExistsError):
        Lease(path, SECONDS)
    lease.release()
    lease.release()
    assert not path.exists()
    assert not is_held(path, SECONDS)


def test_a_process_that_is_gone_holds_nothing_and_one_that_took_its_number_neither(tmp_path):
    path = tmp_path / "lease"
    with forked() as child:
        if not child:
            Lease(path, 60.0)
    assert os.waitpid(child, 0)[1] == 0
    assert path.exists()
    begin = time.monotonic()
    assert not is_held(path, 60.0)
    assert time.monotonic() - begin < 5, "on one machine there is nothing to wait for"
    said(path, **{**json.loads(path.read_text()), "pid": os.getpid()})
    assert not is_held(path, 60.0)


def test_another_machine_is_judged_by_its_sign_of_life(tmp_path):
    path = said(tmp_path / "lease")
    assert is_held(path, SECONDS), "it was written just now"
    os.utime(path, (1, 1))
    begin = time.monotonic()
    assert not is_held(path, SECONDS)
    assert time.monotonic() - begin >= SECONDS / 2, "it was watched"


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_a_clock_that_jumps_kills_nobody(tmp_path, monkeypatch, jump):
    path = said(tmp_path / "lease")
    os.utime(path, (time.time() + jump,) * 2)
    ended = threading.Event()

    def renew():
        beat = 1
        while not ended.wait(SECONDS / 6):
            beat += 1
            said(path, beat=beat)
            os.utime(path, (time.time() + jump,) * 2)

    saver = threading.Thread(target=renew)
    saver.start()
    assert is_held(path, SECONDS)
    ended.set()
    saver.join()
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    said(path)
    assert is_held(path, SECONDS), "the clock of this machine does not count"


def test_what_is_no_lease_yet_is_one_until_it_is_old(tmp_path):
    path = tmp_path / "lease"
    path.touch()
    assert is_held(path, SECONDS)
    os.utime(path, (1, 1))
    assert not is_held(path, SECONDS)


def test_a_lease_that_others_removed_is_noticed(tmp_path):
    lease = Lease(tmp_path / "lease", SECONDS)
    (tmp_path / "lease").unlink()
    said(tmp_path / "lease")
    with pytest.raises(CheckpointError, match="stopped for so long"):
        lease.check()
    lease.release()
