import errno
import fcntl
import os
import subprocess
import sys
from unittest.mock import Mock

import pytest

from par_train._errors import UserError
from par_train.run.files import RunFiles
from par_train.run.lock import lock_folder

HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_second_run_is_told_who_the_first_is(tmp_path):
    files = RunFiles(tmp_path)
    for _ in range(2):  # the second time, the file is there already
        with lock_folder(files):
            told = rf"another run \(process {os.getpid()} on .+\); name another folder, or wait"
            with pytest.raises(UserError, match=told), lock_folder(files):
                pass


def test_the_lock_of_a_killed_process_is_gone(tmp_path):
    files = RunFiles(tmp_path)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, files.lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(UserError, match="by another run; name another"), lock_folder(files):
            pass
        holder.kill()
        holder.wait(timeout=240)
        with lock_folder(files):
            pass


def test_a_file_system_without_locks_keeps_nobody_out(tmp_path, monkeypatch):
    for number in (errno.ENOLCK, errno.ENOTSUP):
        monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(number, os.strerror(number))))
        with lock_folder(RunFiles(tmp_path)), lock_folder(RunFiles(tmp_path)):
            pass


def test_a_lock_that_cannot_be_opened_is_said(tmp_path):
    files = RunFiles(tmp_path)
    files.lock.mkdir()
    with pytest.raises(UserError, match=r"cannot open '.+lock', .+ Is a directory; name another"), lock_folder(files):
        pass


def test_who_may_write_to_the_folder_may_lock_it_next(tmp_path):
    tmp_path.chmod(0o770)
    before = os.umask(0o077)
    try:
        with lock_folder(RunFiles(tmp_path)):
            pass
    finally:
        os.umask(before)
    assert RunFiles(tmp_path).lock.stat().st_mode & 0o777 == 0o660


def test_the_lock_is_no_part_of_a_run(tmp_path):
    files = RunFiles(tmp_path)
    with lock_folder(files):
        assert files.present() == []
        files.metrics.write_text("{}")
        files.clear()
        with pytest.raises(UserError), lock_folder(files):  # it holds while --overwrite removes what was there
            pass
