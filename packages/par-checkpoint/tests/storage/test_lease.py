"""Who lives and who is dead, as their processes, other machines and clocks that jump tell it."""

import json
import os
import threading
import time

import pytest

from par_checkpoint._errors import CheckpointError
from par_checkpoint.storage.lease import Lease, is_held

from ..forks import forked

SECONDS = 0.6  # where something is watched, which takes half of it
LONG = 600.0  # longer than this process may be stopped, where nothing is


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
    while json.loads(path.read_text())["beat"] == first["beat"]:
        time.sleep(0.01)
    with pytest.raises(FileExistsError):
        Lease(path, SECONDS)
    lease.release()
    lease.release()
    assert not path.exists()
    assert not is_held(path, SECONDS)


def watch_nothing(monkeypatch):
    """To watch a lease fails."""
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("there is nothing to wait for"))


def test_a_process_that_is_gone_holds_nothing_and_one_that_took_its_number_neither(tmp_path, monkeypatch):
    path = tmp_path / "lease"
    with forked() as child:
        if not child:
            Lease(path, 60.0)
    assert os.waitpid(child, 0)[1] == 0
    assert path.exists()
    watch_nothing(monkeypatch)
    assert not is_held(path, 60.0)
    said(path, **{**json.loads(path.read_text()), "pid": os.getpid()})
    assert not is_held(path, 60.0)


def test_another_machine_is_judged_by_its_sign_of_life(tmp_path):
    path = said(tmp_path / "lease")
    assert is_held(path, LONG), "it was written just now"
    os.utime(path, (1, 1))
    begin = time.monotonic()
    assert not is_held(path, SECONDS)
    assert time.monotonic() - begin >= SECONDS / 2, "it was watched"


@pytest.mark.parametrize("jump", [-1e6, 1e6])
def test_a_clock_that_jumps_kills_nobody(tmp_path, monkeypatch, jump):
    path = said(tmp_path / "lease")
    os.utime(path, (time.time() + jump,) * 2)

    def renew(_):
        said(path, beat=2)
        os.utime(path, (time.time() + jump,) * 2)

    with monkeypatch.context() as while_it_is_watched:
        while_it_is_watched.setattr(time, "sleep", renew)
        assert is_held(path, LONG)
    watch_nothing(monkeypatch)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    said(path)
    assert is_held(path, LONG), "the clock of this machine does not count"


def test_what_is_no_lease_yet_is_one_until_it_is_old(tmp_path):
    path = tmp_path / "lease"
    path.touch()
    assert is_held(path, LONG)
    os.utime(path, (1, 1))
    assert not is_held(path, SECONDS)


def test_a_lease_that_others_removed_is_noticed(tmp_path):
    lease = Lease(tmp_path / "lease", SECONDS)
    (tmp_path / "lease").unlink()
    said(tmp_path / "lease")
    with pytest.raises(CheckpointError, match="stopped for so long"):
        lease.check()
    lease.release()


def test_lease_released_while_it_is_renewed_writes_to_no_other_file(tmp_path, monkeypatch):
    lease = Lease(tmp_path / "lease", 0.6)
    writes, goes_on, pwrite = threading.Event(), threading.Event(), os.pwrite

    def slow(file, data, begin):
        writes.set()
        goes_on.wait(60)
        return pwrite(file, data, begin)

    monkeypatch.setattr(os, "pwrite", slow)
    assert writes.wait(60)
    releasing = threading.Thread(target=lease.release)
    releasing.start()
    releasing.join(0.5)  # it waits for the renewal, or has closed the file, whose number the next one gets
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    goes_on.set()
    releasing.join()
    lease._thread.join()
    assert os.fstat(other).st_size == 0
    os.close(other)
