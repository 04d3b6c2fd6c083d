"""One line that names the rank that blocks the other ranks, the place and the cause. Pure functions on dumps."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from par_groups import Communicator, Operation

from ._divergence import Divergence, find_divergence
from ._dump import Dump

_LOST = re.compile(
    r"closed by|reset by|broken pipe|timed? ?out|likely closed|ncclRemoteError|is gone, or did not answer|PeerFailed",
    re.IGNORECASE,
)
"""Texts of errors that another rank has caused."""

_PLUMBING = ("_collectives.py", "agreement.py", "vote.py")
"""Files of par that every collective passes through, so that their lines say nothing about the place."""

_LONG = 80
"""Number of characters of a fact that are shown."""

_PHASES = {
    "data": "waiting for its data",
    "checkpoint": "in a checkpoint",
    "restart": "in the beginning of the run",
    "log": "writing a line of metrics",
}


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Cause of a hang, in words.

    Args:
        line: One line with the rank, the place and the cause.
        details: One line per rank.
    """

    line: str
    details: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Wait:
    """An operation that a rank waits in, and the ranks that have not called it.

    Args:
        operation: The operation.
        key: Key of its communicator.
        communicator: The communicator.
        missing: Ranks that have not called it.
    """

    operation: Operation
    key: str
    communicator: Communicator
    missing: tuple[int, ...]


def explain(dumps: Mapping[int, Dump], world: int, absent: Mapping[int, str] | None = None) -> Explanation:
    """Find the rank that blocks the other ranks.

    These causes are tried in this order, and the first that applies is reported:

    1. A rank has failed.
    2. A rank is gone, or has ended.
    3. The ranks of a communicator call different operations.
    4. A rank has not called an operation in which the other ranks wait.
    5. Ranks wait for each other.

    Args:
        dumps: Dumps by rank.
        world: Number of ranks.
        absent: State of ranks without a dump, in words, such as "is gone".
    """
    gone = {rank: "left no dump" for rank in range(world) if rank not in dumps} | dict(absent or {})
    waits = _waits(dumps, world)
    # A failed or absent rank explains all waits, so it comes first. A divergence comes before the waits: ranks that
    # have diverged wait for each other, which looks like a circle, and the cause is an earlier operation.
    line = (
        _failed(dumps, waits)
        or _absent(gone, waits)
        or _diverged(dumps)
        or _late(dumps, waits)
        or _circle(dumps, waits)
        or _busy(dumps, waits)
    )
    details = [_state(dump, waits.get(rank)) for rank, dump in sorted(dumps.items())]
    details += [f"rank {rank} {words}" for rank, words in sorted(gone.items())]
    return Explanation(line=line + _causes(dumps), details=tuple(details))


# The causes, in the order in which they are tried. Each function returns "" if its cause does not apply.


def _failed(dumps: Mapping[int, Dump], waits: Mapping[int, _Wait]) -> str:
    """Name the rank that has failed first, unless another rank has caused its error."""
    failed = sorted(
        (dump for dump in dumps.values() if dump.error and not _is_consequence(dump)), key=lambda dump: dump.time
    )
    if not failed:
        return ""
    # Later errors of other ranks are often consequences of the first one, in words that `_LOST` does not contain.
    first = failed[0]
    same = [dump.rank for dump in failed if dump.error == first.error]
    who = f"ranks {_listed(same)} failed with the same error" if len(same) > 1 else f"rank {first.rank} failed"
    return f"{who}{_when(first)}{_at(first.error_sites)}: {first.error}{_waiting_for(waits, same)}"


def _absent(gone: Mapping[int, str], waits: Mapping[int, _Wait]) -> str:
    """Name the ranks without a dump."""
    if not gone:
        return ""
    by_words: dict[str, list[int]] = {}
    for rank, words in sorted(gone.items()):
        by_words.setdefault(words, []).append(rank)
    parts = [f"{_ranks(ranks)} {words}" for words, ranks in by_words.items()]
    return f"{'; '.join(parts)}{_waiting_for(waits, list(gone))}"


