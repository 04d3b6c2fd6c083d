"""What steps need, recorded, and the plan of a step that is expected to come again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from zlib import crc32

from .ledger import Placement
from .moments import Kind, Moment, Trace

Need = tuple[Kind, int]
"""What happens at a moment, and the number of the unit."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A placement of units by number.

    Args:
        needs: For each moment but the step, what it needs.
        held: For each of these, the further units that it needs.
        moves: For each of these, the units that are fetched (True) or dropped (False), in that order.
        ends: The numbers of moments at which passes end, ascending.
        others: For each of these moments, the bytes that the placement leaves for what is no parameter.
    """

    needs: tuple[Need, ...]
    held: tuple[tuple[int, ...], ...]
    moves: tuple[tuple[tuple[int, bool], ...], ...]
    ends: tuple[int, ...]
    others: tuple[int, ...]


class Recorder:
    """Records moments of the step under way.

    Args:
        names: The units' names, by number.
        other: Tells how many bytes on the device are no parameters, whenever it is asked.

    Attributes:
        needs: What each moment so far has needed.
        digest: A number of all that was recorded in this step.
    """

    def __init__(self, names: Sequence[str], other: Callable[[], int]) -> None:
        self._names, self._other = tuple(names), other
        self.clear()

    def clear(self) -> None:
        """Forgets the step under way."""
        self.needs: list[Need] = []
        self.held: list[tuple[int, ...]] = []
        self.others: list[int] = []
        self.ends: list[int] = []
        self.digest = 0

    def note(self, kind: Kind, unit: int, held: tuple[int, ...]) -> None:
        """A moment begins.

        Args:
            kind: What happens at it.
            unit: The unit that it needs.
            held: Further units that it needs.
        """
        other = self._other()
        if self.others:
            self.others[-1] = max(self.others[-1], other)  # at the end of the moment before
        self.needs.append((kind, unit))
        self.held.append(held)
        self.others.append(other)
        self.digest = crc32(f"{kind}{unit}{held}".encode(), self.digest)

    def end_pass(self) -> None:
        """A pass ends, which all ranks end together."""
        if self.others:
            self.others[-1] = max(self.others[-1], self._other())
        self.ends.append(len(self.needs))

    def cut(self) -> None:
        """Forgets what came after the last end of a pass: other ranks may have something else there."""
        length = self.ends[-1] if self.ends else 0
        del self.needs[length:], self.held[length:], self.others[length:]

    def trace(self, others: Sequence[int]) -> Trace:
        """What was recorded, and the step of the optimizer behind it.

        Args:
            others: Bytes that are no parameters at each moment.
        """
        names = self._names
        moments = [
            Moment(kind=kind, unit=names[unit], other=other, held=tuple(names[number] for number in held))
            for (kind, unit), held, other in zip(self.needs, self.held, others, strict=True)
        ]
        return Trace((*moments, Moment(kind="step")))

    def plan(self, placement: Placement, others: Sequence[int]) -> Plan:
        """A placement of what was recorded, by numbers of units."""
        numbers = {name: number for number, name in enumerate(self._names)}
        moves = [tuple((numbers[unit], tier == "device") for unit, tier in moves) for moves in placement.moves[:-1]]
        return Plan(
            needs=tuple(self.needs),
            held=tuple(self.held),
            moves=tuple(moves),
            ends=tuple(self.ends),
            others=tuple(others),
        )
