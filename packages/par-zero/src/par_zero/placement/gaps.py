"""Gaps: of a unit between two moments that need it, and the moves that follow from which gaps it stays through.

A unit that stays through a gap takes its room at all moments of the gap, and need not be fetched at its end. Nothing
stays through a step of the optimizer. So a placement moves least if the gaps it keeps have the most bytes, while at no
moment they are more than what the budget leaves beside the units in use.
"""

from collections.abc import Collection, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import torch

from par_groups import format_bytes

from .ledger import Move, Placement, Sizes
from .moments import Trace


class Gap(NamedTuple):
    """A unit between two moments that need it.

    Args:
        unit: The unit.
        first: The moment before the gap, by number.
        then: The moment after it.
        size: Bytes of the unit.
    """

    unit: str
    first: int
    then: int
    size: int

    @property
    def length(self) -> int:
        """Number of moments in the gap; with none the unit is needed at neighbouring moments."""
        return self.then - self.first - 1


def gaps_of(trace: Trace, sizes: Sizes) -> list[Gap]:
    """All gaps, in the order of their ends. What a step is between is none."""
    found = []
    latest: dict[str, int] = {}
    for number, moment in enumerate(trace.moments):
        if moment.kind == "step":
            latest.clear()
        for unit in moment.needs:
            if unit in latest:
                found.append(Gap(unit, latest[unit], number, sizes[unit]))
            latest[unit] = number
    return found


def room_of(trace: Trace, sizes: Sizes, budget: int) -> torch.Tensor:
    """Bytes that the budget leaves at each moment beside what it needs, as int64."""
    return torch.tensor(
        [budget - moment.other - sum(sizes[unit] for unit in moment.needs) for moment in trace.moments],
        dtype=torch.int64,
    )


def keep_soonest(gaps: Sequence[Gap], room: torch.Tensor) -> list[Gap]:
    """The gaps that are kept if, wherever there is too little room, that goes which is needed last.

    Of units of one size no choice keeps more, whatever room each moment has: where there is too little, one of the gaps
    there must go, all of them have begun, and the one that ends last is in the way of later ones for longest.

    Args:
        gaps: All gaps.
        room: Bytes for them at each moment.
    """
    kept = set(gaps)
    begins: list[list[Gap]] = [[] for _ in range(len(room))]
    for gap in gaps:
        if gap.length:
            begins[gap.first + 1].append(gap)
    ends: list[list[Gap]] = [[] for _ in range(len(room))]
    latest: list[tuple[int, int, Gap]] = []
    taken = 0
    for number, left in enumerate(room.tolist()):
        for gap in ends[number]:
            taken -= gap.size if gap in kept else 0
        for gap in begins[number]:
            taken += gap.size
            ends[gap.then].append(gap)
            heappush(latest, (-gap.then, -gap.size, gap))
        while taken > left:
            gap = heappop(latest)[-1]
            kept.remove(gap)
            taken -= gap.size
    return [gap for gap in gaps if gap in kept]


def keep_if_room(gaps: Sequence[Gap], room: torch.Tensor, kept: Collection[Gap] = ()) -> list[Gap]:
    """Keeps each gap, one after the other, for which there is room at all of its moments.

    Args:
        gaps: All gaps; the first ones have their choice.
        room: Bytes for them at each moment.
        kept: Gaps that are kept anyway.
    """
    left = room.clone()
    for gap in kept:
        left[gap.first + 1 : gap.then] -= gap.size
    found = list(kept)
    for gap in gaps:
        within = left[gap.first + 1 : gap.then]
        if gap not in kept and (not gap.length or int(within.min()) >= gap.size):
            within -= gap.size
            found.append(gap)
    return found


def placement_of(
    trace: Trace, sizes: Sizes, kept: Collection[Gap], room: torch.Tensor, home: Sequence[tuple[str, int]]
) -> Placement:
    """The moves of a step in which some gaps are kept.

    A unit is dropped at the first moment that neither needs it nor lies in a gap that is kept. It is fetched a moment
    before it is needed, where there is room then.

    Args:
        trace: What the step needs.
        sizes: Bytes of each unit.
        kept: The gaps through which a unit stays.
        room: Bytes at each moment beside what it needs.
        home: The tiers that units are fetched from, the quickest first, with how many bytes they have room for.

    Raises:
        ValueError: The tiers have too little room.
    """
    stays = {(gap.unit, gap.then) for gap in kept}
    left = room.clone()
    for gap in kept:
        left[gap.first + 1 : gap.then] -= gap.size
    free = left.tolist()
    fetches: list[list[str]] = [[] for _ in trace.moments]
    fetched = dict.fromkeys(sizes, 0)
    ends: list[list[str]] = [[] for _ in trace.moments]  # the units whose stay ends with that moment
    goes_on = {(gap.unit, gap.first) for gap in kept}
    for number, moment in enumerate(trace.moments):
        for unit in moment.needs:
            if (unit, number) not in goes_on:
                ends[number].append(unit)
            if (unit, number) in stays:
                continue
            fetched[unit] += 1
            early = number - 1
            if early >= 0 and trace.moments[early].kind != "step" and free[early] >= sizes[unit]:
                free[early] -= sizes[unit]
                fetches[early].append(unit)
            else:
                fetches[number].append(unit)
    homes = home_of(sizes, fetched, home)
    moves: list[tuple[Move, ...]] = []
    for number, moment in enumerate(trace.moments):
        dropped = ends[number - 1] if number else []
        own = [unit for unit in fetches[number] if unit in moment.needs]
        ahead = [unit for unit in fetches[number] if unit not in moment.needs]
        moves.append((*((unit, homes[unit]) for unit in dropped), *((unit, "device") for unit in (*own, *ahead))))
    return Placement(home=homes, moves=tuple(moves))


def home_of(sizes: Sizes, fetched: Sizes, tiers: Sequence[tuple[str, int]]) -> dict[str, str]:
    """The tier of each unit from which it is fetched: those that are fetched most lie nearest.

    Args:
        sizes: Bytes of each unit.
        fetched: How often each is fetched.
        tiers: The tiers, the quickest first, with how many bytes they have room for.

    Raises:
        ValueError: They have too little room.
    """
    left = dict(tiers)
    home = {}
    for unit in sorted(sizes, key=lambda unit: -fetched[unit]):
        tier = next((tier for tier in left if left[tier] >= sizes[unit]), None)
        if tier is None:
            rooms = " and ".join(f"{format_bytes(room)} of the {tier}" for tier, room in tiers)
            raise ValueError(
                f"the budget has {rooms}, and all units have {format_bytes(sum(sizes.values()))}, each in one tier; "
                "give more, or name the disk too"
            )
        left[tier] -= sizes[unit]
        home[unit] = tier
    return {unit: home[unit] for unit in sizes}