def _diverged(dumps: Mapping[int, Dump]) -> str:
    """Describe the operation in which the ranks of a communicator differ; of several, the one that began first."""
    found: list[tuple[float, str, Communicator, Divergence]] = []
    for (key, _), members in _communicators(dumps).items():
        divergence = find_divergence({rank: one.operations for rank, one in members.items()})
        if divergence is not None:
            began = min(divergence.own.began, divergence.other.began)
            found.append((began, key, members[divergence.rank], divergence))
    if not found:
        return ""
    # A rank that has diverged in one group calls wrong operations in other groups soon after.
    _, key, communicator, divergence = min(found, key=lambda item: item[0])
    own, other, rank = divergence.own, divergence.other, divergence.rank
    group, others = _group(communicator), _ranks(divergence.others)
    doubt = "" if divergence.is_sure else ", or the other way round"
    if divergence.kind == "skipped":
        return (
            f"rank {rank} never called {other.name} number {other.number} of {group}, which {others} called"
            f"{_at(other.sites)}; rank {rank} called {own.name}{_at(own.sites)} instead"
        )
    if divergence.kind == "shape":
        verb = "passes" if len(divergence.others) == 1 else "pass"
        return (
            f"rank {rank} passes {own} to number {own.number} of {group}{_at(own.sites)}, where {others} {verb} "
            f"{other}{_at(other.sites)}: the shapes differ{doubt}"
        )
    if divergence.kind == "order":
        ahead = max((_last(dumps[it], key) for it in divergence.others), default=other.number) - own.number
        further = f" ({ahead} operation{'s' if ahead > 1 else ''} ago)" if ahead > 0 else ""
        return (
            f"rank {rank} is in {own} of {group}{_at(own.sites)}, but {others} called {other.name}{_at(other.sites)} "
            f"first{further}, as rank {rank} did until now: rank {rank} skipped that call, or calls in a different "
            f"order{doubt}"
        )
    return (
        f"rank {rank} is in {own} of {group}{_at(own.sites)}, where {others} "
        f"{'is' if len(divergence.others) == 1 else 'are'} in {other}{_at(other.sites)} (number {own.number}): the "
        f"order differs, or a rank skipped a call{doubt}"
    )


def _late(dumps: Mapping[int, Dump], waits: Mapping[int, _Wait]) -> str:
    """Name a rank that waits for no rank, and that other ranks wait for."""
    for start in _in_order(dumps, waits):
        chain, is_closed = _chain(start, dumps, waits)
        # A circle is another cause. A chain of one rank ends there: it waits only for ranks without a dump.
        if is_closed or len(chain) < 2:
            continue
        root, waiter = dumps[chain[-1]], chain[-2]
        # The rank waits for a message, which is no collective, so no operation can be named.
        if waiter not in waits:
            doing = dumps[waiter].doing or _place_of(dumps[waiter])
            return f"rank {root.rank} {_doing(root)}; rank {waiter} waits for its message ({doing})"
        wait = waits[waiter]
        same = [rank for rank, one in sorted(waits.items()) if one.key == wait.key and root.rank in one.missing]
        too = [rank for rank in wait.missing if rank != root.rank and rank in dumps]
        also = f", nor {'has' if len(too) == 1 else 'have'} {_ranks(too)}" if too else ""
        return (
            f"rank {root.rank} {_doing(root)} and has not called {wait.operation.name} number "
            f"{wait.operation.number} of {_group(wait.communicator)}{also}, in which {_ranks(same)} "
            f"{_wait_verb(same)}{_at(wait.operation.sites)}"
        )
    return ""


def _circle(dumps: Mapping[int, Dump], waits: Mapping[int, _Wait]) -> str:
    """Describe ranks that wait for each other, in different communicators or for messages."""
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
        return f"{'; '.join(parts)}: they call in different orders{_changed_order(circle, dumps, waits)}"
    return ""


def _in_order(dumps: Mapping[int, Dump], waits: Mapping[int, _Wait]) -> list[int]:
    """Return the ranks that wait, the longest wait first; ranks that wait for messages last."""
    ranks = [rank for rank in dumps if rank in waits or dumps[rank].waits_for]
    return sorted(ranks, key=lambda rank: waits[rank].operation.began if rank in waits else float("inf"))


def _chain(start: int, dumps: Mapping[int, Dump], waits: Mapping[int, _Wait]) -> tuple[list[int], bool]:
    """Follow the ranks from one to the rank that it waits for.

    Returns:
        The ranks up to one that waits for no rank, and False; or the ranks of a circle, and True.
    """
    seen = [start]
    while True:
        wait = waits.get(seen[-1])
        behind = wait.missing if wait is not None else dumps[seen[-1]].waits_for
        # Any missing rank will do: the ranks behind it lead to the same end, or the next try starts from another rank.
        following = next((rank for rank in behind if rank in dumps), None)
        if following is None:
            return seen, False
        if following in seen:
            return seen[seen.index(following) :], True
        seen.append(following)


