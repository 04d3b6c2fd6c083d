"""Threads for a save that may outlive the main thread."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, TypeVar

Value = TypeVar("Value")


class Workers:
    """A pool of threads that works until it is closed, even while the interpreter ends.

    An executor refuses jobs as soon as the interpreter begins to end, and recent Python versions start no threads then.
    These threads are started immediately.

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
        """Have a thread call a function, and return a future of the result or the error."""
        future: Future[Value] = Future()
        self._jobs.put((future, act))
        return future

    def close(self) -> None:
        """Wait for all jobs, and end the threads."""
        self.leave()
        for thread in self._threads:
            thread.join()

    def leave(self) -> None:
        """Make the threads end after all jobs, without waiting for them."""
        for _ in self._threads:
            self._jobs.put(None)

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _work(self) -> None:
        """Run jobs until the end marker arrives. Each thread calls it."""
        while (job := self._jobs.get()) is not None:
            future, act = job
            try:
                future.set_result(act())
            except BaseException as error:  # `Future.result` raises it in the thread that needs the result
                future.set_exception(error)
            # The thread may wait for its next job for minutes. These names would keep a block's memory alive until
            # then.
            del job, future, act
