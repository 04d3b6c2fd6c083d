"""Small worlds may overlap, large ones never do, whatever the number of pytest-xdist's workers."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SMALL = 2
"""The most ranks of a world that may run beside another one as small: most of their time they wait for each other."""


@contextmanager
def turn(root: Path, ranks: int) -> Iterator[None]:
    """Holds a lock that all workers of pytest-xdist know; without xdist, does nothing.

    Two large worlds at once would compete for the cores and run into their timeouts, so a large one waits until it is
    alone. Small ones share the lock.

    Args:
        root: pytest's root directory, which is the same for every worker. It is only locked, not written to.
        ranks: Number of ranks of the world that is to run.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    directory = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_SH if ranks <= SMALL else fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)  # which gives the lock back
