"""Imported in the server process of multiprocessing's start method "forkserver": there, signals of a run do nothing.

Its workers end if it ends. They get the handlers back that it had: who starts them decides on signals.
"""

import os
import signal
from types import FrameType

_LEFT_ALONE = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # the server ignores SIGINT itself


def _ignore(number: int, frame: FrameType | None) -> None:
    """Does nothing. A program that the server executes gets the default handler instead, unlike with SIG_IGN."""


_before = {number: signal.signal(number, _ignore) for number in _LEFT_ALONE}


def _restore() -> None:
    for number, handler in _before.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


os.register_at_fork(after_in_child=_restore)
