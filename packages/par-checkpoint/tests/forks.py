"""Processes of a test that die where it wants, without the seconds that a new Python takes to import torch."""

import os
import threading
import warnings
from contextlib import contextmanager


@contextmanager
def forked(*, threads=False):
    """Yields 0 in a child, which then ends, and its number in the parent.

    Args:
        threads: Whether the child starts threads. A fork of a process with threads may wait forever when it starts one,
            because a thread that the child lacks may have held a lock of Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later: the child uses no threads
        child = os.fork()
    if child:
        yield child
        return
    code = 1
    if not threads:
        threading.Thread.start = lambda _: None
    try:
        yield 0
        code = 0
    finally:
        os._exit(code)
