"""How a rank ends: on a signal, on the death of its launcher, or with a failure that only the first rank prints.

A request to leave only sets a field. The ranks agree on it once a step, so that they all leave after the same step.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from par_diagnosis import report_first_failure
from par_groups import STOP_SIGNALS, read_environment, watch_parent

from .._errors import TrainingError, UserError
from .output import drop_output, say

LEAVE = 128
"""The request of a program that asks itself to leave, in place of a signal's number."""

FAILED = 129
"""The request of a rank that cannot continue, and has an error that all ranks should raise."""

_PATIENCE = 30.0


class StoppedEarly(Exception):  # noqa: N818 - nothing has failed
    """The end of all ranks before training has begun. They have changed nothing.

    Args:
        number: Signal that one of the ranks received.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name}: stopped before training began")
        self.number = number


class Stop:
    """A request to this rank to leave.

    Attributes:
        signal: Signal of the request, `LEAVE` or `FAILED`; 0 without a request.
        training: Whether the loop has begun.
        problem: Error of this rank, which all ranks raise after the step; None without an error.
    """

    signal: int = 0
    training: bool = False
    problem: Exception | None = None

    def ask(self, number: int) -> None:
        """Request to leave, as a signal does. The first request counts."""
        self.signal = self.signal or number

    def fail(self, problem: Exception) -> None:
        """Request to leave with an error on all ranks. It replaces an earlier signal; the first error counts."""
        self.problem = self.problem or problem
        self.signal = FAILED

    @contextmanager
    def caught(self) -> Iterator[bool]:
        """Turn SIGTERM, SIGHUP, SIGUSR1 and Ctrl-C into requests while the block runs; restore their handlers after it.

        Python handles signals only in the main thread. In another thread, this changes nothing and yields False.
        """
        # In another thread, signal.signal raises ValueError.
        before = self._catch() if threading.current_thread() is threading.main_thread() else {}
        try:
            yield bool(before)
        finally:
            for number, handler in before.items():
                # None stands for a handler that was not set from Python.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _catch(self) -> dict[int, Any]:
        """Set the handlers; return the handlers that they replace."""

        def handler(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - Python's signature
            self.ask(number)
            if number == signal.SIGHUP:
                leave_terminal()

        return {number: signal.signal(number, handler) for number in handled_signals()}


def catch_signals() -> Stop:
    """Turn signals into requests for the rest of the process's life.

    The old handlers are not restored, so that a second Ctrl-C cannot interrupt a process that is leaving.
    """
    stop = Stop()
    stop._catch()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # a launcher may have blocked them until now
    return stop


def handled_signals() -> list[signal.Signals]:
    """Return the signals of `STOP_SIGNALS` to handle: without SIGHUP if it is ignored, as under nohup."""
    return [each for each in STOP_SIGNALS if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]


def leave_terminal() -> None:
    """Drop further output to a terminal that SIGHUP has closed, so that printing does not fail."""
    for descriptor in (1, 2):
        try:
            # A write of nothing fails only if the terminal is gone.
            os.write(descriptor, b"")
        except OSError:
            drop_output(descriptor)


def follow_launcher(stop: Stop, launcher: int) -> None:
    """Leave when the launching process dies, even if it was killed and could forward no signal.

    A rank that hangs cannot leave after a step, so it is ended after 30 seconds. A rank whose training has not begun
    has nothing to save, so it is ended at once.

    Args:
        stop: Receives the request to leave.
        launcher: Process id of this process's parent.
    """

    def end() -> None:
        if not stop.training:
            _end_before_training()
        stop.ask(signal.SIGTERM)
        # The rank has this time to finish its step and save; a rank that hangs never does.
        time.sleep(_PATIENCE)
        os._exit(1)

    watch_parent(launcher, end)


@contextmanager
def following_torchrun(stop: Stop) -> Iterator[None]:
    """Request to save and leave if torchrun started this process and dies while the block runs.

    A killed torchrun forwards no signal, and without this request its ranks would keep their GPUs.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield
        return
    end_watch = watch_parent(os.getppid(), lambda: stop.ask(signal.SIGTERM))
    try:
        yield
    finally:
        end_watch()


def _end_before_training() -> NoReturn:
    """End this process; rank 0 prints the reason. Ends even if printing fails."""
    try:
        if read_environment(os.environ).rank == 0:
            print("par-train: the launcher is gone; stopped before training began", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


def exit_code(number: int) -> int:
    """Return the exit code of a process that saved and left: 130 after Ctrl-C, as shells expect, otherwise 0.

    Args:
        number: Signal that ended the process; 0 without one.
    """
    return 128 + signal.SIGINT if number == signal.SIGINT else 0


@contextmanager
def one_traceback() -> Iterator[None]:
    """Print the failure of the first rank that fails, and end the other ranks by `FailureReported`.

    A failed disk and a lost connection are printed as one sentence, other errors with their traceback.
    """
    common = (UserError, TrainingError, StoppedEarly)
    with report_first_failure(
        lambda text: say(f"par-train: {text}", sys.stderr), common=common, summarize=_sentence_of
    ):
        yield


def _sentence_of(error: Exception) -> str | None:
    """Return the text of an error that names the file and the problem; None for other errors."""
    from par_checkpoint import CheckpointError  # noqa: PLC0415 - this module is loaded before torch

    # An error of the system that names no file says too little without its traceback.
    nameless = isinstance(error, OSError) and error.strerror is not None and error.filename is None
    return str(error) if isinstance(error, CheckpointError | OSError) and not nameless else None
