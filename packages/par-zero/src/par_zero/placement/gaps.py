"""Gaps between two moments that need the same unit, and the moves that follow from the kept gaps.

A unit that stays through a gap takes memory at all moments of the gap, and need not be fetched at its end. No unit
stays through a step of the optimizer. A placement therefore moves the fewest bytes if its kept gaps have the most
bytes. At each moment, the kept gaps must fit into the memory that the budget leaves besides the units in use.
"""

from collections.abc import Collection, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import torch

from par_groups import format_bytes

from .ledger import Move, Placement, Sizes
from .moments import Trace


class Gap(NamedTuple):
    """The span between two consecutive moments that need one unit.

    Args:
        unit: Name of the unit.
        first: Number of the moment before the gap.
        then: Number of the moment after the gap.
        size: Bytes of the unit.
    """

    unit: str
    first: int
    then: int
    size: int

    @property
    def length(self) -> int:
        """Number of moments within the gap; 0 if neighbouring moments need the unit."""
        return self.then - self.first - 1


def gaps_of(trace: Trace, sizes: Sizes) -> list[Gap]:
    """Return all gaps of a trace, in the order of their ends. No gap contains a step of the optimizer.

    Args:
        trace: Trace of a step.
        sizes: Bytes of each unit, by name.
    """
    found = []
    latest: dict[str, int] = {}
    for number, moment in enumerate(trace.moments):
        # A step makes gathered parameters out of date, so a unit cannot stay through it.
        if moment.kind == "step":
            latest.clear()
        for unit in moment.needs:
            if unit in latest:
                found.append(Gap(unit, latest[unit], number, sizes[unit]))
            latest[unit] = number
    return found


def room_of(trace: Trace, sizes: Sizes, budget: int) -> torch.Tensor:
    """Return the bytes that the budget leaves at each moment besides the units and other bytes of the moment.

    Args:
        trace: Trace of a step.
        sizes: Bytes of each unit, by name.
        budget: Bytes of the device.

    Returns:
        A tensor of int64, one number per moment. A negative number means that the moment does not fit.
    """
    return torch.tensor(
        [budget - moment.other - sum(sizes[unit] for unit in moment.needs) for moment in trace.moments],
        dtype=torch.int64,
    )


def keep_soonest(gaps: Sequence[Gap], room: torch.Tensor) -> list[Gap]:
    """Return the gaps that remain if, at each moment without enough memory, the gaps that end last are dropped.

    For units of equal size, no other choice keeps more gaps, for any memory per moment. If a moment has too little
    memory, one of its gaps must be dropped. All these gaps have begun, and the gap that ends last would take memory
    from later gaps for the longest time.

    Args:
        gaps: All gaps.
        room: Bytes that are available for gaps, one number per moment.
    """
    kept = set(gaps)
    begins: list[list[Gap]] = [[] for _ in range(len(room))]
    for gap in gaps:
        if gap.length:
            begins[gap.first + 1].append(gap)
    ends: list[list[Gap]] = [[] for _ in range(len(room))]
    # A heap of the gaps that have begun: the latest end first, then the largest. Gaps that have ended need not be
    # removed: they sort behind all open gaps, so they are popped only when no open gap is left to drop.
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
    """Return the gaps that a greedy choice keeps: each gap that fits at all of its moments, in order.

    Args:
        gaps: All gaps, in the order of their priority.
        room: Bytes that are available for gaps, one number per moment.
        kept: Gaps that are kept in any case. Default: none.
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
    """Return the placement that follows from the kept gaps.

    A unit is dropped at the first moment that neither needs it nor belongs to a kept gap. It is fetched one moment
    before it is needed if it fits then, so that the fetch overlaps with that moment.

    Args:
        trace: Trace of a step.
        sizes: Bytes of each unit, by name.
        kept: Gaps through which a unit stays on the device.
        room: Bytes that are available besides the needs of a moment, one number per moment.
        home: Tiers from which units are fetched, the fastest first, each with its capacity in bytes.

    Raises:
        ValueError: The tiers have too little capacity for all units.
    """
    stays = {(gap.unit, gap.then) for gap in kept}
    left = room.clone()
    for gap in kept:
        left[gap.first + 1 : gap.then] -= gap.size
    free = left.tolist()
    fetches: list[list[str]] = [[] for _ in trace.moments]
    fetched = dict.fromkeys(sizes, 0)
    ends: list[list[str]] = [[] for _ in trace.moments]  # units that are dropped after each moment
    goes_on = {(gap.unit, gap.first) for gap in kept}
    for number, moment in enumerate(trace.moments):
        for unit in moment.needs:
            if (unit, number) not in goes_on:
                ends[number].append(unit)
            if (unit, number) in stays:
                continue
            fetched[unit] += 1
            # Not before a step of the optimizer: it would make the fetched parameters out of date.
            early = number - 1
            if early >= 0 and trace.moments[early].kind != "step" and free[early] >= sizes[unit]:
                free[early] -= sizes[unit]
                fetches[early].append(unit)
            else:
                fetches[number].append(unit)
    homes = home_of(sizes, fetched, home)
    moves: list[tuple[Move, ...]] = []
    for number, moment in enumerate(trace.moments):
        # Drops come first: they make space for the fetches. Units of this moment are fetched before prefetched units.
        dropped = ends[number - 1] if number else []
        own = [unit for unit in fetches[number] if unit in moment.needs]
        ahead = [unit for unit in fetches[number] if unit not in moment.needs]
        moves.append((*((unit, homes[unit]) for unit in dropped), *((unit, "device") for unit in (*own, *ahead))))
    return Placement(home=homes, moves=tuple(moves))


def home_of(sizes: Sizes, fetched: Sizes, tiers: Sequence[tuple[str, int]]) -> dict[str, str]:
    """Assign a tier to each unit. The units that are fetched most often get the fastest tier.

    Args:
        sizes: Bytes of each unit, by name.
        fetched: Number of fetches of each unit, by name.
        tiers: Tiers, the fastest first, each with its capacity in bytes.

    Raises:
        ValueError: The tiers have too little capacity for all units.
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
