"""Threads for a save that may outlive the main one."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

Value = TypeVar("Value")


class Workers:
    """Threads that take jobs in turn.

    An executor refuses jobs as soon as the interpreter begins to end, and late Pythons start no thread then. These are
    started at once, and work until they are closed.

    Args:
        count: Number of threads.
        name: Beginning of the threads' names.
    """

    def __init__(self, count: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, act: Callable[[], Value]) -> Future[Value]:
        """Have a thread call a function; the result raises its error."""
        future: Future[Value] = Future()
        self._jobs.put((future, act))
        return future

    def close(self) -> None:
        """Waits for all jobs, and ends the threads."""
        self.leave()
        for thread in self._threads:
            thread.join()

    def leave(self) -> None:
        """Has the threads end after all jobs, and waits for nothing."""
        for _ in self._threads:
            self._jobs.put(None)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _work(self) -> None:
        """What each thread does: job after job, until it is told to end."""
        while (job := self._jobs.get()) is not None:
            future, act = job
            try:
                future.set_result(act())
            except BaseException as error:  # raised to whoever asks for the result
                future.set_exception(error)
            del job, future, act  # nothing is kept alive while it waits
