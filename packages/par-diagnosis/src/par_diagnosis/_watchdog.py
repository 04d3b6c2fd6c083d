"""`Watchdog`: a thread that notices a hang and reports its cause."""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Self

import torch.distributed as dist

from par_groups import FlightRecorder, ProcessGroups

from ._activity import Activity
from ._capture import capture
from ._exchange import Answers, DumpExchange
from ._journal import Journal
from ._signals import QuitSignal
from ._torch_private import store_for_thread

_POLLS_A_SECOND = 200
"""Number of requests per second that all ranks together send to the store while nothing is wrong."""


class Watchdog:
    """A thread that reports which rank hangs, where and why.

    Use it as a context manager on all ranks. The watchdog acts when a rank makes no progress for `timeout` seconds,
    when it receives SIGQUIT (Ctrl and backslash), or when an exception leaves the block. Then every rank writes a dump
    of what it is doing to `folder`, the ranks exchange their dumps over torch's store, and one rank reports one line.
    The watchdog ends no process: a job that was only slow continues.

    Args:
        folder: Folder of the dumps, best one that all ranks share. The watchdog makes it.
        groups: Process groups by label, or the live groups of a topology. Default: all groups of the process.
        timeout: Seconds without a step and without a new collective after which a rank hangs. Must be shorter than the
            timeout of the process groups.
        patience: Seconds to wait for the dumps of the other ranks. The line names the ranks that have not answered.
        facts: Values that must be identical on all ranks, by name. The line names a difference as a possible cause.
        report: Function that one rank calls with the line. Default: print the line to the standard error.
        report_errors: Whether to report an exception that leaves the block. If False, the rank only writes its dump.
        activity: Object to which the program reports its progress. Default: a new one.

    Attributes:
        activity: Object to which the program reports its progress; optional.

    Raises:
        ValueError: `timeout` or `patience` is not positive.

    Example:
        with Watchdog("runs/llama/diagnosis", timeout=300) as watchdog:
            for step, batch in enumerate(batches):
                watchdog.activity.update(step, "step")
                train(batch)
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        groups: ProcessGroups | Mapping[str, dist.ProcessGroup] | None = None,
        *,
        timeout: float = 300.0,
        patience: float = 3.0,
        facts: Mapping[str, object] | None = None,
        report: Callable[[str], None] | None = None,
        report_errors: bool = True,
        activity: Activity | None = None,
    ) -> None:
        for name, seconds in (("timeout", timeout), ("patience", patience)):
            if seconds <= 0:
                raise ValueError(f"{name}={seconds}: the number of seconds must be above 0")
        self._timeout, self._patience, self._report_errors = timeout, patience, report_errors
        self._recorder = FlightRecorder(groups)
        self.activity = activity or Activity()
        self.activity.facts.update({name: str(value) for name, value in (facts or {}).items()})
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._journal = Journal(Path(folder), rank, world, report)
        self._exchange: DumpExchange | None = None
        # One dump at a time: an error of the program may coincide with a timeout of the thread.
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._signal: QuitSignal | None = None
        self._watched = 0
        self._dumped = 0.0
        self._knows_failure = False

    @property
    def last(self) -> str:
        """The latest line that this rank has reported; "" before the first."""
        return self._journal.last

    def __enter__(self) -> Self:
        self._watched = threading.get_ident()
        if self._journal.world > 1:
            self._exchange = DumpExchange(store_for_thread(), self._journal.rank, self._journal.world, self._patience)
        self._journal.catch_fatal_signals()
        self._signal = QuitSignal()
        self._thread = threading.Thread(target=self._watch, args=(self._signal,), daemon=True, name="par-diagnosis")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # KeyboardInterrupt and SystemExit end a program on purpose: there is no failure to explain.
            if isinstance(error, Exception):
                with self._lock:
                    self._dump("error", error)
            if self._exchange is not None:
                # Without this, a rank that finishes early would look like a rank that is gone.
                with suppress(RuntimeError):  # the store may be gone with its rank
                    self._exchange.leave(self._farewell(error))
        finally:
            self._over.set()
            if self._signal is not None and self._thread is not None:
                # The order matters: first no new signals, then the thread ends, and only then may the pipe be closed.
                self._signal.restore()
                self._signal.wake()
                self._thread.join()
                self._signal.close()
            self._journal.close()

    def _farewell(self, error: BaseException | None) -> str:
        """Return the words for this rank if the other ranks still wait for it."""
        activity = self.activity
        after = "" if activity.step is None else f" (step {activity.step + 1})"
        odd = f", and {odd}" if (odd := activity.non_finite()) else ""
        return f"has {'ended its run' if error is None else f'left on a {type(error).__name__}'}{after}{odd}"

    def ask(self, reason: str = "asked") -> None:
        """Make all ranks write their dumps and report the line now.

        Args:
            reason: The beginning of the line.
        """
        with self._lock:
            self._dump(reason)

    # The thread

    def _watch(self, signals: QuitSignal) -> None:
        """Wait for signals, for calls of the other ranks, and for a time without progress."""
        # All ranks poll one store. The pause grows with their number, so that the load of the store does not.
        pause = max(min(1.0, self._timeout / 4), self._journal.world / _POLLS_A_SECOND)
        state, since = self._state(), time.monotonic()
        deadline, is_prepared = since + self._timeout, False
        while True:
            # This waits in `select` without the GIL, so a program that holds the GIL delays the thread, but not the
            # signal.
            is_asked = signals.wait(pause)
            if self._over.is_set():
                return
            # A new collective is progress. The end of a collective is not: the program may hang right behind it.
            now = self._state()
            if now != state:
                state, since = now, time.monotonic()
                deadline = since + self._timeout
            if is_asked:
                self.ask("SIGQUIT")
            # Another rank has noticed the hang first. Its exchange needs the dumps of all ranks.
            elif self._called():
                self._answer()
            elif not is_prepared and time.monotonic() - since >= self._timeout / 2:
                # The first reading of the recorder takes a second, which would delay the exchange of all ranks.
                self._recorder.communicators()
                is_prepared = True
                continue
            elif time.monotonic() >= deadline:
                self._complain(since)
            else:
                continue
            # The intervals between the lines of a lasting hang double, so that the log stays short.
            deadline = 2 * time.monotonic() - since

    def _state(self) -> tuple[object, ...]:
        return self.activity.step, self.activity.phase, self.activity.since, self._recorder.begun()

    def _called(self) -> str:
        try:
            return "" if self._exchange is None else self._exchange.called()
        except RuntimeError:
            return ""  # the rank that hosts the store is gone: this rank's own timeout or error reports that

    def _complain(self, since: float) -> None:
        """Start an exchange, unless this rank has just finished another exchange, such as over an error.

        Args:
            since: Time of the last progress.
        """
        # An error of the program may have waited for the same lock, and has then reported the cause already.
        with self._lock:
            if time.monotonic() - self._dumped > self._timeout and not self._over.is_set():
                called = self._called()  # the timeout of another rank may have ended a little earlier
                self._dump(called or f"no progress for {time.monotonic() - since:.0f} s", is_caller=not called)

    def _answer(self) -> None:
        """Join the exchange of another rank, unless another thread of this rank has joined it."""
        with self._lock:
            if reason := self._called():
                self._dump(reason, is_caller=False)

    # A dump

    def _dump(self, reason: str, error: BaseException | None = None, *, is_caller: bool = True) -> None:
        """Write this rank's dump, exchange it, and report the line if this rank is chosen; with the lock held."""
        try:
            dump = capture(
                self._recorder,
                self.activity,
                self._watched,
                rank=self._journal.rank,
                world=self._journal.world,
                reason=reason,
                error=error,
            )
            # The file is written before the exchange, because the exchange fails if the rank that hosts the store is
            # gone.
            self._journal.write(dump)
            if error is not None and (self._knows_failure or not self._report_errors or self._exchange is None):
                return  # the ranks have reported the first failure, or the program reports it itself
            if self._exchange is None:
                self._journal.report(Answers(reason, {self._journal.rank: dump}, {}))
                return
            try:
                if is_caller:
                    self._exchange.call(reason)
                self._knows_failure |= self._exchange.answer(dump, self._journal.report) == "error"
            except RuntimeError as lost:
                # The store has gone with rank 0, which hosts it, so this rank reports alone on what it knows.
                host = {0: f"is gone with the store that it hosts ({str(lost).splitlines()[0]})"}
                absent = {} if self._journal.rank == 0 else host
                self._journal.report(Answers(reason, {self._journal.rank: dump}, absent))
        finally:
            self._dumped = time.monotonic()
