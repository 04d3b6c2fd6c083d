"""Policies by name: the built-in ones, and those that other wheels provide."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from par_groups import Registry

from .gaps import Gap, gaps_of, keep_if_room, keep_soonest, placement_of, room_of
from .ledger import Placement, Sizes, simulate
from .moments import Trace

PolicyFunction = Callable[[Trace, Sizes, Mapping[str, int]], Placement]
"""From what a step needs, bytes of each unit, and bytes of each tier, to a placement."""

F = TypeVar("F", bound=PolicyFunction)

POLICIES: Registry[PolicyFunction] = Registry("policy", "par_zero.policies")

_UNLIMITED = 1 << 62
"""Bytes of a host that no budget names."""


def register_policy(name: str) -> Callable[[F], F]:
    """Registers a policy of `place` under `name`, as a decorator.

    The function is called as `function(trace, sizes, budget)`, with bytes by unit and bytes by tier, and returns a
    `Placement`, which `place` goes through before it is used. A separate wheel can provide one without being imported:
    an entry point `name = "module:function"` in the group `par_zero.policies`.

    Raises:
        ValueError: The name is taken; the message names both owners.

    Example:
        >>> @register_policy("as static, with a tenth of the device free")
        ... def careful(trace: Trace, sizes: Mapping[str, int], budget: Mapping[str, int]) -> Placement:
        ...     return place(trace, sizes, {**budget, "device": budget["device"] * 9 // 10}, policy="static")
    """

    def register(function: F) -> F:
        POLICIES.register(name, function)
        return function

    return register


@register_policy("behind")
def behind(trace: Trace, sizes: Sizes, budget: Mapping[str, int]) -> Placement:
    """Drops a unit as soon as the next begins, and fetches one ahead where there is room."""
    room = room_of(trace, sizes, budget["device"])
    return placement_of(trace, sizes, _needed_still(gaps_of(trace, sizes)), room, _homes(budget))


@register_policy("static")
def static(trace: Trace, sizes: Sizes, budget: Mapping[str, int]) -> Placement:
    """Keeps the first units for which there is room at the fullest moment, beside those in use and the next."""
    gaps = gaps_of(trace, sizes)
    kept = _needed_still(gaps)
    by_unit: dict[str, list[Gap]] = {}
    for gap in gaps:
        by_unit.setdefault(gap.unit, []).append(gap)
    room = room_of(trace, sizes, budget["device"])
    spare = room.clone()  # beside what is needed at a moment and at the next
    for number, (moment, after) in enumerate(zip(trace.moments, trace.moments[1:], strict=False)):
        spare[number] -= sum(sizes[unit] for unit in after.needs if unit not in moment.needs)
    uses: dict[str, set[int]] = {}
    for number, moment in enumerate(trace.moments):
        for unit in moment.needs:
            uses.setdefault(unit, set()).update((number, max(number - 1, 0)))
    for unit, numbers in uses.items():  # in the order in which they are needed first
        beside = spare - sizes[unit]
        beside[sorted(numbers)] += sizes[unit]
        if int(beside.min()) >= 0:
            spare = beside
            kept += [gap for gap in by_unit.get(unit, ()) if gap.length]
    return placement_of(trace, sizes, kept, room, _homes(budget))


@register_policy("next_use")
def next_use(trace: Trace, sizes: Sizes, budget: Mapping[str, int]) -> Placement:
    """Keeps what is needed soonest in the room that each moment has; or does as "static", where that moves less.

    Of units of one size nothing moves less. Of others the least is a problem for which only searches are known that
    take exponential time, so it is the best of three ways: by when a unit is needed, by how long it waits, by its size.
    """
    gaps = gaps_of(trace, sizes)
    room = room_of(trace, sizes, budget["device"])
    by_length = sorted(gaps, key=lambda gap: (gap.length, -gap.size))
    by_size = sorted(gaps, key=lambda gap: (-gap.size, gap.length))
    soonest = keep_soonest(gaps, room)
    ways = [keep_if_room(by_length, room, soonest), keep_if_room(by_length, room), keep_if_room(by_size, room)]
    kept = max(ways, key=lambda way: sum(gap.size for gap in way))
    placements = [placement_of(trace, sizes, kept, room, _homes(budget)), static(trace, sizes, budget)]
    return min(placements, key=lambda placement: sum(simulate(trace, sizes, placement).moved.values()))


def _needed_still(gaps: list[Gap]) -> list[Gap]:
    """The gaps without a moment in them: of a unit that the next moment needs too."""
    return [gap for gap in gaps if not gap.length]


def _homes(budget: Mapping[str, int]) -> list[tuple[str, int]]:
    """The tiers that units are fetched from, the quickest first: the host alone, unless more are named."""
    named = [(tier, bytes_) for tier, bytes_ in budget.items() if tier != "device"]
    return named or [("host", _UNLIMITED)]
