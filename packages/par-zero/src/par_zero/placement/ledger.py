"""A placement, and what it moves: gone through moment by moment."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from .moments import Trace

Sizes = Mapping[str, int]
"""Bytes of each unit that is whole, by name."""

Move = tuple[str, str]
"""A unit, and the tier it goes to: the device, to be fetched; any other, to be dropped from the device."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where units lie, and what is moved at each moment.

    Args:
        home: The tier of each unit from which it is fetched.
        moves: For each moment what is moved when it begins, in that order. What is dropped is gone at once; what is
            fetched takes its room from then on.
    """

    home: Mapping[str, str]
    moves: tuple[tuple[Move, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """What a placement moves, takes and lacks.

    Args:
        moved: Bytes by the tiers from which and to which they went.
        fetched: How often each unit was fetched.
        peak: Most bytes by tier. On the device with what is no parameter.
        missing: The moments whose units are not all there, by number.
    """

    moved: Mapping[tuple[str, str], int]
    fetched: Mapping[str, int]
    peak: Mapping[str, int]
    missing: tuple[int, ...]


def simulate(trace: Trace, sizes: Sizes, placement: Placement) -> Ledger:
    """Goes through a step. Before it nothing is on the device, and each step drops what is there, as it is out of date.

    Args:
        trace: What the step needs.
        sizes: Bytes of each unit.
        placement: Where units lie, and what is moved.

    Raises:
        ValueError: The placement is of another number of moments.
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
