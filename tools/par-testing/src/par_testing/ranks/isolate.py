"""What sets a rank apart from the process it was forked from: its end, its output, its environment."""

import ctypes
import faulthandler
import os
import signal
import sys
import warnings
from multiprocessing import forkserver
from pathlib import Path

import torch
from _pytest.config import parse_warning_filter

from .job import Job

# Dumps the stacks of a rank. A real-time signal, since code under test may use SIGUSR1 and SIGTERM itself.
DUMP_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2)

_PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>


def isolate(job: Job) -> None:
    """Makes this forked process a rank of its own; called before any code of the test."""
    _die_with_forkserver()
    _let_forkserver_end()
    os.setsid()  # a group of its own: Ctrl-C goes to pytest alone, which then kills the group, subprocesses included
    _redirect_output(job.output)
    _dump_stacks_into(job.stacks)
    os.environ.clear()
    os.environ.update(job.environment)
    torch.set_num_threads(1)
    for line in job.filters:
        warnings.filterwarnings(*parse_warning_filter(line, escape=False))


def _die_with_forkserver() -> None:
    """Asks the kernel for SIGKILL when the forkserver ends, even while this rank is stuck in C++."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # the forkserver ended before we asked
        os._exit(1)


def _let_forkserver_end() -> None:
    """Closes this rank's end of the pipe whose last closing ends the forkserver.

    A rank inherits a write end. If it kept it, the forkserver would outlive a pytest that was killed for as long as
    the rank hangs, and the rank would hang for ever, since it dies with the forkserver.
    """
    server = forkserver._forkserver
    alive = getattr(server, "_forkserver_alive_fd", None)
    if alive is not None:
        os.close(alive)
        server._forkserver_alive_fd = None  # type: ignore[attr-defined]


def _redirect_output(path: Path) -> None:
    """File descriptors 1 and 2, so that output of C++ and of subprocesses is caught too."""
    target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)
    # Line-buffered, so that a killed rank has lost no whole line.
    sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _dump_stacks_into(path: Path) -> None:
    """On our signal and on a crash such as SIGSEGV."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)  # stays open as long as the rank lives
    faulthandler.enable(file)
    faulthandler.register(DUMP_SIGNAL, file)
