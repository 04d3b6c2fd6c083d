"""The entries of a pass program. Pure data."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, NamedTuple
from zlib import crc32

from ..placement.moments import Kind

FORWARD: Final = "F"
RECOMPUTE: Final = "R"
BACKWARD: Final = "B"
EVENT_NAMES = {FORWARD: "forward", RECOMPUTE: "recomputation", BACKWARD: "backward"}


class PassEvent(NamedTuple):
    """An event of the model. par-zero records events and never causes them.

    Args:
        op: Kind of the event. "F": the forward of a unit begins. "R": its recomputation within backward begins.
            "B": its backward begins.
        unit: Number of the unit.
        keeps: Whether gathered units stay gathered, as under `no_sync`. Default: False.
    """

    op: Literal["F", "R", "B"]
    unit: int
    keeps: bool = False

    def number(self, units: int) -> int:
        """Return the place of this event in the pass that runs all units in the order of registration, from 0 up.

        Args:
            units: Number of units of the module.

        Returns:
            A number below `6 * units`.
        """
        # Forward goes up and backward goes down. A recomputation comes before the backward of its unit.
        place = self.unit if self.op == FORWARD else 3 * units - 2 - 2 * self.unit + (self.op == BACKWARD)
        # Of two forwards in a pass, one may keep its units. A rank that joins an event records what the other one does.
        return 2 * place + self.keeps

    @property
    def kind(self) -> Kind:
        """Kind of this event in a placement trace. A recomputation counts as backward."""
        return "forward" if self.op == FORWARD else "backward"


def event_of(number: int, units: int) -> PassEvent:
    """Return the event that has a number: see `PassEvent.number`.

    Args:
        number: Number of the event.
        units: Number of units of the module.
    """
    place, keeps = number >> 1, bool(number & 1)
    if place < units:
        return PassEvent(FORWARD, place, keeps)
    place, is_backward = divmod(place - units, 2)
    return PassEvent(BACKWARD if is_backward else RECOMPUTE, units - 1 - place, keeps)


class PassAction(NamedTuple):
    """An action of par-zero on a unit or a chunk.

    Args:
        op: "gather" all-gathers the full parameters of a unit. "free" releases their memory. "reduce" sums the
            gradients of a chunk over the ranks, when all of them have arrived.
        of: Number of the unit or chunk.
    """

    op: Literal["gather", "free", "reduce"]
    of: int


@dataclass(frozen=True)
class PassProgram:
    """The actions of a pass. At its end, all other chunks are reduced, and all units are freed unless they stay.

    Args:
        trace: Events of the pass, in order.
        actions: Actions before each event, in order. Default: the trace is not compiled yet.
        start: Numbers of the units that are gathered when the pass begins. None: the trace is not compiled yet.
    """

    trace: tuple[PassEvent, ...]
    actions: tuple[tuple[PassAction, ...], ...] = ()
    start: frozenset[int] | None = None

    @cached_property
    def digest(self) -> int:
        """Digest of the trace, 32 bits."""
        return digest_of(self.trace)

    @cached_property
    def reductions(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of the chunks that are reduced before each event, in order."""
        return tuple(tuple(each.of for each in before if each.op == "reduce") for before in self.actions)


def digest_of(trace: Iterable[PassEvent]) -> int:
    """Return a 32-bit digest of a trace."""
    return crc32("".join(f"{event.op}{event.unit}{event.keeps:d}" for event in trace).encode())
