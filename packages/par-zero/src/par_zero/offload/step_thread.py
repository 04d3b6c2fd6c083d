"""A thread that updates pieces on the disk while the next forward runs."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from threading import Condition
from typing import TYPE_CHECKING

from ..layout.chunk import Chunk
from .disk import start_threads

if TYPE_CHECKING:
    from concurrent.futures import Future


class StepThread:
    """A thread for steps that end after `optimizer.step()` has returned.

    The forward of a unit waits only for the pieces of its own chunks, so the thread counts pieces by chunk.
    """

    def __init__(self) -> None:
        self._pool = start_threads(1)  # one, so that steps of several optimizers share the ring one after the other
        self._jobs: list[Future[None]] = []
        self._pending: Counter[Chunk] = Counter()
        self._changed = Condition()

    def submit(self, chunks: Iterable[Chunk], job: Callable[[], None]) -> None:
        """Run a job that updates pieces.

        Args:
            chunks: For each of the job's pieces, its chunk.
            job: Function that calls `finish_piece` for each piece, and `finish_chunks` if it stops early.
        """
        with self._changed:
            self._pending.update(chunks)
        self._jobs.append(self._pool.submit(job))

    def finish_piece(self, chunk: Chunk) -> None:
        """Record that the parameters of one piece of a chunk are updated."""
        with self._changed:
            self._pending[chunk] -= 1
            self._changed.notify_all()

    def finish_chunks(self, chunks: Iterable[Chunk]) -> None:
        """Record that no further piece of some chunks is updated, also after an error."""
        with self._changed:
            for chunk in chunks:
                self._pending[chunk] = 0
            self._changed.notify_all()

    def is_pending(self, chunks: Sequence[Chunk]) -> bool:
        """Return whether any piece of some chunks is not updated yet."""
        return any(self._pending[chunk] for chunk in chunks)

    def wait_for(self, chunks: Sequence[Chunk]) -> None:
        """Wait until all pieces of some chunks are updated."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_pending(chunks))

    def join(self) -> bool:
        """Wait for all jobs, and return whether there were any."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.result()
        return bool(jobs)
