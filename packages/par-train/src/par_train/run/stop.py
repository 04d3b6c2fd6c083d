"""How a rank is asked to leave: signals, and the death of the process that started it.

Being asked only sets a field. The ranks agree on it once a step, so that they all leave after the same step.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

from par_groups import STOP_SIGNALS, read_environment

from .output import drop_output

LEAVE = 128
"""Stands, where a signal's number could, for a program that asks itself to leave."""

FAILED = 129
"""Stands there for a rank that cannot go on, and has an error that all ranks should raise."""

_PATIENCE = 30.0


class StoppedEarly(Exception):  # noqa: N818 - nothing has failed
    """All ranks leave before training has begun, and have changed nothing.

    Args:
        number: The signal that one of them got.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"{signal.Signals(number).name}: stopped before training began")
        self.number = number


class Stop:
    """What this rank was asked for; `signal` is 0 until then. `training` says whether the loop has begun.

    Attributes:
        problem: What this rank has failed with, for all ranks to raise after the step; None if nothing has failed.
    """

    signal: int = 0
    training: bool = False
    problem: Exception | None = None

    def ask(self, number: int) -> None:
        """Asks to leave as that signal does. The first one counts."""
        self.signal = self.signal or number

    def fail(self, problem: Exception) -> None:
        """Asks to leave with an error on all ranks, whatever was asked for before. The first one counts."""
        self.problem = self.problem or problem
        self.signal = FAILED

    @contextmanager
    def caught(self) -> Iterator[bool]:
        """Lets SIGTERM, SIGHUP, SIGUSR1 and Ctrl-C ask instead of ending the process; puts their handlers back after.

        Python catches signals in the main thread alone: in another one, this changes nothing, and gives False.
        """
        before = self._catch() if threading.current_thread() is threading.main_thread() else {}
        try:
            yield bool(before)
        finally:
            for number, handler in before.items():
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _catch(self) -> dict[int, Any]:
        """Sets the handlers, and gives the ones that were there."""

        def handler(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - Python's signature
            self.ask(number)
            if number == signal.SIGHUP:
                leave_terminal()

        return {number: signal.signal(number, handler) for number in handled_signals()}


def catch_signals() -> Stop:
    """Lets the signals ask instead of ending the process, for the rest of its life.

    Their handlers are not put back: a second Ctrl-C while the process is leaving must not break into that.
    """
    stop = Stop()
    stop._catch()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # a launcher may have kept them back until now
    return stop


def handled_signals() -> list[signal.Signals]:
    """The ones of `STOP_SIGNALS` that this process catches: a SIGHUP that is ignored, as under nohup, stays so."""
    return [each for each in STOP_SIGNALS if each != signal.SIGHUP or signal.getsignal(each) != signal.SIG_IGN]


def leave_terminal() -> None:
    """After a SIGHUP: what is printed to a terminal that is gone is dropped, instead of failing."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            drop_output(descriptor)


def follow_launcher(stop: Stop, launcher: int) -> None:
    """Leaves when the launching process dies, even if it was killed and could forward nothing.

    A rank that is stuck, and so cannot leave after a step, is ended after some time; one whose training has not begun
    has nothing to save, and is ended at once.

    Args:
        stop: Is asked as by SIGTERM.
        launcher: The process id of this process's parent.
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
    """Inside, the death of the torchrun that started this process asks it to save and leave; elsewhere, nothing does.

    A torchrun that was killed can forward no signal, and its ranks would keep their GPUs.
    """
    over = threading.Event()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _when_gone(os.getppid(), lambda: stop.ask(signal.SIGTERM), over)
    try:
        yield
    finally:
        over.set()


def _when_gone(parent: int, act: Callable[[], None], over: threading.Event) -> None:
    """Acts, in a thread of its own, when this process has lost its parent, unless it is over before."""

    def watch() -> None:
        while os.getppid() == parent:
            if over.wait(0.5):
                return
        act()

    threading.Thread(target=watch, daemon=True, name="follow-launcher").start()


def _end_before_training() -> NoReturn:
    """Ends this process, of which the first rank says so: even where nobody is left to read it."""
    try:
        if read_environment(os.environ).rank == 0:
            print("par-train: the launcher is gone; stopped before training began", file=sys.stderr, flush=True)
    finally:
        os._exit(1)


def exit_code(number: int) -> int:
    """The exit code of a process that saved and left: 130 after Ctrl-C, as shells expect, else 0.

    Args:
        number: The signal that it left on; 0 if there was none.
    """
    return 128 + signal.SIGINT if number == signal.SIGINT else 0
