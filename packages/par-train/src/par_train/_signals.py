"""The signals that ask a run to save and to leave, and how they are kept from processes that it starts."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""The signals that save and leave; SIGUSR1 is what SLURM is often told to send before the time is up."""


@contextmanager
def keep_signals_from_children() -> Iterator[None]:
    """Starts processes with those signals blocked, until they catch them: they would die of one that came earlier.

    Children inherit what the thread that starts them blocks. A second thread keeps the signals open for this process,
    whose handlers run in the main thread as ever.
    """
    over = threading.Event()
    threading.Thread(target=over.wait, daemon=True, name="open-to-signals").start()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        over.set()
