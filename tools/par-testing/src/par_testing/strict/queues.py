"""The order of operations: pure, events in and verdicts out.

Every rank has a queue for each communicator. The n-th operation that a rank issues on a communicator must be that of
all its other ranks; it runs when it is at the head of every member's queue, so one after the other. A batch of messages
is one operation of its rank, and runs together with the batches that its messages come from and go to.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .operation import Entry, Part

Party = tuple[Entry, ...]
"""The operations of several ranks that are one."""


@dataclass(frozen=True)
class Run:
    """All ranks have come, and it is their turn."""

    party: Party


@dataclass(frozen=True)
class Fault:
    """The ranks differ; nothing more can be relied on."""

    words: str


Verdict = Run | Fault
Key = tuple[int, int]
"""An entry by its rank and its number."""

Way = tuple[str, int, int]
"""A communicator, a rank that sends on it, and one that receives."""


class _Line:
    """The messages that go one way, in order: the batches of both ends, as long as one of them is not done."""

    def __init__(self) -> None:
        self._first = 0  # the number of the first message that is kept, from 0
        self._ends: dict[str, deque[Entry]] = {"send": deque(), "recv": deque()}
        self._done = {"send": 0, "recv": 0}

    def add(self, kind: str, entry: Entry) -> int:
        """Adds one end of a message; returns the number of the message."""
        self._ends[kind].append(entry)
        return self._first + len(self._ends[kind]) - 1

    def end(self, kind: str, number: int) -> Entry | None:
        """The batch at one end of a message, if it has been issued."""
        entries, place = self._ends[kind], number - self._first
        return entries[place] if place < len(entries) else None

    def done(self, kind: str) -> None:
        """The next message is done at this end; it is forgotten if it is at the other one, too."""
        self._done[kind] += 1
        while self._first < min(self._done.values()):
            self._first += 1
            for entries in self._ends.values():
                entries.popleft()


class Queues:
    """What has been issued and is not done, on every rank.

    Args:
        slots: How many communicators of a rank can make progress at a time; None for all.
    """

    def __init__(self, slots: int | None = None) -> None:
        self._slots = slots
        self._waiting: defaultdict[int, dict[str, deque[Entry]]] = defaultdict(dict)
        self._running: dict[Key, Party] = {}
        self._issued: defaultdict[tuple[int, str], int] = defaultdict(int)
        self._calls: defaultdict[tuple[str, int], dict[int, Entry]] = defaultdict(dict)
        self._call_of: dict[Key, tuple[str, int]] = {}
        self._lines: defaultdict[Way, _Line] = defaultdict(_Line)
        self._parts: dict[
            Key, dict[tuple[Way, int], Part]
        ] = {}  # of a batch, by the line and the number of the message

    def issue(self, entry: Entry) -> list[Verdict]:
        """A rank has issued an operation."""
        self._waiting[entry.rank].setdefault(entry.communicator, deque()).append(entry)
        fault = self._join_batch(entry) if entry.operation.name == "batch" else self._join_call(entry)
        return [Fault(fault)] if fault else [*self._ready()]

    def done(self, key: Key) -> list[Verdict]:
        """A rank has ended an operation that was told to run."""
        party = self._running.pop(key)
        entry = next(each for each in party if each.rank == key[0])
        queue = self._waiting[entry.rank][entry.communicator]
        queue.popleft()
        if not queue:
            del self._waiting[entry.rank][entry.communicator]
        self._forget(entry)
        return [*self._ready()]

    def is_running(self, entry: Entry) -> bool:
        """Whether all ranks have come, and it was its turn."""
        return _key(entry) in self._running

    def find(self, key: Key) -> Entry | None:
        """The entry that is not done, by its key."""
        return next((each for queue in self._waiting[key[0]].values() for each in queue if _key(each) == key), None)

    def party_of(self, entry: Entry) -> tuple[list[Entry], list[int]]:
        """The entries that are one operation with this one, and the ranks that have yet to issue theirs."""
        if entry.operation.name == "batch":
            return self._batches_with(entry)
        call = self._calls[self._call_of[_key(entry)]]
        return [*call.values()], [rank for rank in entry.members if rank not in call]

    def before(self, entry: Entry) -> Iterator[list[Entry]]:
        """What must be done first on the entry's own rank: of each list, one."""
        queues = self._waiting[entry.rank]
        queue = queues[entry.communicator]
        if queue[0] is not entry:
            yield [queue[queue.index(entry) - 1]]
        elif self._slots is not None:
            heads = [other[0] for other in queues.values() if other[0].number < entry.number]
            if len(heads) >= self._slots:
                yield heads

    def place_of(self, entry: Entry) -> int | None:
        """Which operation of its communicator it is, from 1; None for a batch."""
        call = self._call_of.get(_key(entry))
        return None if call is None else call[1]

    def _join_call(self, entry: Entry) -> str:
        """Joins the operations of the other members; how they differ, if they do."""
        lane = entry.rank, entry.communicator
        self._issued[lane] += 1
        place = entry.communicator, self._issued[lane]
        call = self._calls[place]
        self._call_of[_key(entry)] = place
        other = next(iter(call.values()), None)
        call[entry.rank] = entry
        if other is not None and not entry.operation.agrees(other.operation):
            return _differ(entry, other, f"operation {place[1]} of communicator {entry.communicator}")
        complete = len(call) == len(entry.members)
        return _splits_differ(call, entry, place[1]) if complete and entry.operation.sends else ""

    def _join_batch(self, entry: Entry) -> str:
        """Joins each message of a batch to its other end; how the two differ, if they do."""
        self._parts[_key(entry)] = {}
        for part in entry.operation.parts:
            source, target = (entry.rank, part.peer) if part.kind == "send" else (part.peer, entry.rank)
            way = entry.communicator, source, target
            number = self._lines[way].add(part.kind, entry)
            self._parts[_key(entry)][way, number] = part
            other = self._lines[way].end(_OTHER_END[part.kind], number)
            if other is not None and not part.fits(self._parts[_key(other)][way, number]):
                where = f"message {number + 1} from rank {source} to rank {target} of {entry.communicator}"
                return _differ(entry, other, where)
        return ""

    def _batches_with(self, entry: Entry) -> tuple[list[Entry], list[int]]:
        found, missing, look_at = {_key(entry): entry}, [], [entry]
        while look_at:
            batch = look_at.pop()
            for (way, number), part in self._parts[_key(batch)].items():
                other = self._lines[way].end(_OTHER_END[part.kind], number)
                if other is None:
                    missing.append(part.peer)
                elif _key(other) not in found:
                    found[_key(other)] = other
                    look_at.append(other)
        return [*found.values()], sorted(set(missing))

    def _ready(self) -> Iterator[Run]:
        """What can run now, and is from here on running."""
        heads = {_key(head): head for rank in self._waiting for head in self._heads(rank)}
        for entry in list(heads.values()):
            if self.is_running(entry):
                continue
            party, missing = self.party_of(entry)
            if not missing and all(_key(each) in heads for each in party):
                ordered = tuple(sorted(party, key=lambda each: each.rank))
                self._running.update({_key(each): ordered for each in ordered})
                yield Run(ordered)

    def _heads(self, rank: int) -> Sequence[Entry]:
        heads = sorted((queue[0] for queue in self._waiting[rank].values()), key=lambda entry: entry.number)
        return heads[: self._slots]

    def _forget(self, entry: Entry) -> None:
        for (way, _), part in self._parts.pop(_key(entry), {}).items():
            self._lines[way].done(part.kind)
        place = self._call_of.pop(_key(entry), None)
        if place is not None:
            call = self._calls[place]
            if all(_key(each) not in self._call_of for each in call.values()) and len(call) == len(entry.members):
                del self._calls[place]


_OTHER_END = {"send": "recv", "recv": "send"}


def _key(entry: Entry) -> Key:
    return entry.rank, entry.number


def _differ(entry: Entry, other: Entry, where: str) -> str:
    first, second = sorted((entry, other), key=lambda each: each.rank)
    return f"{where}: rank {first.rank} issued {first.operation}, rank {second.rank} {second.operation}"


def _splits_differ(call: dict[int, Entry], entry: Entry, place: int) -> str:
    """What one member sends to another must be what that one expects."""
    places = {member: place for place, member in enumerate(entry.joined or entry.members)}
    for sender in entry.members:
        for receiver in entry.members:
            i, j = places[sender], places[receiver]
            sent, expected = call[sender].operation.sends[j], call[receiver].operation.expects[i]
            if sent != expected:
                return (
                    f"operation {place} of communicator {entry.communicator}: rank {sender} sends {sent} elements to "
                    f"rank {receiver}, which expects {expected}: {call[sender].operation}, {call[receiver].operation}"
                )
    return ""
