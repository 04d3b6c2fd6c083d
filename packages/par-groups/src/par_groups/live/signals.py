"""Events that end a job from outside: signals that request a save and a stop, and the death of the launcher."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
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


def watch_parent(parent: int, on_death: Callable[[], None]) -> Callable[[], None]:
    """Call a function when this process loses its parent, which a killed parent cannot announce.

    A launcher that is killed forwards no signal, and without this its ranks would keep their GPUs.

    Args:
        parent: Process id of the parent. Read it early: a parent that has died before this call is noticed, too.
        on_death: Function to call once, in a thread of its own, within half a second.

    Returns:
        A function that ends the watch.
    """
    over = threading.Event()

    def watch() -> None:
        # The kernel gives an orphan a new parent, so a changed id means that the parent has died.
        while os.getppid() == parent:
            if over.wait(0.5):
                return
        on_death()

    threading.Thread(target=watch, daemon=True, name="watch-parent").start()
    return over.set
