"""The entries of a program. Pure data."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple
from zlib import crc32

from ..placement.moments import Kind

FORWARD: Final = "F"
RECOMPUTE: Final = "R"
BACKWARD: Final = "B"


class PassEvent(NamedTuple):
    """What the model does: it is recorded, never caused.

    Args:
        op: "F": the forward of a unit begins. "R": the same within backward, where it is computed again. "B": its
            backward begins.
        unit: Number of the unit.
        keeps: Whether whatever is gathered stays whole, as under `no_sync`.
    """

    op: Literal["F", "R", "B"]
    unit: int
    keeps: bool = False

    @property
    def kind(self) -> Kind:
        """What happens, as a trace of moments calls it."""
        return "forward" if self.op == FORWARD else "backward"

    def extend(self, digest: int) -> int:
        """Return the digest of a trace to which this event is added, of 32 bits; that of an empty trace is 0."""
        return crc32(b"%c%d%d" % (ord(self.op), self.unit, self.keeps), digest)


class UnitAction(NamedTuple):
    """What is done with a unit.

    Args:
        op: "gather": its parameters become whole. "free": the memory of whole parameters is given back.
        unit: Number of the unit.
    """

    op: Literal["gather", "free"]
    unit: int


class PassSegment(NamedTuple):
    """An event, and the actions before it, in their order."""

    actions: tuple[UnitAction, ...]
    event: PassEvent


@dataclass(frozen=True)
class PassProgram:
    """What is gathered and freed in a pass. When it ends, what is still whole is freed too, unless it stays.

    Args:
        segments: The events of the pass, in their order, each with the actions before it.
    """

    segments: tuple[PassSegment, ...]

    @property
    def trace(self) -> tuple[PassEvent, ...]:
        """The events alone."""
        return tuple(segment.event for segment in self.segments)


def digest_of(trace: Iterable[PassEvent]) -> int:
    """Return a number of 32 bits that differs between traces."""
    digest = 0
    for event in trace:
        digest = event.extend(digest)
    return digest
