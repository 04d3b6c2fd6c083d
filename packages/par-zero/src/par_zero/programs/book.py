"""The programs of earlier passes, one of which a new pass of the same kind follows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .._unit import Unit
from .compiler import compile_pass, place_reductions
from .entries import PassEvent, PassProgram, digest_of

_TRACES = 100
"""How many traces are kept: a training loop whose passes are drawn at random has a new one after each."""


class PassKind(NamedTuple):
    """The properties of a pass that the training loop decides, which are therefore equal on all ranks.

    Args:
        begins_with: Phase in which the pass needs its first unit: "forward", "backward" or "evaluation".
        keeps: Whether units stay gathered, under `no_sync`.
    """

    begins_with: str
    keeps: bool


@dataclass(kw_only=True)
class Pass:
    """The pass in progress, from the end of the previous pass to its own end. Ranks compare at each end.

    Args:
        kind: Kind of the pass.
        program: Program that the pass follows. None: no program exists, so the ranks compare before each gather.

    Attributes:
        at: Number of events of the program that have passed.
        trace: Events so far on this rank.
        shared: Events that are equal on all ranks, because all ranks have gathered a unit for them.
        begun: Numbers of the units whose backward has begun.
        kept: Numbers of the units that stay gathered until their backward.
        learns: Whether the pass has had no program from its beginning, on all ranks.
    """

    kind: PassKind
    program: PassProgram | None
    at: int = 0
    trace: list[PassEvent] = field(default_factory=list)
    shared: list[PassEvent] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    kept: set[int] = field(default_factory=set)
    learns: bool = field(init=False)

    def __post_init__(self) -> None:
        self.learns = self.program is None

    @property
    def digest(self) -> int:
        """Digest of the trace, 32 bits."""
        # Nearly every pass has exactly the events of its program, whose digest is computed once.
        if self.program is not None and self.program.trace == tuple(self.trace):
            return self.program.digest
        return digest_of(self.trace)

    def leave_program(self) -> None:
        """Continue without the program, if there is one. Its events were equal on all ranks."""
        if self.program is not None:
            self.shared, self.program = list(self.program.trace), None


class PassBook:
    """The store of programs that an executor follows: of single passes, by their kind and by the pass before each.

    The previous pass tells passes of one kind from each other, such as an actor's forward and a critic's forward. The
    book needs no collective of its own. Events for which all ranks gathered a unit are equal on all ranks, and the
    ranks compare the digests of their traces at the end of each pass.

    Args:
        outer: Sets of unit numbers, one per unit: the units around it.
        chunks: Numbers of the trained chunks of each unit.
    """

    def __init__(self, outer: Sequence[frozenset[int]], chunks: Sequence[Sequence[int]]) -> None:
        self._outer, self._chunks = tuple(outer), tuple(chunks)
        self._known: dict[tuple[PassKind, int], PassProgram] = {}
        self._seen: dict[tuple[PassKind, int], int] = {}  # digest of another trace, until a second pass confirms it
        # A pass behind a new trace has no entry by key yet. The latest pass of its kind is a better guess than none.
        self._latest: dict[PassKind, PassProgram] = {}
        self._before = 0  # digest of the pass before, equal on all ranks
        self._data_decides = False  # whether the ranks have ever run different units

    @property
    def is_over(self) -> bool:
        """Whether all passes of the program have ended, while units may still be gathered for them."""
        return False

    @property
    def stays(self) -> bool:
        """Whether a program keeps units gathered between this pass and the next pass."""
        return False

    @property
    def flags(self) -> tuple[bool, ...]:
        """The flags that the ranks combine at the end of a pass, the same number on all ranks."""
        return ()

    def look_up(self, kind: PassKind, start: frozenset[int]) -> PassProgram | None:
        """Return the program of a pass that begins. Return None if no pass of its kind was recorded.

        Args:
            kind: Kind of the pass.
            start: Numbers of the units that are gathered now.
        """
        key = (kind, self._before)
        known = self._known.get(key, self._latest.get(kind))
        # Passes of one kind and behind the same pass nearly always begin with the same units.
        if known is not None and known.start != start:
            known = self.add_reductions(compile_pass(known.trace, self._outer, start))
            if key in self._known:
                self._known[key] = known
            else:
                self._latest[kind] = known
        return known

    def add_reductions(self, program: PassProgram) -> PassProgram:
        """Return a program of gathers and frees with the reductions of the units' chunks."""
        return place_reductions(program, self._outer, self._chunks)

    def note(self, current: Pass, event: PassEvent, place: int | None, units: Sequence[Unit]) -> None:
        """Record an event and the units that it needs. This book needs no more than the trace of the pass.

        Args:
            current: Pass in progress.
            event: Event that has happened.
            place: Index of the event in the program of the pass. None: the program does not contain it.
            units: Units, with their present states.
        """

    def end_pass(self, current: Pass, *, alike: bool, flags: Sequence[bool]) -> None:  # noqa: ARG002 - for subclasses
        """Store a trace that has no program, or replace one after two equal passes. One odd pass changes nothing.

        Args:
            current: Pass that has ended on all ranks.
            alike: Whether the pass had the same events on all ranks.
            flags: One boolean for each item of `self.flags`: whether any rank has set it.
        """
        self._data_decides |= not alike
        found: Sequence[PassEvent] = current.trace
        digest = current.digest
        # If data decides which units run, this rank's trace is not equal to the other ranks' traces. The shared events
        # are, and a unit that this rank skipped now may run on it next time.
        if self._data_decides:
            found = current.shared if current.program is None else current.program.trace
            digest = digest_of(found)
        if not found:
            return
        key = (current.kind, self._before)
        if key not in self._known:
            # All ranks clear at the same pass, because their keys are equal.
            if len(self._known) == _TRACES:
                self._known.clear()
                self._seen.clear()
            self._known[key] = current.program or PassProgram(tuple(found))
        if digest != self._known[key].digest:
            if self._seen.get(key) == digest:
                self._known[key] = PassProgram(tuple(found))
            self._seen[key] = digest
        self._latest[current.kind] = self._known[key]
        self._before = digest

    def end_step(self) -> None:
        """Update the programs after a step. All units have been freed."""

    def stop(self) -> None:
        """Follow no program for the rest of the step. No program of this book lasts longer than its pass."""

    def forget(self) -> None:
        """Forget the recordings of the step, because a pass has failed. This book learns from complete passes only."""
