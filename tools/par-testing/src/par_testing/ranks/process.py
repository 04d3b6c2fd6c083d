"""The pytest process's end of one rank: its process, its pipe, and its outcome so far."""

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkServerContext
from typing import TYPE_CHECKING, Any

from ..report.outcome import Outcome, as_declared_to_die, died
from .isolate import DUMP_SIGNAL
from .job import Job
from .rank import run_rank

if TYPE_CHECKING:
    from types import FrameType


class RankProcess:
    """One running rank.

    Args:
        context: The context of the forkserver that forks the rank.
        job: What the rank has to do.
        dies: Whether the test declares that this rank is ended by a signal.
    """

    def __init__(self, context: ForkServerContext, job: Job, *, dies: bool) -> None:
        self.job = job
        self.outcome: Outcome | None = None
        self.alive = True
        self._dies = dies
        self._passed: Outcome | None = None  # the outcome while the rank is leaving, which may still go wrong
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=run_rank, args=(job, theirs), name=f"rank {job.rank}")
        self._process.start()
        if self._process.pid is None:
            raise RuntimeError(f"the process of rank {job.rank} did not start")
        self._pid = self._process.pid
        theirs.close()

    @property
    def sources(self) -> tuple[Any, ...]:
        """What to hand to `multiprocessing.connection.wait` in order to hear of this rank."""
        return (self._process.sentinel,) if self._pipe.closed else (self._pipe, self._process.sentinel)

    def listen(self, ready: Iterable[object]) -> None:
        """Takes in what is ready of `sources`: a word from the rank, or else that its process has ended."""
        if self._pipe in ready:
            self._receive()
        elif self._process.sentinel in ready:
            self._end()

    def let_leave(self) -> None:
        """Tells a rank that has passed that all have: it may close its connections."""
        if self.alive:
            self._passed, self.outcome = self.outcome, None
            with suppress(BrokenPipeError):  # it has died since, which `listen` will see
                self._pipe.send(None)

    def dump_stacks(self, limit: float) -> str:
        """Makes the rank write its stacks, and reads them as soon as they are complete.

        Args:
            limit: When to give up, in seconds of the monotonic clock: a stopped process never answers.
        """
        if not self.job.stacks.exists():
            return "(no stack: the rank was still starting)"
        with suppress(ProcessLookupError):
            os.kill(self._pid, DUMP_SIGNAL)
        text = ""
        while time.monotonic() < limit:
            previous, text = text, self.job.stacks.read_text(errors="replace")
            if text and text == previous:
                break
            time.sleep(0.02)
        return text

    def crash_stacks(self) -> str:
        """What faulthandler wrote when the rank crashed by itself, if it did."""
        return self.job.stacks.read_text(errors="replace") if self.job.stacks.exists() else ""

    def kill(self) -> None:
        """Ends the rank, if it still runs, and every process that it started."""
        with suppress(ProcessLookupError):  # a group exists from os.setsid in the rank to the end of its last member
            os.killpg(self._pid, signal.SIGKILL)
        self._process.kill()

    def close(self) -> None:
        """Waits for the process to be gone and frees what belongs to it."""
        self._process.join()
        self._process.close()
        self._pipe.close()

    def _receive(self) -> None:
        try:
            self._settle(self._pipe.recv())
        except (EOFError, OSError):  # the rank has closed its end; its process will be seen to end
            self._pipe.close()

    def _end(self) -> None:
        self._process.join()
        self.alive = False
        code = self._process.exitcode or 0
        if code == 0 and self._passed is not None:
            self.outcome = self.outcome or self._passed
        elif self.outcome is None or (code != 0 and not self.outcome.failed):
            self._settle(died(self.job.rank, time.monotonic(), code))

    def _settle(self, outcome: Outcome) -> None:
        self.outcome = as_declared_to_die(outcome) if self._dies else outcome


@contextmanager
def launched(context: ForkServerContext, jobs: Iterable[Job], dies: Iterable[int]) -> Iterator[list[RankProcess]]:
    """Starts a rank for every job; on the way out, whatever the reason, none is left."""
    ranks: list[RankProcess] = []
    try:
        for job in jobs:
            with interrupts_later():  # a rank that started, but is not in the list, would be left
                ranks.append(RankProcess(context, job, dies=job.rank in dies))
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
        for rank in ranks:
            rank.close()


@contextmanager
def interrupts_later() -> Iterator[None]:
    """Ctrl-C inside the block is raised at its end."""
    if threading.current_thread() is not threading.main_thread():  # which alone is interrupted
        yield
        return
    pending: list[tuple[int, FrameType | None]] = []
    usual = signal.signal(signal.SIGINT, lambda number, frame: pending.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if pending and callable(usual):
            usual(*pending[0])
