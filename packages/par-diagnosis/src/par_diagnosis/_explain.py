"""One line that says which rank keeps the others, where, and why, from what each was doing. Pure; no torch."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from par_groups import Communicator, Operation

from ._dump import Dump, Frame
from ._history import Difference, find_difference

_LOST = re.compile(
    r"closed by|reset by|broken pipe|timed? ?out|likely closed|ncclRemoteError|is gone, or did not answer|PeerFailed",
    re.IGNORECASE,
)
"""What errors say that another rank has caused."""

_PLUMBING = ("_collectives.py", "agreement.py", "vote.py")
"""Files that every collective of ours goes through, so that their lines tell nothing."""

_LONG = 80
"""Letters of a fact that are shown."""

_PHASES = {
    "data": "waiting for its data",
    "checkpoint": "in a checkpoint",
    "restart": "in the beginning of the run",
    "log": "writing a line of metrics",
}


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What is wrong, in words.

    Args:
        line: One line: the rank, the place and the cause.
        details: A line for every rank.
    """

    line: str
    details: tuple[str, ...]


@dataclass(frozen=True)
class _Wait:
    """An operation that a rank is in, and the ranks whose part is missing."""

    rank: int
    operation: Operation
    communicator: Communicator
    missing: tuple[int, ...] = field(default=())


def explain(dumps: Mapping[int, Dump], world: int, absent: Mapping[int, str] | None = None) -> Explanation:
    """Says who keeps whom.

    Looked for in this order: a rank that has failed by itself; one that is gone, or has ended; an operation in which
    the ranks of a communicator differ; one that has not come to where others wait; ranks that wait for each other.

    Args:
        dumps: What each rank was doing, by rank.
        world: The number of ranks.
        absent: What is known of ranks that have no dump, in words, such as "is gone".
    """
    gone = {rank: "left no dump" for rank in range(world) if rank not in dumps} | dict(absent or {})
    waits = _waits(dumps, world)
    line = (
        _failed(dumps, waits)
        or _absent(gone, waits)
        or _different(dumps)
        or _late(dumps, waits)
        or _circle(dumps, waits)
        or _busy(dumps, waits)
    )
    details = [_state(dump, waits.get(rank)) for rank, dump in sorted(dumps.items())]
    details += [f"rank {rank} {words}" for rank, words in sorted(gone.items())]
    return Explanation(line=line + _causes(dumps), details=tuple(details))


# What can be wrong, one after the other


def _failed(dumps: Mapping[int, Dump], waits: Mapping[int, _Wait]) -> str:
    """The ranks that have failed by themselves, the first one first."""
    failed = sorted(
        (dump for dump in dumps.values() if dump.error and not _is_consequence(dump)), key=lambda dump: dump.time
    )
    if not failed:
        return ""
    first = failed[0]
    alike = [dump.rank for dump in failed if dump.error == first.error]
    who = f"ranks {_listed(alike)} failed alike" if len(alike) > 1 else f"rank {first.rank} failed"
    return f"{who}{_when(first)}{_at(first.error_sites)}: {first.error}{_waiting_for(waits, alike)}"


def _absent(gone: Mapping[int, str], waits: Mapping[int, _Wait]) -> str:
    """The ranks that nothing was heard of."""
    if not gone:
        return ""
    by_words: dict[str, list[int]] = {}
    for rank, words in sorted(gone.items()):
        by_words.setdefault(words, []).append(rank)
    parts = [f"{_ranks(ranks)} {words}" for words, ranks in by_words.items()]
    return f"{'; '.join(parts)}{_waiting_for(waits, list(gone))}"


def _different(dumps: Mapping[int, Dump]) -> str:
    """An operation in which the ranks of a communicator differ; of several, the one that was begun first."""
    found: list[tuple[float, Communicator, Difference]] = []
    for members in _communicators(dumps).values():
        difference = find_difference({rank: one.operations for rank, one in members.items()})
        if difference is not None:
            communicator = members[difference.rank]
            found.append((min(difference.own.began, difference.other.began), communicator, difference))
    if not found:
        return ""
    _, communicator, difference = min(found, key=lambda item: item[0])
    return _difference_in_words(communicator, difference, dumps)


