"""Large worlds never overlap, whatever the number of pytest-xdist's workers; small ones run beside any other."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SMALL = 2
"""The most ranks of a world that may run beside any other: most of their time they wait for each other."""


@contextmanager
def turn(root: Path, ranks: int) -> Iterator[None]:
    """Holds a lock that all workers of pytest-xdist know; without xdist, does nothing.

    Two large worlds at once would compete for the cores and run into their timeouts, so a large one waits for another.
    A small one waits for nobody: beside a large one it uses what that leaves of the cores.

    Args:
        root: pytest's root directory, which is the same for every worker. It is only locked, not written to.
        ranks: Number of ranks of the world that is to run.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ or ranks <= SMALL:
        yield
        return
    directory = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)  # which gives the lock back
