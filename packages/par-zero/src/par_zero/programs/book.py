"""Which program a pass follows: the one that was made of an earlier pass of its kind."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from .._unit import Unit
from .compiler import compile_pass
from .entries import PassEvent, PassProgram, digest_of

_TRACES = 100
"""How many traces are kept: a training loop whose passes are drawn at random has a new one after each."""


class PassKind(NamedTuple):
    """What the training loop decides about a pass, so that it is alike on all ranks.

    Args:
        begins_with: What needs its first unit: "forward", "backward" or "evaluation".
        keeps: Whether units stay gathered, under `no_sync`.
    """

    begins_with: str
    keeps: bool


@dataclass(kw_only=True)
class Pass:
    """A pass under way: all from one comparison of its end to the next.

    Args:
        kind: Its kind.
        start: Units that were whole when it began, by number.
        program: What it follows; None: nothing is known of it, so the ranks compare each unit that they gather.

    Attributes:
        at: Number of segments of the program that are over.
        trace: Events so far on this rank.
        digest: Digest of the trace.
        shared: Events that all ranks have alike, whatever each of them skips: those for which they have gathered.
        begun: Units whose backward has begun.
        kept: Units that stay whole to their backward.
    """

    kind: PassKind
    start: frozenset[int]
    program: PassProgram | None
    at: int = 0
    trace: list[PassEvent] = field(default_factory=list)
    digest: int = 0
    shared: list[PassEvent] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)

    def record(self, event: PassEvent) -> None:
        """Record that an event has come."""
        self.trace.append(event)
        self.digest = event.extend(self.digest)


class LearnedPass:
    """The trace of an earlier pass, and the programs that were made of it.

    Args:
        trace: Events of the pass.

    Attributes:
        trace: Events of the pass.
        digest: Digest of the trace.
        programs: Programs by the units that are whole when the pass begins.
    """

    def __init__(self, trace: Sequence[PassEvent]) -> None:
        self.trace, self.digest = tuple(trace), digest_of(trace)
        self.programs: dict[frozenset[int], PassProgram] = {}


class Book(Protocol):
    """Programs of passes, and what they are made of."""

    @property
    def is_over(self) -> bool:
        """Whether units are whole for passes of a program of which none is to come."""

    @property
    def stays(self) -> bool:
        """Whether a program says which units stay whole between this pass and the next."""

    def look_up(self, kind: PassKind, start: frozenset[int]) -> PassProgram | None:
        """Return the program of a pass that begins; None if nothing is known of it."""

    @property
    def flags(self) -> tuple[bool, ...]:
        """What the ranks tell each other at the end of a pass. As many on all ranks."""

    def note(self, current: Pass, event: PassEvent, place: int | None, units: Sequence[Unit]) -> None:
        """Record what an event needs, which is at a place of the program, if at any, while some units are whole."""

    def end_pass(self, current: Pass, *, alike: bool, flags: Sequence[bool]) -> None:
        """Learn from a pass that has ended on all ranks.

        Args:
            current: The pass.
            alike: Whether it had the same events on all ranks.
            flags: For each of `flags`, whether any rank has set it.
        """

    def end_step(self) -> None:
        """Learn from the passes of a step. Nothing is whole any more."""

    def stop(self) -> None:
        """Follow no program for the rest of the step."""

    def forget(self) -> None:
        """Forget what was recorded, as a pass has failed."""


class PassBook:
    """Programs of single passes: by the kind of the pass, and by what came before it, as an actor before a critic.

    It needs no collective of its own. What the ranks have gathered together they know to be alike, and the digests of
    their traces are compared when a pass ends anyway.

    Args:
        outer: For each unit by number, the units around it.
    """

    is_over = stays = False
    flags: tuple[bool, ...] = ()

    def __init__(self, outer: Sequence[frozenset[int]]) -> None:
        self._outer = tuple(outer)
        self._known: dict[tuple[PassKind, int], LearnedPass] = {}
        self._seen: dict[tuple[PassKind, int], int] = {}  # digest of another trace, until a second pass confirms it
        self._latest: dict[PassKind, LearnedPass] = {}  # that of a pass after one that was never seen before
        self._before = 0  # digest of the pass before, as all ranks know it
        self._data_decides = False  # whether the ranks have ever run different units

    def look_up(self, kind: PassKind, start: frozenset[int]) -> PassProgram | None:
        """Return the program of a pass that begins; None if no pass of its kind was seen."""
        known = self._known.get((kind, self._before), self._latest.get(kind))
        if known is None:
            return None
        if start not in known.programs:
            known.programs[start] = compile_pass(known.trace, self._outer, start)
        return known.programs[start]

    def note(self, current: Pass, event: PassEvent, place: int | None, units: Sequence[Unit]) -> None:
        """Do nothing: the pass has the event already."""

    def end_pass(self, current: Pass, *, alike: bool, flags: Sequence[bool]) -> None:  # noqa: ARG002 - those of the protocol
        """Take over a trace that is new, or that was twice another, so that an odd pass changes nothing."""
        self._data_decides |= not alike
        followed = None if current.program is None else current.program.trace
        found: Sequence[PassEvent] = current.trace
        if self._data_decides:  # what the ranks skip by their data they may need the next time
            found = current.shared if followed is None else followed
        if not found:
            return
        key, digest = (current.kind, self._before), digest_of(found)
        if key not in self._known:
            if len(self._known) == _TRACES:
                self._known.clear()
                self._seen.clear()
            self._known[key] = LearnedPass(followed or found)
        if digest != self._known[key].digest:
            if self._seen.get(key) == digest:
                self._known[key] = LearnedPass(found)
            self._seen[key] = digest
        self._latest[current.kind] = self._known[key]
        self._before = digest

    def end_step(self) -> None:
        """Do nothing: what is learned is of single passes."""

    def stop(self) -> None:
        """Do nothing: no program outlasts its pass."""

    def forget(self) -> None:
        """Do nothing: a pass that has failed was never taken over."""