def _difference_in_words(communicator: Communicator, difference: Difference, dumps: Mapping[int, Dump]) -> str:
    own, other, rank = difference.own, difference.other, difference.rank
    where, others = _group(communicator), _ranks(difference.others)
    doubt = "" if difference.is_sure else ", or the other way round"
    ahead = max((_last(dumps[it], communicator) for it in difference.others), default=other.number) - own.number
    if difference.kind == "skipped":
        return (
            f"rank {rank} never called {other.name} number {other.number} of {where}, as {others} did"
            f"{_at(other.sites)}: it went on to {own.name}{_at(own.sites)}"
        )
    if difference.kind == "shape":
        return (
            f"rank {rank} brings {own} to number {own.number} of {where}{_at(own.sites)}, where {others} "
            f"{_verb(difference.others, 'brings', 'bring')} {other}{_at(other.sites)}: another shape{doubt}"
        )
    if difference.kind == "order":
        return (
            f"rank {rank} is in {own} of {where}{_at(own.sites)} before, or without, {other.name}{_at(other.sites)}, "
            f"which always came first and {_where_they_are(others, difference, ahead)}: rank {rank} never called "
            f"it, or calls in another order{doubt}"
        )
    return (
        f"rank {rank} is in {own} of {where}{_at(own.sites)}, where {others} {_verb(difference.others, 'is', 'are')} "
        f"in {other}{_at(other.sites)} (number {own.number}): another order, or a call that one of them left out{doubt}"
    )


def _where_they_are(others: str, difference: Difference, ahead: int) -> str:
    """Where the other ranks are, as a relative clause of their operation."""
    if ahead <= 0:
        return f"in which {others} {_verb(difference.others, 'is', 'are')}"
    further = "an operation" if ahead == 1 else f"{ahead} operations"
    return f"which {others} {_verb(difference.others, 'has', 'have')} called; now {further} further"


def _late(dumps: Mapping[int, Dump], waits: Mapping[int, _Wait]) -> str:
    """A rank that waits for nobody, and for which others wait."""
    for start in _in_order(dumps, waits):
        chain, is_closed = _chain(start, dumps, waits)
        if is_closed or len(chain) < 2:
            continue
        root, keeper = dumps[chain[-1]], chain[-2]
        if keeper not in waits:
            doing = dumps[keeper].doing or _place_of(dumps[keeper])
            return f"rank {root.rank} {_doing(root)}; rank {keeper} waits for its message ({doing})"
        operation, communicator = waits[keeper].operation, waits[keeper].communicator
        alike = [
            rank
            for rank, wait in sorted(waits.items())
            if wait.communicator.label == communicator.label and root.rank in wait.missing
        ]
        too = [rank for rank in waits[keeper].missing if rank != root.rank and rank in dumps]
        also = f", nor {_verb(too, 'has', 'have')} {_ranks(too)}" if too else ""
        return (
            f"rank {root.rank} {_doing(root)} and has not come to {operation.name} number {operation.number} of "
            f"{_group(communicator)}{also}, in which {_ranks(alike)} {_verb(alike, 'waits', 'wait')}"
            f"{_at(operation.sites)}"
        )
    return ""


def _circle(dumps: Mapping[int, Dump], waits: Mapping[int, _Wait]) -> str:
    """Ranks that wait for each other, in different communicators or for messages: they call in different orders."""
    for start in _in_order(dumps, waits):
        circle, is_closed = _chain(start, dumps, waits)
        if not is_closed:
            continue
        parts = [
            f"rank {rank} is in {wait.operation.name} of {_group(wait.communicator)}{_at(wait.operation.sites)} and "
            f"waits for {_ranks(wait.missing)}"
            if (wait := waits.get(rank)) is not None
            else f"rank {rank} {_doing(dumps[rank])} and waits for a message of {_ranks(dumps[rank].waits_for)}"
            for rank in circle
        ]
        return f"{'; '.join(parts)}: they call in another order{_odd_one(circle, dumps, waits)}"
    return ""


def _in_order(dumps: Mapping[int, Dump], waits: Mapping[int, _Wait]) -> list[int]:
    """The ranks that wait, who has waited longest first; those that wait for messages last."""
    ranks = [rank for rank in dumps if rank in waits or dumps[rank].waits_for]
    return sorted(ranks, key=lambda rank: waits[rank].operation.began if rank in waits else float("inf"))


def _chain(start: int, dumps: Mapping[int, Dump], waits: Mapping[int, _Wait]) -> tuple[list[int], bool]:
    """Who waits for whom, from a rank on: to one that waits for nobody, or, where they go round, the circle alone."""
    seen = [start]
    while True:
        wait = waits.get(seen[-1])
        behind = wait.missing if wait is not None else dumps[seen[-1]].waits_for
        following = next((rank for rank in behind if rank in dumps), None)
        if following is None:
            return seen, False
        if following in seen:
            return seen[seen.index(following) :], True
        seen.append(following)


