"""Selection of the items that save most time within a budget of bytes.

    items, best seconds a byte first     1 1 1 1 1 1 1 ? ? ? ? ? ? ? ? 0 0 0 0
                                         taken         tried exactly   left

Taking the best first is right but for the last bytes. Therefore the items around the first one that does not fit are
compared exactly, in every set that is not worse in both bytes and seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

EXACT = 24
"""Number of items around the first that has no room that are tried exactly."""


@dataclass(frozen=True)
class Saving:
    """One thing that may lie on a device.

    Args:
        name: Name, such as "blocks.3: activations".
        bytes: Bytes that it takes there.
        seconds: Seconds of a step that it saves.

    Raises:
        ValueError: A number is below 0.
    """

    name: str
    bytes: float
    seconds: float

    def __post_init__(self) -> None:
        if self.bytes < 0 or self.seconds < 0:
            raise ValueError(f"item {self.name!r} has {self.bytes} bytes and {self.seconds} seconds; give 0 or more")


def spend(items: Sequence[Saving], budget: float) -> list[Saving]:
    """Return the items that save most seconds within a budget, identically on every rank.

    Up to `EXACT` items the choice is the best there is; of more, it saves less than the best by no more than one item.

    Args:
        items: The items, in an order that all ranks have.
        budget: Bytes that they may take together.

    Returns:
        The chosen ones, in the order of `items`.

    Raises:
        ValueError: The budget is below 0.
    """
    if budget < 0:
        raise ValueError(f"the budget is {budget} bytes; give 0 or more")
    useful = [number for number, item in enumerate(items) if item.seconds > 0 and item.bytes <= budget]
    rates = {number: items[number].seconds / items[number].bytes if items[number].bytes else inf for number in useful}
    order = sorted(useful, key=lambda number: (-rates[number], number))
    left, first = budget, len(order)
    for place, number in enumerate(order):
        if items[number].bytes > left:
            first = place
            break
        left -= items[number].bytes
    # The items that are tried exactly surround the first one that does not fit, within the list.
    start = max(0, min(first - EXACT // 2, len(order) - EXACT))
    taken, tried, rest = order[:start], order[start : start + EXACT], order[start + EXACT :]
    taken += _best(items, tried, budget - sum(items[number].bytes for number in taken))
    left = budget - sum(items[number].bytes for number in taken)
    # Smaller items with worse rates may still fit into the remaining bytes.
    for number in rest:
        if items[number].bytes <= left:
            taken.append(number)
            left -= items[number].bytes
    return [items[number] for number in sorted(taken)]


def _best(items: Sequence[Saving], numbers: Sequence[int], budget: float) -> list[int]:
    """Return the items that save most seconds, out of a few, by comparing all sets that are not worse in both."""
    sets: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]
    for number in numbers:
        item = items[number]
        more = [
            (size + item.bytes, seconds + item.seconds, (*chosen, number))
            for size, seconds, chosen in sets
            if size + item.bytes <= budget
        ]
        # A set stays only if it saves more than every set that takes no more bytes.
        longest, kept = -1.0, []
        for each in sorted([*sets, *more], key=lambda one: (one[0], -one[1])):
            if each[1] > longest:
                kept.append(each)
                longest = each[1]
        sets = kept
    return list(max(sets, key=lambda one: one[1])[2])
