"""A placement of units, and a simulation that counts what it moves."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from .moments import Trace

Sizes = Mapping[str, int]
"""Bytes of each gathered unit, by name."""

Move = tuple[str, str]
"""A unit and a tier. The tier "device" means that the unit is fetched. Another tier means that it is dropped."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The home tiers of units, and the moves at each moment.

    Args:
        home: Tier from which each unit is fetched, by name of the unit.
        moves: Moves when a moment begins, in order, one tuple per moment. A dropped unit frees its memory at once. A
            fetched unit takes memory from this moment on.
    """

    home: Mapping[str, str]
    moves: tuple[tuple[Move, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """The result of a simulated placement: moved bytes, memory and missing units.

    Args:
        moved: Bytes, by pair of source tier and target tier.
        fetched: Number of fetches of each unit, by name.
        peak: Peak bytes, by tier. The device includes the bytes that are not parameters.
        missing: Numbers of the moments that lack a unit.
    """

    moved: Mapping[tuple[str, str], int]
    fetched: Mapping[str, int]
    peak: Mapping[str, int]
    missing: tuple[int, ...]


def simulate(trace: Trace, sizes: Sizes, placement: Placement) -> Ledger:
    """Simulate a placement over a step, from a device without units.

    A step of the optimizer drops all units from the device, because they are out of date.

    Args:
        trace: Trace of the step.
        sizes: Bytes of each unit, by name.
        placement: Placement to simulate.

    Raises:
        ValueError: The placement was made for another number of moments.
    """
    if len(placement.moves) != len(trace.moments):
        raise ValueError(
            f"the placement has moves of {len(placement.moves)} moments, and the trace has {len(trace.moments)}; give "
            "the trace that it was made of"
        )
    moved: Counter[tuple[str, str]] = Counter()
    fetched: Counter[str] = Counter()
    peak: Counter[str] = Counter()
    missing = []
    # A unit takes memory in its home tier all the time, also while a copy of it is on the device.
    for unit, tier in placement.home.items():
        peak[tier] += sizes[unit]
    there: set[str] = set()
    taken = 0
    for number, (moment, moves) in enumerate(zip(trace.moments, placement.moves, strict=True)):
        for unit, tier in moves:
            if tier == "device" and unit not in there:
                there.add(unit)
                taken += sizes[unit]
                moved[placement.home[unit], tier] += sizes[unit]
                fetched[unit] += 1
            elif tier != "device" and unit in there:
                there.remove(unit)
                taken -= sizes[unit]
        if moment.kind == "step":
            there.clear()
            taken = 0
        peak["device"] = max(peak["device"], moment.other + taken)
        if not there.issuperset(moment.needs):
            missing.append(number)
    return Ledger(moved=dict(moved), fetched=dict(fetched), peak=dict(peak), missing=tuple(missing))