def _odd_one(circle: Sequence[int], dumps: Mapping[int, Dump], waits: Mapping[int, _Wait]) -> str:
    """Which rank of a circle does what it did not do before, if its own past tells."""
    odd = []
    for rank in circle:
        if rank not in waits:
            continue
        done = sorted(
            (one for group in dumps[rank].communicators.values() for one in group.operations),
            key=lambda one: one.began,
        )
        places = [(one.name, one.sites[:1]) for one in done if one.began <= waits[rank].operation.began]
        before, here = places[-2:-1], places[-1:]
        followers = [two for one, two in pairwise(places[:-1]) if [one] == before]
        if followers and here[0] not in followers:
            odd.append(rank)
    return f", rank {odd[0]} than it did before" if len(odd) == 1 else ""


def _busy(dumps: Mapping[int, Dump], waits: Mapping[int, _Wait]) -> str:
    """Says what ranks do where none is behind another: all are in an operation that does not end, or none waits."""
    common = [rank for rank, wait in waits.items() if not wait.missing]
    if common and len(common) == len(dumps):
        wait = waits[common[0]]
        return (
            f"all ranks of {_group(wait.communicator)} are in {wait.operation}{_at(wait.operation.sites)}, and it does "
            "not end: the network, or a device, is slow or stuck"
        )
    slowest = max(dumps.values(), key=lambda dump: dump.seconds)
    return f"no rank waits for another; rank {slowest.rank} {_doing(slowest)}"


# What ranks wait for


def _communicators(dumps: Mapping[int, Dump]) -> dict[tuple[str, tuple[int, ...]], dict[int, Communicator]]:
    """What the ranks of each communicator know of it."""
    found: dict[tuple[str, tuple[int, ...]], dict[int, Communicator]] = {}
    for rank, dump in sorted(dumps.items()):
        for label, communicator in dump.communicators.items():
            found.setdefault((label, communicator.ranks), {})[rank] = communicator
    return found


def _waits(dumps: Mapping[int, Dump], world: int) -> dict[int, _Wait]:
    """The oldest operation that each rank is in, and who has not begun it."""
    begun = {
        key: {rank: _last(dumps[rank], one) for rank, one in members.items()}
        for key, members in _communicators(dumps).items()
    }
    found: dict[int, _Wait] = {}
    for rank, dump in dumps.items():
        pending = [
            (operation, communicator)
            for communicator in dump.communicators.values()
            for operation in communicator.operations
            if not operation.is_message and (not operation.ended or _has_failed_in(dump, operation))
        ]
        if not pending:
            continue
        operation, communicator = min(pending, key=lambda item: item[0].began)
        last = begun[communicator.label, communicator.ranks]
        missing = tuple(
            other
            for other in communicator.ranks or range(world)
            if other != rank and last.get(other, 0) < operation.number
        )
        found[rank] = _Wait(rank, operation, communicator, missing)
    return found


def _has_failed_in(dump: Dump, operation: Operation) -> bool:
    """Whether it is the last operation of a rank that has then failed because of another one."""
    if not _is_consequence(dump):
        return False
    begun = [one for group in dump.communicators.values() for one in group.operations]
    return operation == max(begun, key=lambda one: one.began)


def _last(dump: Dump, communicator: Communicator) -> int:
    """The number of the last collective that a rank has begun in a communicator."""
    known = dump.communicators.get(communicator.label)
    return max((one.number for one in known.operations if not one.is_message), default=0) if known else 0


def _is_consequence(dump: Dump) -> bool:
    """Whether a rank has failed because of another one."""
    return bool(dump.error) and _LOST.search(dump.error) is not None


# Words


def _causes(dumps: Mapping[int, Dump]) -> str:
    """What may be behind it: numbers that are not finite on some ranks alone, and what some were told differently."""
    parts = []
    odd = {rank: dump.not_finite for rank, dump in sorted(dumps.items()) if dump.not_finite}
    if odd and len(odd) < len(dumps):
        parts.append("; ".join(f"on rank {rank} alone {words}" for rank, words in odd.items()))
    for name in sorted({name for dump in dumps.values() for name in dump.facts}):
        values: dict[str, list[int]] = {}
        for rank, dump in sorted(dumps.items()):
            values.setdefault(dump.facts.get(name, "none"), []).append(rank)
        if len(values) > 1:
            common = max(values.values(), key=len)
            theirs = next(value for value, ranks in values.items() if ranks is common)
            for value, ranks in values.items():
                if ranks is not common:
                    own, usual = _around_difference(value, theirs)
                    parts.append(
                        f"{_ranks(ranks)} {_verb(ranks, 'has', 'have')} {name} {own}, where {_ranks(common)} "
                        f"{_verb(common, 'has', 'have')} {usual}"
                    )
    return "".join(f"; {part}" for part in parts)


