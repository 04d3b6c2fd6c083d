"""The referee of a world: a thread of the pytest process that every rank tells what it does.

A rank says `issue`, `wait`, `done` and `ended`; it is told to `run` an operation, or what is wrong. What an operation's
inputs are goes past the referee: each rank leaves them in a file, which the others read when they are told to run.
"""

import shutil
import tempfile
import threading
from collections import defaultdict
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from .clock import seconds_of
from .options import Strict
from .queues import Fault, Key, Party, Queues, Run, Verdict
from .wait_for import VANISHED, deadlock

if TYPE_CHECKING:
    from .operation import Entry

_MEMORY = Path("/dev/shm")  # noqa: S108  # files that are never written to a disk


class Referee:
    """Compares what ranks issue, says when it runs, and ends all when two differ or wait for each other.

    Args:
        size: The ranks of the world.
        strict: What is enforced.
    """

    def __init__(self, size: int, strict: Strict) -> None:
        self._size = size
        self._queues = Queues(strict.slots)
        self._links = strict.links
        self._free: defaultdict[tuple[str, int], float] = defaultdict(
            float
        )  # when a rank's communicator is, in virtual time
        self._waiting: dict[int, Entry] = {}
        self._ended: dict[int, str] = {}
        self._ranks: dict[int, Connection] = {}
        self._readers: dict[Key, _Readers] = {}
        self.fault: str | None = None
        """What was wrong first, if anything was."""

    def __enter__(self) -> Self:
        self.folder = Path(tempfile.mkdtemp(prefix="par-strict-", dir=_MEMORY if _MEMORY.is_dir() else None))
        self._listener = Listener(str(self.folder / "referee"), backlog=self._size)
        self._thread = threading.Thread(target=self._serve, name="referee", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError), Client(self._listener.address) as last:  # wakes the thread up
            last.send(None)
        self._thread.join()
        self._listener.close()
        shutil.rmtree(self.folder)

    def _serve(self) -> None:
        waiting_room: Any = self._listener._listener._socket  # type: ignore[attr-defined]  # to wait for it beside others
        while True:
            for ready in wait([waiting_room, *self._ranks.values()]):
                if ready is not waiting_room:
                    rank = next(rank for rank, each in self._ranks.items() if each is ready)
                    try:
                        self._hear(rank)
                    except Exception as error:  # else ranks would wait for a referee that is gone
                        self._carry_out([Fault(f"the referee failed: {type(error).__name__}: {error}")])
                        raise
                    continue
                connection = self._listener.accept()
                rank = connection.recv()
                if rank is None:
                    for each in (connection, *self._ranks.values()):
                        each.close()
                    return
                self._ranks[rank] = connection

    def _hear(self, rank: int) -> None:
        """Takes in one word of a rank."""
        try:
            word, what = self._ranks[rank].recv()
        except (EOFError, OSError):
            self._ranks.pop(rank).close()
            word, what = "ended", VANISHED
        if word == "issue":
            self._carry_out(self._queues.issue(what))
        elif word == "done":
            waiting = self._waiting.get(rank)
            if waiting is not None and waiting.number == what:
                del self._waiting[rank]
            self._drop_files((rank, what))
            self._carry_out(self._queues.done((rank, what)))
        elif word == "wait":
            entry = self._queues.find((rank, what))
            if entry is not None:  # else it has run in between
                self._waiting[rank] = entry
        elif word == "fault":
            self._carry_out([Fault(what)])
        else:
            self._ended.setdefault(rank, what)
        if word != "issue" and (lost := deadlock(self._queues, self._waiting, self._ended)):
            self._carry_out([Fault(lost)])

    def _carry_out(self, verdicts: list[Verdict]) -> None:
        for verdict in verdicts:
            if isinstance(verdict, Run):
                keys = [(entry.rank, entry.number) for entry in verdict.party]
                self._readers.update(dict.fromkeys(keys, _Readers(keys)))
                span = self._span(verdict.party)
                for entry in verdict.party:
                    self._tell(entry.rank, ("run", (entry.number, verdict.party, span)))
            elif self.fault is None:
                self.fault = verdict.words
                for rank in list(self._ranks):
                    self._tell(rank, ("fault", verdict.words))

    def _span(self, party: Party) -> tuple[float, float]:
        """When an operation begins and ends, in virtual time."""
        if self._links is None:
            return 0.0, 0.0
        first = party[0]
        present = tuple(dict.fromkeys(entry.rank for entry in party))
        members = present if first.operation.parts else first.joined or present
        begin = max(max(self._free[entry.communicator, entry.rank], entry.time) for entry in party)
        end = begin + max(seconds_of(entry.operation, members, self._links) for entry in party)
        self._free.update({(entry.communicator, entry.rank): end for entry in party})
        return begin, end

    def _tell(self, rank: int, words: tuple[str, Any]) -> None:
        if rank in self._ranks:
            with suppress(OSError):  # it has ended, which will be heard
                self._ranks[rank].send(words)

    def _drop_files(self, key: Key) -> None:
        """A rank has read what it was to; once all have, the files go."""
        readers = self._readers.pop(key)
        readers.left -= 1
        if readers.left == 0:
            for other in readers.keys:
                payload_of(self.folder, other).unlink(missing_ok=True)


class _Readers:
    """The ranks of one operation that read each other's files."""

    def __init__(self, keys: list[Key]) -> None:
        self.keys, self.left = keys, len(keys)


def payload_of(folder: Path, key: Key) -> Path:
    """The file in which a rank leaves the inputs of an operation."""
    return folder / f"{key[0]}-{key[1]}"
