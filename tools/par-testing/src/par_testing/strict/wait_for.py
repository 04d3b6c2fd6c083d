"""Who waits for whom: whether a rank that waits can ever go on. Pure."""

from collections.abc import Mapping

from .operation import Entry
from .queues import Queues

VANISHED = "has vanished"
"""How a rank has ended whose process is gone: it does not even end what runs."""


def deadlock(queues: Queues, waiting: Mapping[int, Entry], ended: Mapping[int, str]) -> str | None:
    """Why ranks that wait will wait for ever; None if each of them may go on.

    A rank that does not wait may do anything next, so whoever waits for it is not lost yet.

    Args:
        queues: What has been issued.
        waiting: The ranks that wait, and for which of their operations.
        ended: The ranks that have ended, and how.
    """
    waits = _Waits(queues, waiting, ended)
    lost = waits.lost()
    return waits.chain_from(lost[0]) if lost else None


class _Waits:
    """The ranks that wait at one moment, and what of all that they depend on may yet run.

    Args:
        queues: What has been issued.
        waiting: The ranks that wait, and for which of their operations.
        ended: The ranks that have ended, and how.
    """

    def __init__(self, queues: Queues, waiting: Mapping[int, Entry], ended: Mapping[int, str]) -> None:
        self._queues, self._waiting, self._ended = queues, waiting, ended
        self._hopeful: set[tuple[int, int]] = set()  # entries that may yet run
        needed = self._all_needed()
        changed = True
        while changed:
            changed = False
            for entry in needed:
                if self._may_run(entry):
                    continue
                party, missing = queues.party_of(entry)
                free = all(any(map(self._may_run, one_of)) for each in party for one_of in queues.before(each))
                if free and all(map(self._may_go_on, missing)):
                    self._hopeful.update((each.rank, each.number) for each in party)
                    changed = True

    def lost(self) -> list[int]:
        """The ranks that wait for what can never run, ascending."""
        return [rank for rank in sorted(self._waiting) if not self._may_run(self._waiting[rank])]

    def chain_from(self, rank: int) -> str:
        """In words: the circle in which a lost rank waits, or the way from it to a rank that has ended."""
        words: list[str] = []
        seen: set[int] = set()
        while rank not in seen and (rank in self._waiting or rank in self._ended):
            if rank in self._ended:
                words.append(f"rank {rank} {self._ended[rank]}")
                break
            seen.add(rank)
            entry = self._waiting[rank]
            steps, rank = self._way_from(entry)
            words.append(f"rank {entry.rank} waits for {self._named(entry)}{steps}")
        return "ranks wait for each other for ever: " + "; ".join(words)

    def _may_run(self, entry: Entry) -> bool:
        if self._queues.is_running(entry):
            return self._ended.get(entry.rank) != VANISHED  # which will never say that it is done
        return (entry.rank, entry.number) in self._hopeful

    def _may_go_on(self, rank: int) -> bool:
        return rank not in self._ended and (rank not in self._waiting or self._may_run(self._waiting[rank]))

    def _all_needed(self) -> list[Entry]:
        """Every entry that one that is waited for depends on."""
        found: dict[tuple[int, int], Entry] = {}
        look_at = list(self._waiting.values())
        while look_at:
            entry = look_at.pop()
            if (entry.rank, entry.number) in found or self._queues.is_running(entry):
                continue
            found[entry.rank, entry.number] = entry
            party, _ = self._queues.party_of(entry)
            look_at += party
            look_at += [each for one_of in self._queues.before(entry) for each in one_of]
        return list(found.values())

    def _way_from(self, entry: Entry) -> tuple[str, int]:
        """From an operation to the rank that keeps it from running: the steps in words, and that rank."""
        steps, seen = "", set()
        while True:
            seen.add((entry.rank, entry.number))
            if self._queues.is_running(entry):  # on a rank that has vanished
                return steps, entry.rank
            party, missing = self._queues.party_of(entry)
            for rank in missing:
                if not self._may_go_on(rank):
                    return f"{steps}, which rank {rank} has not issued", rank
            blocked = (
                (each, one_of[0])
                for each in party
                for one_of in self._queues.before(each)
                if not any(map(self._may_run, one_of)) and (one_of[0].rank, one_of[0].number) not in seen
            )
            member, earlier = next(blocked, (None, None))
            if member is None or earlier is None:
                return steps, entry.rank
            steps += f", before which rank {member.rank} must end {self._named(earlier)}"
            entry = earlier

    def _named(self, entry: Entry) -> str:
        place = self._queues.place_of(entry)
        which = "a batch" if place is None else f"operation {place}"
        return f"{which} of communicator {entry.communicator}, {entry.operation}"
