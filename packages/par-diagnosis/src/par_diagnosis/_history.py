"""What the ranks of one communicator have done differently, found in the records of their operations. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from par_groups import Operation

_UNEQUAL = frozenset({"all_to_all", "alltoall", "gather", "scatter"})
"""Operations to which ranks may bring different amounts."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first operation at which a rank has done something else than the others.

    Args:
        rank: The rank.
        kind: "shape": it brings another amount; "order": it has called `own` before, or without, `other`; "skipped":
            it has never called `other`; "operation": it has called something else.
        own: What this rank has called.
        other: What the others have called.
        others: The ranks that have.
        is_sure: Whether it is known which of the ranks is the odd one: there is a majority, or the rank's own past
            tells.
    """

    rank: int
    kind: str
    own: Operation
    other: Operation
    others: tuple[int, ...]
    is_sure: bool


def find_difference(by_rank: Mapping[int, Sequence[Operation]]) -> Difference | None:
    """The first operation in which the ranks of a communicator do not agree; None if they do, as far as is known.

    Args:
        by_rank: The operations of each rank, oldest first; messages from rank to rank are left out.
    """
    numbered = {rank: {one.number: one for one in done if not one.is_message} for rank, done in by_rank.items() if done}
    numbered = {rank: done for rank, done in numbered.items() if done}
    if len(numbered) < 2:
        return None
    first, last = max(min(done) for done in numbered.values()), min(max(done) for done in numbered.values())
    for number in range(first, last + 1):
        at = {rank: done[number] for rank, done in numbered.items() if number in done}
        if len({_key(one) for one in at.values()}) > 1:
            return _named(number, at, numbered)
        if len({_place(one) for one in at.values()}) > 1 and (skipped := _skipped(number, at, numbered)):
            return skipped
    return None


def _key(one: Operation) -> object:
    """What all ranks must have alike in an operation."""
    return one.name if one.name in _UNEQUAL else (one.name, one.elements, one.dtypes)


def _place(one: Operation) -> object:
    return one.name, one.elements, one.sites[:1]


def _named(number: int, at: Mapping[int, Operation], numbered: Mapping[int, Mapping[int, Operation]]) -> Difference:
    """Which rank is the odd one, and in what, where operations of one number differ."""
    counts = Counter(_key(one) for one in at.values())
    (common, most), *rest = counts.most_common()
    has_majority = most > 1 and (not rest or rest[0][1] < most)
    odd = [rank for rank, one in at.items() if _key(one) != common]
    is_sure = has_majority
    if not has_majority:  # who has done now what it never did before?
        unusual = [rank for rank, done in numbered.items() if rank in at and _is_unusual(done, number)]
        is_sure = len(unusual) == 1
        odd = unusual if is_sure else odd
    rank = odd[0]
    own = at[rank]
    others = tuple(sorted(other for other, one in at.items() if _key(one) != _key(own)))
    other = at[others[0]]
    if own.name == other.name:
        kind = "shape"
    elif _came_before(numbered[rank], number, other, own):
        kind = "order"
    else:
        kind = "operation"
    return Difference(rank=rank, kind=kind, own=own, other=other, others=others, is_sure=is_sure)


def _is_unusual(done: Mapping[int, Operation], number: int) -> bool:
    """Whether a rank has done here what it never did before: after that one, or with that amount at that place."""
    here = done[number]
    earlier = [one for place, one in done.items() if place < number]
    same_place = [one for one in earlier if one.sites[:1] == here.sites[:1] and one.name == here.name]
    if same_place and all(one.elements != here.elements for one in same_place):
        return True
    usual = _usual(done, number)
    return bool(usual) and _place(here) not in usual


def _usual(done: Mapping[int, Operation], number: int) -> list[object]:
    """What a rank has gone on to in its past from where it was right before that number."""
    if number - 1 not in done:
        return []
    before = _place(done[number - 1])
    earlier = [one for place, one in done.items() if place < number]
    return [_place(two) for one, two in pairwise(earlier) if _place(one) == before]


def _came_before(done: Mapping[int, Operation], number: int, first: Operation, second: Operation) -> bool:
    """Whether a rank's past has `first` right before `second`."""
    past = [one for place, one in done.items() if place < number]
    return any(_place(one) == _place(first) and _place(two) == _place(second) for one, two in pairwise(past))


def _skipped(
    number: int, at: Mapping[int, Operation], numbered: Mapping[int, Mapping[int, Operation]]
) -> Difference | None:
    """What a rank has left out, where the operation that it has come to instead fits the others' by accident.

    The places of the calls tell: the others have done what this rank always did at this point, too; or, of a rank
    without such a past, what it has done fits what the others have done one later. Ranks that call from different lines
    of the program by design are not blamed.
    """
    for rank, own in at.items():
        others = tuple(sorted(other for other, one in at.items() if _place(one) != _place(own)))
        ahead = numbered[others[0]]
        left_out = ahead[number]
        usual = _usual(numbered[rank], number)
        if usual:
            is_odd = _place(own) not in usual and _place(left_out) in usual
        else:
            mine = [_place(numbered[rank][n]) for n in range(number, number + 3) if n in numbered[rank]]
            theirs = [_place(ahead[n + 1]) for n in range(number, number + len(mine)) if n + 1 in ahead]
            is_odd = theirs == mine[: len(theirs)] and len(theirs) >= max(1, len(mine) - 1)
            is_odd = is_odd and not _usual(ahead, number)
        if is_odd:
            return Difference(rank=rank, kind="skipped", own=own, other=left_out, others=others, is_sure=True)
    return None
