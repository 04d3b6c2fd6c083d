import errno
import os

import pytest

from par_checkpoint import CheckpointError
from par_train._errors import UserError
from par_train._failure import Reported, one_traceback


def said(error, capsys):
    """What a rank prints about an error."""
    with pytest.raises(Reported), one_traceback():
        raise error
    return capsys.readouterr().err


def test_a_failed_disk_is_one_sentence(capsys):
    assert said(CheckpointError("block 3 is corrupt"), capsys) == "par-train: rank 0 failed: block 3 is corrupt\n"
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/gpt/loss.png")
    sentence = f"[Errno {errno.ENOSPC}] No space left on device: 'runs/gpt/loss.png'"
    assert said(full, capsys) == f"par-train: rank 0 failed: {sentence}\n"
    assert said(OSError(f"rank 2: {sentence}"), capsys) == f"par-train: rank 0 failed: rank 2: {sentence}\n"


def test_anything_else_has_its_traceback(capsys):
    nameless = OSError(errno.EIO, os.strerror(errno.EIO))  # of which file, the traceback alone tells
    for error in (RuntimeError("a fault"), KeyError("name"), nameless):
        text = said(error, capsys)
        assert text.startswith("par-train: rank 0 failed\nTraceback")
        assert f"{type(error).__name__}: {error}" in text


def test_a_mistake_of_the_user_is_left_to_the_caller(capsys):
    with pytest.raises(UserError), one_traceback():
        raise UserError("a mistake")
    assert capsys.readouterr().err == ""
