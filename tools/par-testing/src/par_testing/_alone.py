"""Worlds never overlap, whatever the number of pytest-xdist's workers."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def alone(root: Path) -> Iterator[None]:
    """Holds a lock that all workers of pytest-xdist share; without xdist, does nothing.

    Two worlds at once would compete for the cores and run into their timeouts. The mark `xdist_group` keeps them on one
    worker, but only with `--dist loadgroup`, and pytest-xdist 3.8 overlooks it under pytest 9.2.

    Args:
        root: pytest's root directory, which is the same for every worker. It is only locked, not written to.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    directory = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)  # which gives the lock back