def _changed_order(circle: Sequence[int], dumps: Mapping[int, Dump], waits: Mapping[int, _Wait]) -> str:
    """Name the rank of a circle that calls in another order than before, if its own past shows it."""
    odd = []
    for rank in circle:
        if rank not in waits:
            continue
        done = sorted(
            (one for group in dumps[rank].communicators.values() for one in group.operations),
            key=lambda one: one.began,
        )
        # A loop repeats its calls: after one and the same call, the next call was the same in every step so far.
        calls = [(one.name, one.sites[:1]) for one in done if one.began <= waits[rank].operation.began]
        before, here = calls[-2:-1], calls[-1:]
        followers = [two for one, two in pairwise(calls[:-1]) if [one] == before]
        if followers and here[0] not in followers:
            odd.append(rank)
    return f"; rank {odd[0]} has changed its order" if len(odd) == 1 else ""


def _busy(dumps: Mapping[int, Dump], waits: Mapping[int, _Wait]) -> str:
    """Describe ranks that do not wait for each other."""
    common = [rank for rank, wait in waits.items() if not wait.missing]
    if common and len(common) == len(dumps):
        wait = waits[common[0]]
        return (
            f"all ranks of {_group(wait.communicator)} are in {wait.operation}{_at(wait.operation.sites)}, which does "
            "not end: the network or a device is slow or stuck"
        )
    slowest = max(dumps.values(), key=lambda dump: dump.seconds)
    if len(dumps) == 1:
        return f"rank {slowest.rank} {_doing(slowest)}"
    return f"no rank waits for another rank; rank {slowest.rank} {_doing(slowest)}"


# Ranks and the operations that they wait in


def _communicators(dumps: Mapping[int, Dump]) -> dict[tuple[str, tuple[int, ...]], dict[int, Communicator]]:
    """Return each communicator as its ranks have recorded it, by key and ranks."""
    found: dict[tuple[str, tuple[int, ...]], dict[int, Communicator]] = {}
    for rank, dump in sorted(dumps.items()):
        for key, communicator in dump.communicators.items():
            found.setdefault((key, communicator.ranks), {})[rank] = communicator
    return found


def _waits(dumps: Mapping[int, Dump], world: int) -> dict[int, _Wait]:
    """Return the oldest operation that each rank waits in."""
    last = {
        group: {rank: _last(dumps[rank], group[0]) for rank in members}
        for group, members in _communicators(dumps).items()
    }
    found: dict[int, _Wait] = {}
    for rank, dump in dumps.items():
        pending = [
            (operation, key)
            for key, communicator in dump.communicators.items()
            for operation in communicator.operations
            # A rank that lost its connection has ended its operation with an error, but it still shows where the rank
            # waited.
            if not operation.is_message and (not operation.ended or _has_failed_in(dump, operation))
        ]
        if not pending:
            continue
        # Younger operations are asynchronous, or wait on the device behind the oldest one.
        operation, key = min(pending, key=lambda item: item[0].began)
        communicator = dump.communicators[key]
        numbers = last[key, communicator.ranks]
        # A dump of torch's flight recorder may lack the ranks of a group.
        missing = tuple(
            other
            for other in communicator.ranks or range(world)
            # Collectives are numbered per communicator, so a smaller last number means that the rank has not called
            # this one.
            if other != rank and numbers.get(other, 0) < operation.number
        )
        found[rank] = _Wait(operation=operation, key=key, communicator=communicator, missing=missing)
    return found


def _has_failed_in(dump: Dump, operation: Operation) -> bool:
    """Return whether an operation is the last one of a rank whose error another rank has caused."""
    if not _is_consequence(dump):
        return False
    begun = [one for group in dump.communicators.values() for one in group.operations]
    return operation == max(begun, key=lambda one: one.began)


def _last(dump: Dump, key: str) -> int:
    """Return the number of the last collective that a rank has called in a communicator."""
    known = dump.communicators.get(key)
    return max((one.number for one in known.operations if not one.is_message), default=0) if known else 0


def _is_consequence(dump: Dump) -> bool:
    """Return whether another rank has caused the error of a rank."""
    return bool(dump.error) and _LOST.search(dump.error) is not None


# Words


