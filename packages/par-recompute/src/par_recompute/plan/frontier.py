"""Pareto frontier of one layer: for each number of saved bytes the fewest seconds of recomputation."""

from collections.abc import Callable, Collection, Iterable
from itertools import combinations
from typing import NamedTuple

from .table import WHOLE, Made, Table, replay

ALL_SUBSETS = 12
"""Largest number of useful modules of which every subset is compared: 4,096 subsets."""

FLOPS_PER_BYTE = {"cpu": 10.0}
"""How many operations take as long as moving a byte, by type of device, roughly: choices depend on this ratio alone."""


class Choice(NamedTuple):
    """Modules that one layer recomputes, with the bytes and seconds of this choice.

    Attributes:
        dropped: Names of modules, relative to the layer; "" is the layer itself.
        bytes: Bytes that the layer saves.
        seconds: Seconds to recompute the dropped modules.
    """

    dropped: frozenset[str]
    bytes: int
    seconds: float


def frontier(table: Table, rate: float, *, bandwidth: float | None = None, whole: bool = True) -> list[Choice]:
    """Return the choices of one layer that no other choice beats in both bytes and seconds. Pure.

    With up to 12 useful modules, the function compares all subsets. With more, it adds modules greedily, always the
    module that frees most bytes per second of recomputation.

    Args:
        table: Table of a call of the layer, from `measure`.
        rate: Floating-point operations per second.
        bandwidth: Bytes per second that operations read and write. Default: a hundredth of `rate`.
        whole: Whether the complete layer may run again. Default: True.

    Returns:
        The choices by falling number of bytes and rising seconds. The first choice drops no module.

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
    """Return the candidates whose output is saved, or is the input of another recomputed candidate."""
    everything = table.candidates
    again = replay(table, everything).again
    return [name for name in everything if any(table.events[number][0] == name for number in again)]


def pareto(choices: Iterable[Choice]) -> list[Choice]:
    """Return the choices on the Pareto frontier of bytes and seconds, by rising seconds and falling bytes."""
    best: list[Choice] = []
    # Of choices with equal seconds and bytes, the first one stays: the one with the fewest modules.
    for choice in sorted(choices, key=lambda choice: (choice.seconds, choice.bytes, len(choice.dropped))):
        if not best or choice.bytes < best[-1].bytes:
            best.append(choice)
    return best


def _measured_by(table: Table, rate: float, bandwidth: float) -> Callable[[Collection[str]], Choice]:
    """Return a function that computes the choice for a set of dropped modules."""

    def measured(dropped: Collection[str]) -> Choice:
        storages, again = replay(table, dropped)
        events = [event for event in (table.events[number] for number in again) if isinstance(event, Made)]
        seconds = sum(event.flops / rate + event.moved / bandwidth for event in events)
        # A module that backward does not call again frees nothing, so the choice leaves it out: it needs no hook.
        names = frozenset(event.module for event in events)
        return Choice(names, sum(table.sizes[storage] for storage in storages), seconds)

    return measured


def _all(useful: list[str], measured: Callable[[Collection[str]], Choice]) -> Iterable[Choice]:
    for count in range(len(useful) + 1):
        yield from map(measured, combinations(useful, count))


def _one_by_one(useful: list[str], measured: Callable[[Collection[str]], Choice]) -> Iterable[Choice]:
    """Yield a greedy chain of choices, from no module to all useful modules."""
    current, left = measured(()), list(useful)
    taken: list[str] = []
    yield current
    while left:
        options = [(measured([*taken, name]), name) for name in left]

        def worth(option: tuple[Choice, str], start: Choice = current) -> float:
            choice, _ = option
            # A module may cost nothing more, if another one calls it again already; it is then taken before all others.
            return (start.bytes - choice.bytes) / max(choice.seconds - start.seconds, 1e-12)

        current, name = max(options, key=worth)
        taken.append(name)
        left.remove(name)
        yield current
