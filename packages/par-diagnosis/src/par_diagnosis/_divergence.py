"""The first operation in which the ranks of a communicator differ. Pure functions on their recorded operations."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from par_groups import Operation

_UNEQUAL = frozenset({"all_to_all", "alltoall", "gather", "scatter"})
"""Operations whose input may have another size on each rank."""


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """The first operation in which one rank differs from the other ranks.

    Args:
        rank: The rank that differs.
        kind: "shape": the rank passes another number of elements. "order": the rank has called `own` before or without
            `other`. "skipped": the rank has not called `other`. "operation": the rank has called something else.
        own: Operation of this rank.
        other: Operation of the other ranks at the same number.
        others: Ranks that have called `other`.
        is_sure: Whether the guilty rank is certain, by a majority of ranks or by the earlier operations of the rank.
    """

    rank: int
    kind: str
    own: Operation
    other: Operation
    others: tuple[int, ...]
    is_sure: bool


def find_divergence(by_rank: Mapping[int, Sequence[Operation]]) -> Divergence | None:
    """Return the first operation in which the ranks of a communicator differ, or None.

    Args:
        by_rank: Operations of each rank, oldest first. Sends and receives are ignored.
    """
    numbered = {rank: {one.number: one for one in done if not one.is_message} for rank, done in by_rank.items() if done}
    # A rank with messages only has no collectives to compare.
    numbered = {rank: done for rank, done in numbered.items() if done}
    if len(numbered) < 2:
        return None
    # A rank that was first to drop old entries of the recorder, or has called less, cannot be compared beyond its own.
    first, last = max(min(done) for done in numbered.values()), min(max(done) for done in numbered.values())
    for number in range(first, last + 1):
        at = {rank: done[number] for rank, done in numbered.items() if number in done}
        if len({_signature(one) for one in at.values()}) > 1:
            return _different_operations(number, at, numbered)
        # Equal operations from different lines are suspicious only; a rank may use other lines by design.
        if len({_call(one) for one in at.values()}) > 1 and (skipped := _skipped(number, at, numbered)):
            return skipped
    return None


def _signature(one: Operation) -> object:
    """Return what must be identical on all ranks."""
    return one.name if one.name in _UNEQUAL else (one.name, one.elements, one.dtypes)


def _call(one: Operation) -> object:
    """Return what identifies a call of the program: name, size and innermost call site."""
    return one.name, one.elements, one.sites[:1]


def _different_operations(
    number: int, at: Mapping[int, Operation], numbered: Mapping[int, Mapping[int, Operation]]
) -> Divergence:
    """Find the guilty rank among ranks that have different operations at one number."""
    counts = Counter(_signature(one) for one in at.values())
    (common, most), *rest = counts.most_common()
    is_sure = most > 1 and (not rest or rest[0][1] < most)
    odd = [rank for rank, one in at.items() if _signature(one) != common]
    if not is_sure:  # without a majority, the rank that has deviated from its own past is guilty
        unusual = [rank for rank, done in numbered.items() if rank in at and _is_unusual(done, number)]
        is_sure = len(unusual) == 1
        odd = unusual if is_sure else odd
    rank = odd[0]
    own = at[rank]
    others = tuple(sorted(other for other, one in at.items() if _signature(one) != _signature(own)))
    other = at[others[0]]
    # If the rank has called both operations in the other order before, it has skipped one or swapped them.
    past = [_call(one) for earlier, one in numbered[rank].items() if earlier < number]
    if own.name == other.name:
        kind = "shape"
    elif (_call(other), _call(own)) in pairwise(past):
        kind = "order"
    else:
        kind = "operation"
    return Divergence(rank=rank, kind=kind, own=own, other=other, others=others, is_sure=is_sure)


def _is_unusual(done: Mapping[int, Operation], number: int) -> bool:
    """Return whether an operation differs from the earlier operations of the same rank."""
    here = done[number]
    earlier = [one for place, one in done.items() if place < number]
    same_call = [one for one in earlier if (one.name, one.sites[:1]) == (here.name, here.sites[:1])]  # of any size
    # The same line has never passed this size, so this rank and not the other ranks has changed.
    if same_call and all(one.elements != here.elements for one in same_call):
        return True
    usual = _usual(done, number)
    return bool(usual) and _call(here) not in usual


def _usual(done: Mapping[int, Operation], number: int) -> list[object]:
    """Return the calls that have followed the preceding call until now."""
    if number - 1 not in done:
        return []
    before = _call(done[number - 1])
    earlier = [one for place, one in done.items() if place < number]
    return [_call(two) for one, two in pairwise(earlier) if _call(one) == before]


def _skipped(
    number: int, at: Mapping[int, Operation], numbered: Mapping[int, Mapping[int, Operation]]
) -> Divergence | None:
    """Find a rank that has skipped a call, although its next call has the same signature.

    The call sites show it. Either the other ranks have called what this rank always called at this point, or, if the
    rank has no such past, its calls match the calls of the other ranks one position later. A program whose ranks call
    from different lines by design has neither.
    """
    for rank, own in at.items():
        others = tuple(sorted(other for other, one in at.items() if _call(one) != _call(own)))
        ahead = numbered[others[0]]
        usual = _usual(numbered[rank], number)
        if usual:
            is_odd = _call(own) not in usual and _call(ahead[number]) in usual
        else:
            mine = [_call(numbered[rank][n]) for n in range(number, number + 3) if n in numbered[rank]]
            # Three calls are compared, because one equal call happens by chance in a loop over equal layers.
            theirs = [_call(ahead[n + 1]) for n in range(number, number + len(mine)) if n + 1 in ahead]
            is_odd = theirs == mine[: len(theirs)] and len(theirs) >= max(1, len(mine) - 1)
            is_odd = is_odd and not _usual(ahead, number)
        if is_odd:
            return Divergence(rank=rank, kind="skipped", own=own, other=ahead[number], others=others, is_sure=True)
    return None
