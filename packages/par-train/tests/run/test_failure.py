import errno
import os

import pytest
import torch.distributed as dist

from par_checkpoint import CheckpointError
from par_diagnosis import FailureReported
from par_pipeline import PipelineError
from par_train._errors import TrainingError, UserError
from par_train.run.stop import one_traceback

GLOO = "[/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:5603: Connection reset by peer"


def said(error, capsys):
    """What a rank prints about an error."""
    with pytest.raises(FailureReported), one_traceback():
        raise error
    return capsys.readouterr().err


def test_failed_disk_prints_one_sentence(capsys):
    assert said(CheckpointError("block 3 is corrupt"), capsys) == "par-train: rank 0 failed: block 3 is corrupt\n"
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/gpt/loss.png")
    sentence = f"[Errno {errno.ENOSPC}] No space left on device: 'runs/gpt/loss.png'"
    assert said(full, capsys) == f"par-train: rank 0 failed: {sentence}\n"
    assert said(OSError(f"rank 2: {sentence}"), capsys) == f"par-train: rank 0 failed: rank 2: {sentence}\n"


def caused_by(cause):
    """What a pipeline makes of an error."""
    error = PipelineError("stage 0, microbatch 0")
    error.__cause__ = cause
    return error


def test_lost_connection_prints_one_sentence(capsys):
    closed = RuntimeError(GLOO.replace("reset", "closed"))
    remote = dist.DistBackendError("NCCL error: remote process exited or there was a network error\nncclRemoteError: x")
    for error in (
        RuntimeError(GLOO),
        closed,
        caused_by(closed),
        PipelineError(f"stage 0, microbatch 0: {GLOO}"),
        dist.DistNetworkError("Broken pipe"),
        dist.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed. Did the remote crash?"),
        remote,
    ):
        assert said(error, capsys) == "par-train: rank 0 lost its connection to another rank\n"


def test_other_connection_error_prints_its_traceback(capsys):
    timeout = RuntimeError("[/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation")
    for error in (
        timeout,
        dist.DistNetworkError("The server socket has failed to listen on any local network address"),
        ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)),
        RuntimeError("the service of the data said: Connection reset by peer"),
    ):
        assert said(error, capsys).startswith("par-train: rank 0 failed\nTraceback")


def test_other_error_prints_its_traceback(capsys):
    nameless = OSError(errno.EIO, os.strerror(errno.EIO))  # of which file, the traceback alone tells
    for error in (RuntimeError("a fault"), KeyError("name"), nameless):
        text = said(error, capsys)
        assert text.startswith("par-train: rank 0 failed\nTraceback")
        assert f"{type(error).__name__}: {error}" in text


def test_error_common_to_all_ranks_passes_unchanged(capsys):
    for error in (UserError("a mistake"), TrainingError("the loss became nan")):
        with pytest.raises(type(error)), one_traceback():
            raise error
    assert capsys.readouterr().err == ""