def _causes(dumps: Mapping[int, Dump]) -> str:
    """Return possible causes: values that are not finite on some ranks only, and facts that differ between ranks."""
    parts = []
    odd = {rank: dump.non_finite for rank, dump in sorted(dumps.items()) if dump.non_finite}
    # A loss that is NaN on all ranks does not make them differ, so it is no reason for a hang.
    if odd and len(odd) < len(dumps):
        parts.append("; ".join(f"only on rank {rank} {words}" for rank, words in odd.items()))
    for name in sorted({name for dump in dumps.values() for name in dump.facts}):
        values: dict[str, list[int]] = {}
        for rank, dump in sorted(dumps.items()):
            values.setdefault(dump.facts.get(name, "none"), []).append(rank)
        common = max(values, key=lambda value: len(values[value]))
        for value, ranks in values.items():
            if value != common:
                own, usual = _around_difference(value, common)
                has, have = ("has" if len(them) == 1 else "have" for them in (ranks, values[common]))
                parts.append(f"{_ranks(ranks)} {has} {name} {own}, {_ranks(values[common])} {have} {usual}")
    return "".join(f"; {part}" for part in parts)


def _around_difference(one: str, other: str) -> tuple[str, str]:
    """Shorten two long texts to the part where they begin to differ."""
    if max(len(one), len(other)) <= _LONG:
        return one, other
    # Two texts without a difference in their common part differ in length only.
    same = next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    begin = max(0, same - _LONG // 2)
    return f"...{one[begin : begin + _LONG]}...", f"...{other[begin : begin + _LONG]}..."


def _state(dump: Dump, wait: _Wait | None) -> str:
    """Return one line on what a rank is doing."""
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
    """Return what a rank is doing that waits in no operation."""
    if dump.error:
        return f"has failed{_at(dump.error_sites)}: {dump.error}"
    since = f" for {dump.seconds:.0f} s" if dump.phase and dump.seconds >= 1 else ""
    words = dump.doing or _PHASES.get(dump.phase, "")
    return f"is {f'{words}{since}, ' if words else ''}{_place_of(dump)}{_when(dump)}"


def _place_of(dump: Dump) -> str:
    """Return the place of a rank's program: its innermost frame, and the innermost frame outside of par's packages."""
    if not dump.frames:
        return "at an unknown place"
    # A frame of torch or Python says little, so the line shows the innermost frame outside of libraries.
    own = next((frame for frame in dump.frames if not frame.is_library), None)
    if own is None:
        return f"at {dump.frames[0].site} in {dump.frames[0].function}()"
    code = f" `{own.code}`" if own.code else ""
    program = next((one for one in dump.frames if not one.is_library and not one.site.startswith("par_")), own)
    return f"at {own.site}{code} in {own.function}(){f' < {program.site}' if program is not own else ''}"


def _at(sites: Sequence[str]) -> str:
    """Return the place of a call: its innermost informative line, and its innermost line outside of par's packages."""
    informative = [site for site in sites if not site.rpartition(":")[0].endswith(_PLUMBING)] or list(sites)
    if not informative:
        return ""
    program = next((site for site in informative if not site.startswith("par_")), informative[0])
    return f" at {informative[0]}" + (f" < {program}" if program != informative[0] else "")


def _when(dump: Dump) -> str:
    return "" if dump.step is None else f" (step {dump.step + 1})"


def _waiting_for(waits: Mapping[int, _Wait], ranks: Iterable[int]) -> str:
    """Return which ranks wait for some ranks, and where."""
    wanted = set(ranks)
    waiting = {rank: wait for rank, wait in sorted(waits.items()) if rank not in wanted and wanted & set(wait.missing)}
    if not waiting:
        return ""
    first = next(iter(waiting.values()))
    same = [rank for rank, wait in waiting.items() if wait.key == first.key]
    return (
        f"; {_ranks(same)} {_wait_verb(same)} in {first.operation.name} of {_group(first.communicator)}"
        f"{_at(first.operation.sites)}"
    )


def _wait_verb(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def _group(communicator: Communicator) -> str:
    label = f"{communicator.label} " if communicator.label else ""
    return f"the {label}group {_listed(communicator.ranks)}" if communicator.ranks else f"the {label}group"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_listed(ranks)}"


def _listed(ranks: Sequence[int]) -> str:
    """Return ranks as [0, 1], or as [4..7] if three or more are consecutive."""
    parts: list[str] = []
    rest = list(ranks)
    while rest:
        length = 1
        while length < len(rest) and rest[length] == rest[0] + length:
            length += 1
        parts += [f"{rest[0]}..{rest[length - 1]}"] if length > 2 else [str(rank) for rank in rest[:length]]
        rest = rest[length:]
    return f"[{', '.join(parts)}]"
