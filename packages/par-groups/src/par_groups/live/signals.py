"""The signals that ask a job to save and stop, and a block on them for the processes that this one starts."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# Windows has only the first two.
STOP_SIGNALS: tuple[signal.Signals, ...] = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, name)
)
"""The signals that ask a job to save and stop. SLURM jobs often request SIGUSR1 shortly before their time limit."""


@contextmanager
def block_stop_signals() -> Iterator[None]:
    """Block `STOP_SIGNALS` in the processes that are started inside, until they unblock them.

    A child without handlers would die of a signal that arrives before it has set them. The handlers of this process
    still run while the block lasts.
    """
    # A child inherits the signal mask of the thread that starts it, so this thread blocks them. The kernel delivers a
    # signal of the process to any thread that does not block it; a second thread stays open for that, and Python runs
    # the handler in the main thread.
    over = threading.Event()
    threading.Thread(target=over.wait, daemon=True, name="open-to-signals").start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        over.set()
