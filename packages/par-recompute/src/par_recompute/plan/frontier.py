"""The best choices of one layer: for each number of bytes the fewest seconds."""

from collections.abc import Callable, Collection, Iterable
from itertools import combinations
from typing import NamedTuple

from .table import WHOLE, Made, Table, replay

ALL_SUBSETS = 12
"""With so many modules that gain something, every subset is looked at: 4,096."""

FLOPS_PER_BYTE = {"cpu": 10.0}
"""How many operations take as long as moving a byte, by type of device, roughly: choices depend on this ratio alone."""


class Choice(NamedTuple):
    """What one layer makes again, and what that comes to.

    Attributes:
        dropped: Names of modules, relative to the layer; "" is the whole layer.
        bytes: What the layer keeps.
        seconds: What making them again takes.
    """

    dropped: frozenset[str]
    bytes: int
    seconds: float


def frontier(table: Table, rate: float, *, bandwidth: float | None = None, whole: bool = True) -> list[Choice]:
    """Choices of one layer of which none is better in both bytes and seconds. Pure.

    With up to 12 modules whose output is worth something, all subsets are compared. With more, modules are added one by
    one, the one first that frees most bytes a second.

    Args:
        table: What a call of the layer saves, from `measure`.
        rate: Floating-point operations a second.
        bandwidth: Bytes a second that operations read and write. None: a hundredth of `rate`.
        whole: Whether the layer as a whole may be run again.

    Returns:
        The choices by falling number of bytes and rising seconds. The first drops nothing.

    Raises:
        ValueError: A rate is not above 0.
    """
    bandwidth = rate / 100 if bandwidth is None else bandwidth
    for name, value in (("rate", rate), ("bandwidth", bandwidth)):
        if not value > 0:
            raise ValueError(f"{name} is {value}; give what the device does in a second, above 0")
    measure = _measured_by(table, rate, bandwidth)
    useful = gaining(table)
    choices = list(_all(useful, measure) if len(useful) <= ALL_SUBSETS else _one_by_one(useful, measure))
    if whole:
        last = Choice(
            frozenset({WHOLE}),
            sum(table.sizes[storage] for storage in table.inputs),
            table.flops / rate + table.moved / bandwidth,
        )
        choices.append(last)
    return pareto(choices)


def gaining(table: Table) -> list[str]:
    """The candidates whose output is saved, or is what another one of them reads."""
    everything = table.candidates
    again = replay(table, everything).again
    return [name for name in everything if any(table.events[number][0] == name for number in again)]


def pareto(choices: Iterable[Choice]) -> list[Choice]:
    """The choices that no other one beats in bytes without taking longer; by falling number of bytes."""
    best: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.seconds, choice.bytes, len(choice.dropped))):
        if not best or choice.bytes < best[-1].bytes:
            best.append(choice)
    return best


def _measured_by(table: Table, rate: float, bandwidth: float) -> Callable[[Collection[str]], Choice]:
    """A function that says what it comes to if some modules are called again."""

    def measured(dropped: Collection[str]) -> Choice:
        storages, again = replay(table, dropped)
        events = [event for event in (table.events[number] for number in again) if isinstance(event, Made)]
        seconds = sum(event.flops / rate + event.moved / bandwidth for event in events)
        names = frozenset(event.module for event in events)
        return Choice(names, sum(table.sizes[storage] for storage in storages), seconds)

    return measured


def _all(useful: list[str], measured: Callable[[Collection[str]], Choice]) -> Iterable[Choice]:
    for count in range(len(useful) + 1):
        yield from map(measured, combinations(useful, count))


def _one_by_one(useful: list[str], measured: Callable[[Collection[str]], Choice]) -> Iterable[Choice]:
    """A chain from nothing to everything."""
    current, left = measured(()), list(useful)
    taken: list[str] = []
    yield current
    while left:
        options = [(measured([*taken, name]), name) for name in left]

        def worth(option: tuple[Choice, str], start: Choice = current) -> float:
            choice, _ = option
            return (start.bytes - choice.bytes) / max(choice.seconds - start.seconds, 1e-12)

        current, name = max(options, key=worth)
        taken.append(name)
        left.remove(name)
        yield current
