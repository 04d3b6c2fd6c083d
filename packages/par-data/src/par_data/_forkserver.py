"""Imported by the server process of multiprocessing's start method "forkserver": there, the stop signals do nothing.

If the server died, its workers would end. They get back the handlers that the server had, because the process that
starts a worker decides on its signals.
"""

import os
import signal
from types import FrameType

_LEFT_ALONE = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # the server ignores SIGINT itself


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing. Unlike with SIG_IGN, a program that the server executes gets the default handler back."""


_before = {number: signal.signal(number, _ignore) for number in _LEFT_ALONE}


def _restore() -> None:
    for number, handler in _before.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


os.register_at_fork(after_in_child=_restore)
