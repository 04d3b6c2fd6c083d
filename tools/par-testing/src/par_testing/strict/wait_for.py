"""Who waits for whom: whether a rank that waits can ever go on. Pure."""

from collections.abc import Callable, Mapping

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
    hopeful: set[tuple[int, int]] = set()  # entries that may yet run

    def may_run(entry: Entry) -> bool:
        if queues.is_running(entry):
            return ended.get(entry.rank) != VANISHED  # which will never say that it is done
        return (entry.rank, entry.number) in hopeful

    def may_go_on(rank: int) -> bool:
        return rank not in ended and (rank not in waiting or may_run(waiting[rank]))

    entries = _all_needed(queues, waiting)
    changed = True
    while changed:
        changed = False
        for entry in entries:
            if may_run(entry):
                continue
            party, missing = queues.party_of(entry)
            free = all(any(map(may_run, one_of)) for each in party for one_of in queues.before(each))
            if free and all(map(may_go_on, missing)):
                hopeful.update((each.rank, each.number) for each in party)
                changed = True
    lost = [rank for rank in sorted(waiting) if not may_run(waiting[rank])]
    return _chain(lost[0], queues, waiting, ended, may_run) if lost else None


def _all_needed(queues: Queues, waiting: Mapping[int, Entry]) -> list[Entry]:
    """Every entry that one that is waited for depends on."""
    found: dict[tuple[int, int], Entry] = {}
    look_at = list(waiting.values())
    while look_at:
        entry = look_at.pop()
        if (entry.rank, entry.number) in found or queues.is_running(entry):
            continue
        found[entry.rank, entry.number] = entry
        party, _ = queues.party_of(entry)
        look_at += party
        look_at += [each for one_of in queues.before(entry) for each in one_of]
    return list(found.values())


def _chain(
    rank: int, queues: Queues, waiting: Mapping[int, Entry], ended: Mapping[int, str], may_run: Callable[[Entry], bool]
) -> str:
    """The circle in words, or the way to a rank that has ended."""
    words: list[str] = []
    seen: set[int] = set()
    while rank not in seen and (rank in waiting or rank in ended):
        if rank in ended:
            words.append(f"rank {rank} {ended[rank]}")
            break
        seen.add(rank)
        entry = waiting[rank]
        steps, rank = _step(entry, queues, waiting, ended, may_run)
        words.append(f"rank {entry.rank} waits for {_named(entry, queues)}{steps}")
    return "ranks wait for each other for ever: " + "; ".join(words)


def _step(
    entry: Entry,
    queues: Queues,
    waiting: Mapping[int, Entry],
    ended: Mapping[int, str],
    may_run: Callable[[Entry], bool],
) -> tuple[str, int]:
    """From an operation to the rank that keeps it from running."""
    steps, seen = "", set()
    while True:
        seen.add((entry.rank, entry.number))
        if queues.is_running(entry):  # on a rank that has vanished
            return steps, entry.rank
        party, missing = queues.party_of(entry)
        for rank in missing:
            if rank in ended or (rank in waiting and not may_run(waiting[rank])):
                return f"{steps}, which rank {rank} has not issued", rank
        blocked = (
            (each, one_of[0])
            for each in party
            for one_of in queues.before(each)
            if not any(map(may_run, one_of)) and (one_of[0].rank, one_of[0].number) not in seen
        )
        member, earlier = next(blocked, (None, None))
        if member is None or earlier is None:
            return steps, entry.rank
        steps += f", before which rank {member.rank} must end {_named(earlier, queues)}"
        entry = earlier


def _named(entry: Entry, queues: Queues) -> str:
    place = queues.place_of(entry)
    which = "a batch" if place is None else f"operation {place}"
    return f"{which} of communicator {entry.communicator}, {entry.operation}"
