"""Programs of whole steps within a budget: what a placement of an earlier step keeps whole from one pass to the next.

A step that nobody has seen runs as without a budget, and is recorded. If all ranks have recorded the same, it is
placed, and when it is expected to come again, followed:

    step 1    runs "behind", is recorded    -> placed
    step 2    follows                       -> each event is looked for in the program, on this rank alone
    step 3    needs something else          -> the ranks depart alike, or raise; the rest runs "behind"
    step 4    runs "behind", is recorded    -> placed; what comes after what is remembered, so two orders take turns
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .._unit import Unit
from ..placement.ledger import Placement
from ..placement.moments import Moment, Trace
from .book import Pass, PassBook, PassKind
from .entries import PassEvent, PassProgram, PassSegment, UnitAction

StepEvents = tuple[PassEvent, ...]
"""The events of all passes of a step."""


@dataclass(frozen=True, kw_only=True)
class StepProgram:
    """The programs of the passes of a step.

    Args:
        events: The events of the step.
        held: For each of them, the further units that it needs.
        others: For each of them, the bytes that the placement leaves for what is no parameter.
        ends: The numbers of events at which passes end, ascending.
        passes: The programs of the passes.
    """

    events: StepEvents
    held: tuple[tuple[int, ...], ...]
    others: tuple[int, ...]
    ends: tuple[int, ...]
    passes: tuple[PassProgram, ...]


class Recording:
    """What the step under way has needed so far.

    Args:
        names: The units' names, by number.
        other: Tells how many bytes on the device are no parameters, whenever it is asked.
    """

    def __init__(self, names: Sequence[str], other: Callable[[], int]) -> None:
        self._names, self._other = tuple(names), other
        self.clear()

    def clear(self) -> None:
        """Forget the step under way."""
        self.events: list[PassEvent] = []
        self.held: list[tuple[int, ...]] = []
        self.others: list[int] = []
        self.ends: list[int] = []

    def note(self, event: PassEvent, held: Sequence[int]) -> int:
        """Record an event and the further units that it needs. Return the other bytes that there are when it begins."""
        self._note_other()
        self.events.append(event)
        self.held.append(tuple(held))
        self.others.append(self._other())
        return self.others[-1]

    def end_pass(self) -> None:
        """Record that a pass ends, which all ranks end together."""
        self._note_other()
        self.ends.append(len(self.events))

    def drop_open_pass(self) -> None:
        """Forget what came after the last end of a pass: other ranks may have something else there."""
        length = self.ends[-1] if self.ends else 0
        del self.events[length:], self.held[length:], self.others[length:]

    def trace(self, others: Sequence[int]) -> Trace:
        """Return what was recorded, with bytes that are no parameters, and the step of the optimizer behind it."""
        moments = [
            Moment(
                kind=event.kind,
                unit=self._names[event.unit],
                other=other,
                held=tuple(self._names[number] for number in held),
            )
            for event, held, other in zip(self.events, self.held, others, strict=True)
        ]
        return Trace((*moments, Moment(kind="step")))

    def program(self, placement: Placement, others: Sequence[int]) -> StepProgram:
        """Return the program of what was recorded, with the moves of a placement."""
        numbers = {name: number for number, name in enumerate(self._names)}
        moves = [
            tuple(UnitAction("gather" if tier == "device" else "free", numbers[unit]) for unit, tier in moved)
            for moved in placement.moves[:-1]
        ]
        segments = [PassSegment(actions, event) for actions, event in zip(moves, self.events, strict=True)]
        starts = [0, *self.ends[:-1]]
        return StepProgram(
            events=tuple(self.events),
            held=tuple(self.held),
            others=tuple(others),
            ends=tuple(self.ends),
            passes=tuple(PassProgram(tuple(segments[start:end])) for start, end in zip(starts, self.ends, strict=True)),
        )

    def _note_other(self) -> None:
        """The moment before ends now: activations may have grown in it."""
        if self.others:
            self.others[-1] = max(self.others[-1], self._other())


class StepBook:
    """Programs of whole steps, made by a policy that places units within a budget.

    Args:
        recording: Records each step.
        passes: Programs of passes in steps that follow no placement.
        place: Makes a placement of a trace, with bytes that lie on the device throughout.
        resident: How many these are on this rank.
        most: The largest of all ranks' numbers, at each place of a list. A collective.

    Attributes:
        trace: What the last whole step has needed; None before there was one.
    """

    def __init__(
        self,
        recording: Recording,
        passes: PassBook,
        *,
        place: Callable[[Trace, int], Placement],
        resident: int,
        most: Callable[[list[int]], list[int]],
    ) -> None:
        self._recording, self._passes = recording, passes
        self._place, self._resident, self._most = place, resident, most
        self._programs: dict[StepEvents, StepProgram] = {}
        self._after: dict[StepEvents, StepEvents] = {}  # the step that came behind each
        self._before: StepEvents | None = None  # the step before this one, if all ranks know it
        self.trace: Trace | None = None
        self._program: StepProgram | None = None
        self._grown, self._alike, self._whole = False, True, True

    @property
    def stays(self) -> bool:
        """Whether the step under way follows a placement, which says what stays whole between passes."""
        return self._program is not None

    @property
    def is_over(self) -> bool:
        """Whether all passes of the program have ended: what comes is not in it, as all ranks know."""
        return self._program is not None and len(self._recording.ends) >= len(self._program.ends)

    @property
    def flags(self) -> tuple[bool, ...]:
        """What the ranks tell each other at the end of a pass: whether there are more other bytes than were planned."""
        return (self._grown,)

    def look_up(self, kind: PassKind, start: frozenset[int]) -> PassProgram | None:
        """Return the program of a pass that begins; None if nothing is known of it."""
        if self._program is None:
            return self._passes.look_up(kind, start)
        return self._program.passes[len(self._recording.ends)]

    def note(self, current: Pass, event: PassEvent, place: int | None, units: Sequence[Unit]) -> None:
        """Record what an event needs, which is at a place of the program, if at any, while some units are whole."""
        program = self._program
        if program is None or current.program is None:
            whole = (unit.number for unit in units if unit.chunks and unit.gathered)
            self._recording.note(event, [number for number in whole if number != event.unit])
        elif place is None:
            self._recording.note(event, ())
        else:
            # Of the program's events: this rank may have recorded others, or fewer, in the passes before.
            passed = len(self._recording.ends)
            number = place + (program.ends[passed - 1] if passed else 0)
            self._grown |= self._recording.note(event, program.held[number]) > program.others[number]

    def end_pass(self, current: Pass, *, alike: bool, flags: Sequence[bool]) -> None:
        """Record that a pass has ended on all ranks, and what they have told of each other's bytes."""
        self._recording.end_pass()
        self._alike &= alike
        self._grown |= flags[0]
        if self._program is None:
            self._passes.end_pass(current, alike=alike, flags=())
        elif current.program is None:
            self.stop()

    def stop(self) -> None:
        """Follow no placement for the rest of this step, of which none is made either."""
        self._program, self._whole = None, False

    def end_step(self) -> None:
        """Place the step, where all ranks have recorded something new, and choose the program of the next.

        Raises:
            ValueError: The budget is too small for it; on every rank.
        """
        recording, program = self._recording, self._program
        recording.drop_open_pass()
        if not recording.events:
            return
        key = tuple(recording.events) if self._alike else None
        whole = self._whole and (program is None or key == program.events)
        if key is not None and self._before is not None:
            self._after[self._before] = key
        try:
            if whole and key is not None and (program is None or self._grown):
                *others, resident = self._most([*recording.others, self._resident])
                if program is not None:
                    others = list(map(max, others, program.others))
                self._programs[key] = recording.program(self._place(recording.trace(others), resident), others)
            if whole:
                self.trace = recording.trace(recording.others)
        finally:
            self._before = key
            following = None if key is None else self._programs.get(self._after.get(key, key))
            if key is None and program is not None:  # data decides on each rank what it skips
                following = program
            self._begin_step(following)

    def forget(self) -> None:
        """Forget what was recorded, as a pass has failed. The rest of this step follows no placement."""
        self._begin_step(None)
        self._before, self._whole = None, False

    def _begin_step(self, program: StepProgram | None) -> None:
        self._recording.clear()
        self._program = program
        self._grown, self._alike, self._whole = False, True, True
