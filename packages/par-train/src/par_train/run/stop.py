"""How a rank ends: on a signal, on the death of its launcher, or with a failure that only the first rank prints.

A request to leave only sets a field. The ranks agree on it once a step, so that they all leave after the same step.
"""

import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn

from par_groups import STOP_SIGNALS, read_environment

from .._errors import TrainingError, UserError
from .output import drop_output, say

LEAVE = 128
"""The request of a program that asks itself to leave, in place of a signal's number."""

FAILED = 129
"""The request of a rank that cannot continue, and has an error that all ranks should raise."""

_PATIENCE = 30.0

_LOST = re.compile(r"(closed|reset) by (remote )?peer|broken pipe|was likely closed|ncclRemoteError", re.IGNORECASE)


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
        before = self._catch() if threading.current_thread() is threading.main_thread() else {}
        try:
            yield bool(before)
        finally:
            for number, handler in before.items():
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
        time.sleep(_PATIENCE)
        os._exit(1)

    _when_gone(launcher, end, threading.Event())


@contextmanager
def following_torchrun(stop: Stop) -> Iterator[None]:
    """Request to save and leave if torchrun started this process and dies while the block runs.

    A killed torchrun forwards no signal, and without this request its ranks would keep their GPUs.
    """
    over = threading.Event()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _when_gone(os.getppid(), lambda: stop.ask(signal.SIGTERM), over)
    try:
        yield
    finally:
        over.set()


def _when_gone(parent: int, act: Callable[[], None], over: threading.Event) -> None:
    """Call `act` in a thread when this process loses its parent, unless `over` is set before."""

    def watch() -> None:
        while os.getppid() == parent:
            if over.wait(0.5):
                return
        act()

    threading.Thread(target=watch, daemon=True, name="follow-launcher").start()


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


class Reported(Exception):  # noqa: N818 - not an error to handle, but the end of one
    """The end of a rank whose failure is printed already."""


@contextmanager
def one_traceback() -> Iterator[None]:
    """Print the failure of the first rank that fails, and end the other ranks silently.

    A failed disk and a lost connection are printed as one sentence, other errors with their traceback. A rank that lost
    a connection has not failed itself: the launcher names the rank that is gone.

    Use it inside the world, so that a rank prints before it leaves its groups and the other ranks fail, too.

    Raises:
        Reported: In place of every exception except those that all ranks raise identically.
    """
    try:
        yield
    except (UserError, TrainingError, StoppedEarly, Reported):
        raise
    except Exception as error:
        if _is_first():
            rank = read_environment(os.environ).rank
            what = "lost its connection to another rank" if _lost_connection(error) else f"failed{_describe(error)}"
            say(f"par-train: rank {rank} {what}", sys.stderr)
        raise Reported from error


def _describe(error: Exception) -> str:
    """Return the text after the rank: a sentence if the error names the file and the problem, else the traceback."""
    from par_checkpoint import CheckpointError  # noqa: PLC0415 - this module is loaded before torch

    nameless = isinstance(error, OSError) and error.strerror is not None and error.filename is None
    if isinstance(error, CheckpointError | OSError) and not nameless:
        return f": {error}"
    return f"\n{traceback.format_exc()}"


def _lost_connection(error: BaseException) -> bool:
    """Return whether the error or its cause is a lost connection. Only the text of torch's errors says so."""
    import torch.distributed as dist  # noqa: PLC0415 - this module is loaded before torch

    text = str(error)
    of_torch = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/" in text)
    if of_torch and _LOST.search(text):
        return True
    return error.__cause__ is not None and _lost_connection(error.__cause__)


def _is_first() -> bool:
    """Count failures in the store of the rendezvous. If it is unreachable, every rank counts as first and prints."""
    import torch.distributed as dist  # noqa: PLC0415 - this module is loaded before torch

    place = read_environment(os.environ)
    if place.world_size == 1:
        return True
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]  # torch exports it late
            place.address, place.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10)
        )
        first: int = store.add(f"par_train/failures/{attempt}", 1)
    except dist.DistError:
        return True
    return first == 1
