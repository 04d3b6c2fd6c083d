"""The entries of a pass program. Pure data."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple
from zlib import crc32

from ..placement.moments import Kind

FORWARD: Final = "F"
RECOMPUTE: Final = "R"
BACKWARD: Final = "B"


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

    @property
    def kind(self) -> Kind:
        """Kind of this event in a placement trace. A recomputation counts as backward."""
        return "forward" if self.op == FORWARD else "backward"

    def extend(self, digest: int) -> int:
        """Return the digest of a trace with this event appended.

        Args:
            digest: Digest of the trace before, 32 bits. The empty trace has 0.
        """
        return crc32(b"%c%d%d" % (ord(self.op), self.unit, self.keeps), digest)


class UnitAction(NamedTuple):
    """An action of par-zero on a unit.

    Args:
        op: "gather" all-gathers the full parameters. "free" releases their memory.
        unit: Number of the unit.
    """

    op: Literal["gather", "free"]
    unit: int


class PassSegment(NamedTuple):
    """An event, and the actions before it, in order."""

    actions: tuple[UnitAction, ...]
    event: PassEvent


@dataclass(frozen=True)
class PassProgram:
    """The gathers and frees of a pass. Units that are still gathered when the pass ends are freed, unless they stay.

    Args:
        segments: Events of the pass, in order, each with the actions before it.
    """

    segments: tuple[PassSegment, ...]

    @property
    def trace(self) -> tuple[PassEvent, ...]:
        """Events without their actions."""
        return tuple(segment.event for segment in self.segments)


def digest_of(trace: Iterable[PassEvent]) -> int:
    """Return a 32-bit digest of a trace."""
    digest = 0
    for event in trace:
        digest = event.extend(digest)
    return digest
