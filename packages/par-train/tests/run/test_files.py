import errno
import os

import pytest

from par_train.run.files import RunFiles, write_file


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_write_file_replaces(tmp_path):
    write_file(tmp_path / "file", b"one")
    write_file(tmp_path / "file", b"two")
    assert (tmp_path / "file").read_bytes() == b"two"
    assert names(tmp_path) == ["file"]


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path, monkeypatch):
    def fill_up(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_file(tmp_path / "file", b"one")
    monkeypatch.setattr(os, "fsync", fill_up)
    with pytest.raises(OSError, match=r"cannot write '.+/file': .+No space left on device"):
        write_file(tmp_path / "file", b"two")
    assert (tmp_path / "file").read_bytes() == b"one"
    assert names(tmp_path) == ["file"]


def test_clear_removes_the_run_alone(tmp_path):
    files = RunFiles(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    files.metrics.write_text("{}")
    files.checkpoints.mkdir()
    (files.checkpoints / "model.safetensors").write_text("weights")
    assert files.present() == [files.checkpoints, files.metrics]
    files.clear()
    assert names(tmp_path) == ["notes.txt"]
