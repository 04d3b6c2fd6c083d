"""Processes of a test that die where it wants, without the seconds that a new Python takes to import torch."""

import os
import warnings
from contextlib import contextmanager


@contextmanager
def forked():
    """Yields 0 in a child, which then ends, and its number in the parent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later: the child uses no threads
        child = os.fork()
    if child:
        yield child
        return
    code = 1
    try:
        yield 0
        code = 0
    finally:
        os._exit(code)