def _around_difference(one: str, other: str) -> tuple[str, str]:
    """Two texts; of long ones, what stands where they begin to differ."""
    if max(len(one), len(other)) <= _LONG:
        return one, other
    same = next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    begin = max(0, same - _LONG // 2)
    return f"...{one[begin : begin + _LONG]}...", f"...{other[begin : begin + _LONG]}..."


def _state(dump: Dump, wait: _Wait | None) -> str:
    """What a rank is doing, in a line."""
    if dump.error:
        return f"rank {dump.rank} has failed{_when(dump)}{_at(dump.error_sites)}: {dump.error}"
    if wait is None:
        return f"rank {dump.rank} {_doing(dump)}"
    waits = f", waits for {_ranks(wait.missing)}" if wait.missing else ""
    return (
        f"rank {dump.rank} is in {wait.operation} number {wait.operation.number} of {_group(wait.communicator)}"
        f"{_at(wait.operation.sites)}{_when(dump)}{waits}"
    )


def _doing(dump: Dump) -> str:
    """What a rank is doing that waits for no operation."""
    since = f" for {dump.seconds:.0f} s" if dump.phase and dump.seconds >= 1 else ""
    words = _PHASES.get(dump.phase, "")
    if dump.doing:
        words = dump.doing
    if dump.error:
        return f"has failed{_at(dump.error_sites)}: {dump.error}"
    return f"is {f'{words}{since}, ' if words else ''}{_place_of(dump)}{_when(dump)}"


def _place_of(dump: Dump) -> str:
    """Where a rank's program is."""
    own = _first([frame for frame in dump.frames if not frame.is_foreign])
    inner = dump.frames[0] if dump.frames else None
    if inner is None:
        return "at an unknown place"
    if own is None:
        return f"at {inner.site} in {inner.function}()"
    code = f" `{own.code}`" if own.code else ""
    program = _first([frame for frame in dump.frames if not frame.is_foreign and not frame.site.startswith("par_")])
    called = f" < {program.site}" if program is not None and program is not own else ""
    return f"at {own.site}{code} in {own.function}(){called}"


def _first(frames: Sequence[Frame]) -> Frame | None:
    return frames[0] if frames else None


def _at(sites: Sequence[str]) -> str:
    """Where an operation was called: the innermost line that tells something, and that of the user's own program."""
    telling = [site for site in sites if not site.rpartition(":")[0].endswith(_PLUMBING)] or list(sites)
    if not telling:
        return ""
    program = next((site for site in telling if not site.startswith("par_")), telling[0])
    return f" at {telling[0]}" + (f" < {program}" if program != telling[0] else "")


def _when(dump: Dump) -> str:
    return "" if dump.step is None else f" (step {dump.step + 1})"


def _waiting_for(waits: Mapping[int, _Wait], ranks: Iterable[int]) -> str:
    """Who waits for some ranks, and where."""
    wanted = set(ranks)
    waiting = [wait for _, wait in sorted(waits.items()) if wait.rank not in wanted and wanted & set(wait.missing)]
    if not waiting:
        return ""
    first = waiting[0]
    alike = [wait.rank for wait in waiting if wait.communicator.label == first.communicator.label]
    return (
        f"; {_ranks(alike)} {_verb(alike, 'waits', 'wait')} in {first.operation.name} of "
        f"{_group(first.communicator)}{_at(first.operation.sites)}"
    )


def _group(communicator: Communicator) -> str:
    name = "the world" if communicator.label == "world" else f"{communicator.label} group"
    return f"{name} {_listed(communicator.ranks)}" if communicator.ranks else name


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_listed(ranks)}"


def _listed(ranks: Sequence[int]) -> str:
    """Ranks as [0, 1], or [4..7] where three or more follow each other."""
    parts: list[str] = []
    rest = list(ranks)
    while rest:
        length = 1
        while length < len(rest) and rest[length] == rest[0] + length:
            length += 1
        parts += [f"{rest[0]}..{rest[length - 1]}"] if length > 2 else [str(rank) for rank in rest[:length]]
        rest = rest[length:]
    return f"[{', '.join(parts)}]"


def _verb(ranks: Sequence[int], one: str, several: str) -> str:
    return one if len(ranks) == 1 else several
