"""`Diagnosis`: a thread beside training that says why a job hangs, and costs a step nothing."""

import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from os import PathLike
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, TextIO

import torch.distributed as dist

from par_groups import FlightRecorder, ProcessGroups

from ._capture import capture
from ._dump import death_of
from ._explain import explain
from ._meeting import Heard, Meeting
from ._place import Place
from ._torch_private import store_for_thread

_RANKS_A_SECOND = 200
"""How often the store is asked, by all ranks together, whether somebody wants to meet."""


class Diagnosis:
    """Watches a rank, and says in one line which rank keeps the others when nothing goes on.

    Used as a context manager, on all ranks. A thread of its own looks on. When nothing has gone on for `timeout`
    seconds, when a rank gets SIGQUIT (Ctrl and backslash), or when one leaves the block by an exception, every rank
    writes what it was doing to `folder`, the ranks meet over the store, and one of them says who keeps whom. Training
    goes on if it can: nobody is ended.

    Args:
        groups: The live groups of a topology, or any process groups by their labels.
        folder: The folder of the dumps, best one that all ranks share; it is made when it is needed.
        timeout: Seconds without a step and without an operation of the groups after which a rank is taken to hang. A
            collective's own timeout should be longer.
        facts: What ranks should have alike, by name; a difference is named as a possible cause.
        patience: Seconds that ranks wait for each other when they meet; who does not come is named.
        tell: Called with the line, on one rank; default: it is printed to the standard error.
        meets_on_error: Whether ranks meet when one leaves by an exception; else it only writes its dump, for programs
            that say themselves who has failed.
        place: Where the program tells of its progress, if somebody else has made it; default: a new one.

    Attributes:
        place: What the program tells: `at(step, phase)` and `note(values)`.
        last: The newest line that this rank has spoken; "".

    Raises:
        ValueError: A number of seconds that is not positive.

    Example:
        with Diagnosis(groups, "runs/llama/diagnosis", timeout=300) as diagnosis:
            for step, batch in enumerate(batches):
                diagnosis.place.at(step, "step")
                train(batch)
    """

    def __init__(
        self,
        groups: ProcessGroups | Mapping[str, dist.ProcessGroup],
        folder: str | PathLike[str],
        *,
        timeout: float = 300.0,
        facts: Mapping[str, object] | None = None,
        patience: float = 3.0,
        tell: Callable[[str], None] | None = None,
        meets_on_error: bool = True,
        place: Place | None = None,
    ) -> None:
        if timeout <= 0 or patience <= 0:
            raise ValueError(f"timeout is {timeout} and patience {patience}; give seconds above 0")
        self._folder, self._timeout, self._patience = Path(folder), timeout, patience
        self._tell = tell or (lambda text: print(text, file=sys.stderr, flush=True))
        self._recorder = FlightRecorder(groups)
        self.place, self.last = place or Place(), ""
        self.place.facts.update({name: str(value) for name, value in (facts or {}).items()})
        self._meets_on_error = meets_on_error
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._meeting: Meeting | None = None
        self._lock = threading.Lock()  # one round at a time
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._unwritten = ""  # why this rank's dump is not in the folder
        self._met = 0.0  # when the last round was over
        self._knows_failure = False  # the ranks have met over an error, which is the cause of those that follow
        self._watched = 0
        self._pipe: tuple[int, int] | None = None
        self._before: list[Any] = []
        self._fatal: TextIO | None = None

    # The watch

    def __enter__(self) -> Self:
        self._watched = threading.get_ident()
        if self._world > 1:
            self._meeting = Meeting(store_for_thread(), self._rank, self._world, self._patience)
        self._pipe = os.pipe()
        for end in self._pipe:
            os.set_blocking(end, False)
        self._hear_signals()
        self._thread = threading.Thread(target=self._watch, args=(self._pipe[0],), daemon=True, name="par-diagnosis")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, Exception):
                self._round("error", error)
            if self._meeting is not None:
                with suppress(RuntimeError):  # the store may be gone with its rank
                    self._meeting.leave(self._farewell(error))
                    self._meeting.note_left()
        finally:
            self._end()

    def _farewell(self, error: BaseException | None) -> str:
        """What the others are told if they still wait for this rank."""
        place = self.place
        after = "" if place.step is None else f" (step {place.step + 1})"
        odd = f", and {odd}" if (odd := place.not_finite()) else ""
        return f"has {'ended its run' if error is None else f'left on a {type(error).__name__}'}{after}{odd}"

    def _end(self) -> None:
        self._over.set()
        if self._before:
            before, descriptor = self._before
            signal.signal(signal.SIGQUIT, signal.SIG_DFL if before is None else before)
            signal.set_wakeup_fd(descriptor)
            self._before = []
        if self._thread is not None and self._pipe is not None:
            os.write(self._pipe[1], b"\0")
            self._thread.join()
            for end in self._pipe:
                os.close(end)
        if self._fatal is not None:
            faulthandler.disable()
            self._fatal.close()
            Path(self._fatal.name).unlink(missing_ok=True)
            with suppress(OSError):  # other files are there
                self._folder.rmdir()

    def _hear_signals(self) -> None:
        """SIGQUIT wakes the watching thread by a byte in its pipe: C code writes it wherever the program is stuck."""
        if threading.current_thread() is not threading.main_thread() or self._pipe is None:
            return  # Python hears signals in the main thread alone

        def handler(number: int, frame: FrameType | None) -> None:
            """What the byte has done already."""

        before = signal.signal(signal.SIGQUIT, handler)
        self._before = [before, signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)]

    def catch_death(self) -> None:
        """Lets Python write where this rank was if a signal ends it, such as gloo's abort; for processes of one's own.

        Nothing is changed where `faulthandler` is on already: somebody else wants to know it.
        """
        if faulthandler.is_enabled():
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        self._fatal = (self._folder / f"rank-{self._rank}.fatal").open("w", encoding="utf-8")
        faulthandler.enable(self._fatal, all_threads=True)

    def _watch(self, pipe: int) -> None:
        """The thread: looks for signals, calls of other ranks, and whether anything goes on."""
        pause = max(min(1.0, self._timeout / 4), self._world / _RANKS_A_SECOND)
        state, since = self._state(), time.monotonic()
        complains, is_prepared = since + self._timeout, False
        while True:
            ready, _, _ = select.select([pipe], [], [], pause)
            asked = b""
            if ready:
                with suppress(BlockingIOError):
                    asked = os.read(pipe, 4096)
            if self._over.is_set():
                return
            if asked and self._before and self._before[1] >= 0:
                os.write(self._before[1], asked)  # to whoever listened before
            now = self._state()
            if now != state:
                state, since = now, time.monotonic()
                complains = since + self._timeout
            if signal.SIGQUIT in asked:
                self._round("SIGQUIT")
            elif self._called():
                self._answer()
            elif not is_prepared and time.monotonic() - since >= self._timeout / 2:
                self._recorder.communicators()  # the first reading takes a second: now it keeps nobody
                is_prepared = True
                continue
            elif time.monotonic() >= complains:
                self._complain(since)
            else:
                continue
            complains = 2 * time.monotonic() - since  # a job that hangs on says so less and less often

    def _state(self) -> tuple[object, ...]:
        return self.place.step, self.place.phase, self.place.since, self._recorder.begun()

    def _called(self) -> str:
        try:
            return "" if self._meeting is None else self._meeting.called()
        except RuntimeError:
            return ""  # the rank that keeps the store is gone: this rank's own timeout, or its error, will tell

    # A round

    def ask(self, reason: str = "asked") -> None:
        """Has all ranks write their dumps, and says who keeps whom, as after a timeout."""
        self._round(reason)

    def _complain(self, since: float) -> None:
        """Asks for a round as nothing goes on, unless this rank has held one just now, such as over an error.

        Args:
            since: When something went on last.
        """
        with self._lock:
            if time.monotonic() - self._met > self._timeout and not self._over.is_set():
                called = self._called()  # by a rank whose patience ended a little earlier: it may have spoken already
                self._meet(called or f"no progress for {time.monotonic() - since:.0f} s", asks=not called)

    def _answer(self) -> None:
        """Takes part in a round that another rank wants, unless another thread of this rank has done so meanwhile."""
        with self._lock:
            if reason := self._called():
                self._meet(reason, asks=False)

    def _round(self, reason: str, error: BaseException | None = None) -> None:
        with self._lock:
            self._meet(reason, error)

    def _meet(self, reason: str, error: BaseException | None = None, *, asks: bool = True) -> None:
        try:
            self._dump_and_speak(reason, error, asks=asks)
        finally:
            self._met = time.monotonic()

    def _dump_and_speak(self, reason: str, error: BaseException | None, *, asks: bool) -> None:
        dump = capture(
            self._recorder,
            self.place,
            self._watched,
            rank=self._rank,
            world=self._world,
            reason=reason,
            error=error,
        )
        self._write(dump.to_json())
        if error is not None and (self._knows_failure or not self._meets_on_error or self._meeting is None):
            return  # who has failed is said already, or will be
        if self._meeting is not None:
            try:
                if asks:
                    self._meeting.call(reason)
                self._knows_failure |= self._meeting.take_part(dump, self._speak) == "error"
                return
            except RuntimeError as lost:
                keeper = {0: f"is gone with the store that it kept ({str(lost).splitlines()[0]})"}
                absent = keeper if self._rank != 0 else {}
                self._speak(Heard(reason, {self._rank: dump}, absent))
                return
        self._speak(Heard(reason, {self._rank: dump}, {}))

    def _write(self, text: str) -> None:
        """Writes this rank's file; where that fails, what is said over the store must do, and tells so."""
        path = self._folder / f"rank-{self._rank}.json"
        self._unwritten = ""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            new = path.with_suffix(".new")
            new.write_text(text, encoding="utf-8")
            new.replace(path)
        except OSError as problem:
            self._unwritten = f" (but for that of rank {self._rank}: {problem.strerror})"

    def _speak(self, heard: Heard) -> None:
        absent = {rank: self._with_death(rank, words) for rank, words in heard.absent.items()}
        found = explain(heard.dumps, self._world, absent)
        self.last = f"par-train: diagnosis ({heard.reason}): {found.line}; dumps are in {self._folder}{self._unwritten}"
        self._tell(self.last)
        try:
            with (self._folder / "diagnosis.txt").open("a", encoding="utf-8") as file:
                file.write("\n".join([self.last, *(f"    {line}" for line in found.details), ""]))
        except OSError as problem:
            self._tell(f"par-train: cannot write {self._folder / 'diagnosis.txt'}: {problem.strerror}")

    def _with_death(self, rank: int, words: str) -> str:
        try:
            text = (self._folder / f"rank-{rank}.fatal").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return words
        return death_of(text) or words
