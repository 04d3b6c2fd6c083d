"""Work of a save that continues in a thread after `save` has returned, and the report of its failure."""

import atexit
import sys
import threading
import weakref
from collections.abc import Callable
from functools import cache


@cache
def _running() -> "weakref.WeakSet[threading.Thread]":
    """Return the threads that the interpreter waits for when the main thread is done.

    It would wait for them anyway, but only after it has shut down all executors. A store's client looks up names in
    one, and a save has its own.
    """
    import concurrent.futures.thread  # noqa: F401, PLC0415 - registers what it does at exit: the last to do so is first

    threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()

    def wait() -> None:
        for thread in list(threads):
            thread.join()

    # Python joins non-daemon threads before it runs `atexit` functions. This hook runs before that, while threads may
    # still start others.
    threading._register_atexit(wait)  # type: ignore[attr-defined]
    return threads


class BackgroundTask:
    """Work of a save in a thread of its own: the write, or the copies to further tiers.

    An error is raised to the trainer once, by `Save.wait` or by the next save or load. If neither follows, the task
    writes it to stderr when the interpreter ends.

    Args:
        name: Name of the thread.
        failure: Beginning of the line on stderr about an error that was never raised.
        on_heard: Called in the trainer's thread when it asks for the outcome.

    Attributes:
        error: Error that ended the work; None while the work is running, and after a success.
    """

    def __init__(self, name: str, failure: str, on_heard: Callable[[], None] = lambda: None) -> None:
        self.error: BaseException | None = None
        self._name, self._failure, self._on_heard = name, failure, on_heard
        self._caller = threading.current_thread()
        self._thread: threading.Thread | None = None
        self._heard = False
        self._lock = threading.Lock()  # of the two fields below
        self._next: list[Callable[[], object]] = []
        self._ended = False

    def start(self, work: Callable[[], None]) -> None:
        """Begin the work in a thread, which the interpreter waits for at exit."""
        returns = threading.Event()

        def run() -> None:
            # Thread.start() waits until the thread runs. Work that began now would keep Python's lock from the trainer.
            returns.wait()
            try:
                work()
                while acts := self._take_next():
                    for act in acts:
                        act()
            except BaseException as error:  # raised by `Save.wait` or by the next save, or written to stderr at exit
                self.error = error
            finally:
                self._ended = True

        # If nobody calls `wait()`, the error of the last save would be lost.
        atexit.register(self._report)
        thread = threading.Thread(target=run, name=self._name)
        _running().add(thread)
        thread.start()
        self._thread = thread
        returns.set()

    def done(self) -> bool:
        """Return whether the work has ended, with or without an error."""
        return self._thread is not None and not self._thread.is_alive()

    def join(self) -> None:
        """Wait for the end, and raise nothing."""
        if self._thread is not None:
            self._thread.join()

    def hear(self) -> tuple[BaseException | None, bool]:
        """Wait for the end, and mark the outcome as reported to the trainer on this rank.

        Returns:
            The error, and whether there was no unreported error.
        """
        self.join()
        atexit.unregister(self._report)
        self._on_heard()
        before, self._heard = self._heard, True
        return self.error, before or self.error is None

    def is_unheard(self) -> bool:
        """Return whether the work has failed with an error that was not reported to the trainer on this rank."""
        return self.done() and self.error is not None and not self._heard

    def reports_to(self, thread: threading.Thread) -> bool:
        """Return whether a thread is to raise the error, because it called `save` or that thread has ended."""
        return thread is self._caller or not self._caller.is_alive()

    def then(self, act: Callable[[], object]) -> None:
        """Have the thread call something after the work, or call it now if the work has ended.

        An error in it counts as an error of the work. Nothing is called after work that has failed.
        """
        with self._lock:
            if not self._ended:
                self._next.append(act)
                return
        if self.error is None:
            try:
                act()
            except Exception as error:
                # Whether the work ended just before or just after this call is a matter of chance. The error is kept as
                # if the work's thread had made the call, so that the trainer sees the same in both cases.
                self.error = error

    def _take_next(self) -> list[Callable[[], object]]:
        """Take what `then` has added in the meantime; once that is nothing, the work has ended."""
        with self._lock:
            acts, self._next = self._next, []
            self._ended = not acts
        return acts

    def _report(self) -> None:
        """Write an error that was never raised to stderr, at exit."""
        self.join()
        if self.error is not None and not self._heard:
            sys.stderr.write(f"par-checkpoint: {self._failure}: {self.error}\n")
