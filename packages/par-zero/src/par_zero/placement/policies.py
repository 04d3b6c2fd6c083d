"""Placement policies by name: the built-in policies, and a registry for policies of other packages."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from par_groups import Registry

from .gaps import Gap, gaps_of, keep_if_room, keep_soonest, placement_of, room_of
from .ledger import Placement, Sizes, simulate
from .moments import Trace

PolicyFunction = Callable[[Trace, Sizes, Mapping[str, int]], Placement]
"""Function of a trace, the bytes of each unit and the bytes of each tier. It returns a placement."""

F = TypeVar("F", bound=PolicyFunction)

POLICIES: Registry[PolicyFunction] = Registry("policy", "par_zero.policies")

_UNLIMITED = 1 << 62
"""Bytes of the host if the budget does not contain the host."""


def register_policy(name: str) -> Callable[[F], F]:
    """Register a policy of `place`, as a decorator.

    The function is called as `function(trace, sizes, budget)`, with bytes by unit and bytes by tier. It returns a
    `Placement`, which `place` checks before it is used. A separate package can provide a policy without an import, by
    an entry point `name = "module:function"` in the group `par_zero.policies`.

    Args:
        name: Name of the policy, which `place(policy=...)` receives.

    Raises:
        ValueError: The name is taken. The message names both owners.

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
    """Drop a unit as soon as the next unit begins, and prefetch one unit if it fits."""
    room = room_of(trace, sizes, budget["device"])
    return placement_of(trace, sizes, _needed_still(gaps_of(trace, sizes)), room, _homes(budget))


@register_policy("static")
def static(trace: Trace, sizes: Sizes, budget: Mapping[str, int]) -> Placement:
    """Keep the first units that fit for the complete step, in addition to the units in use and the next unit."""
    gaps = gaps_of(trace, sizes)
    kept = _needed_still(gaps)
    by_unit: dict[str, list[Gap]] = {}
    for gap in gaps:
        by_unit.setdefault(gap.unit, []).append(gap)
    room = room_of(trace, sizes, budget["device"])
    # Also without the units of the next moment, so that kept units never prevent the prefetch of the next unit.
    spare = room.clone()
    for number, (moment, after) in enumerate(zip(trace.moments, trace.moments[1:], strict=False)):
        spare[number] -= sum(sizes[unit] for unit in after.needs if unit not in moment.needs)
    uses: dict[str, set[int]] = {}
    for number, moment in enumerate(trace.moments):
        for unit in moment.needs:
            uses.setdefault(unit, set()).update((number, max(number - 1, 0)))
    # In the order in which the units are needed first.
    for unit, numbers in uses.items():
        # `spare` excludes the unit's own bytes already at the moments that need or prefetch it.
        beside = spare - sizes[unit]
        beside[sorted(numbers)] += sizes[unit]
        if int(beside.min()) >= 0:
            spare = beside
            kept += [gap for gap in by_unit.get(unit, ()) if gap.length]
    return placement_of(trace, sizes, kept, room, _homes(budget))


@register_policy("next_use")
def next_use(trace: Trace, sizes: Sizes, budget: Mapping[str, int]) -> Placement:
    """Keep the units that are needed soonest, as far as each moment has memory. Use "static" if it moves fewer bytes.

    For units of equal size, no placement moves fewer bytes. For units of different sizes, all known exact algorithms
    take exponential time. The policy therefore uses the best of three orders: by next use, by length of the gap, and by
    size of the unit.
    """
    gaps = gaps_of(trace, sizes)
    room = room_of(trace, sizes, budget["device"])
    by_length = sorted(gaps, key=lambda gap: (gap.length, -gap.size))
    by_size = sorted(gaps, key=lambda gap: (-gap.size, gap.length))
    soonest = keep_soonest(gaps, room)
    ways = [keep_if_room(by_length, room, soonest), keep_if_room(by_length, room), keep_if_room(by_size, room)]
    kept = max(ways, key=lambda way: sum(gap.size for gap in way))
    # For units of different sizes none of the three orders is optimal, so "static" may still move fewer bytes.
    placements = [placement_of(trace, sizes, kept, room, _homes(budget)), static(trace, sizes, budget)]
    return min(placements, key=lambda placement: sum(simulate(trace, sizes, placement).moved.values()))


def _needed_still(gaps: list[Gap]) -> list[Gap]:
    """Return the gaps of length 0: the next moment needs the unit, too."""
    return [gap for gap in gaps if not gap.length]


def _homes(budget: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return the tiers from which units are fetched, the fastest first. The default is an unlimited host."""
    named = [(tier, bytes_) for tier, bytes_ in budget.items() if tier != "device"]
    return named or [("host", _UNLIMITED)]
