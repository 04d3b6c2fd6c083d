"""Steps of pieces, which run in the program's own call or in a thread during the next forward."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from threading import Condition
from typing import TYPE_CHECKING

from ..layout.chunk import Chunk
from .disk import start_threads

if TYPE_CHECKING:
    from concurrent.futures import Future


class StepRunner:
    """Runs steps of pieces, and lets the forward of a unit wait for the pieces of its own chunks only.

    Args:
        late: Whether steps run in a thread.
    """

    def __init__(self, *, late: bool) -> None:
        # One thread, so that steps of several optimizers use the ring of buffers one after the other.
        self._thread = start_threads(1) if late else None
        self._jobs: list[Future[None]] = []
        self._pending: Counter[Chunk] = Counter()  # pieces that are not updated yet
        self._changed = Condition()

    @property
    def is_late(self) -> bool:
        """Whether steps run in a thread."""
        return self._thread is not None

    def run(self, chunks: Sequence[Chunk], job: Callable[[], None]) -> None:
        """Run a step, or start it in the thread.

        Args:
            chunks: For each piece of the step, its chunk.
            job: Function that calls `finish_piece` for each piece that it has updated.
        """

        def run() -> None:
            try:
                job()
            finally:  # a forward must not wait for pieces that an error has left out
                self._change({chunk: -self._pending[chunk] for chunk in chunks})

        # Before the thread starts: a forward that comes first must find its pieces pending.
        self._change(Counter(chunks))
        if self._thread is None:
            run()
        else:
            self._jobs.append(self._thread.submit(run))

    def finish_piece(self, chunk: Chunk) -> None:
        """Record that the parameters of one piece of a chunk are updated."""
        self._change({chunk: -1})

    def is_pending(self, chunks: Iterable[Chunk]) -> bool:
        """Return whether any piece of some chunks is not updated yet."""
        return any(self._pending[chunk] for chunk in chunks)

    def wait_for(self, chunks: Sequence[Chunk]) -> None:
        """Wait until all pieces of some chunks are updated."""
        with self._changed:
            self._changed.wait_for(lambda: not self.is_pending(chunks))

    def join(self) -> bool:
        """Wait for all steps in the thread, and return whether there were any."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.result()
        return bool(jobs)

    def _change(self, counts: Mapping[Chunk, int]) -> None:
        with self._changed:
            self._pending.update(counts)
            self._changed.notify_all()
