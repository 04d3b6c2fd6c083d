"""The programs of complete steps within a budget. A placement of an earlier step decides which units stay gathered.

A step without a program runs by the policy "behind", as without a budget, and is recorded. If all ranks have recorded
the same events, the step is placed. The program is followed when the same step is expected again:

- Step 1 runs "behind", is recorded, and is placed.
- Step 2 follows the program. Each rank searches each event in the program, without the other ranks.
- Step 3 needs another unit. The ranks depart together, or raise. The rest of the step runs "behind".
- Step 4 runs "behind", is recorded, and is placed.

The book also stores which step followed which, so a loop may alternate between two orders.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from .._unit import Unit
from ..placement.ledger import Placement
from ..placement.moments import Moment, Trace
from .book import Pass, PassBook, PassKind
from .entries import PassAction, PassEvent, PassProgram

StepEvents = tuple[PassEvent, ...]
"""Events of all passes of a step."""


class RecordedStep:
    """A step: its events, the memory that each event needs, and the programs of its passes when it was placed.

    Args:
        names: Names of the units, by number.
        other: Function that returns the bytes on the device now that are not parameters.

    Attributes:
        events: Events of the step.
        held: Tuples of unit numbers, one per event: further units that the event needs.
        others: Bytes of memory other than parameters, one number per event. A placement leaves as much for it.
        ends: Numbers of events after which a pass ends, ascending.
        passes: Programs of the passes; empty before the step was placed.
    """

    def __init__(self, names: Sequence[str], other: Callable[[], int]) -> None:
        self._names, self._other = names, other
        self.events: list[PassEvent] = []
        self.held: list[tuple[int, ...]] = []
        self.others: list[int] = []
        self.ends: list[int] = []
        self.passes: list[PassProgram] = []

    def note(self, event: PassEvent, held: Sequence[int]) -> int:
        """Record an event, and return the other bytes on the device when it begins.

        Args:
            event: Event that happens.
            held: Numbers of further units that the event needs.
        """
        self._note_other()
        self.events.append(event)
        self.held.append(tuple(held))
        self.others.append(self._other())
        return self.others[-1]

    def end_pass(self) -> None:
        """Record the end of a pass, which all ranks end together."""
        self._note_other()
        self.ends.append(len(self.events))

    def drop_open_pass(self) -> None:
        """Forget the events after the last end of a pass, because they may differ between ranks."""
        length = self.ends[-1] if self.ends else 0
        del self.events[length:], self.held[length:], self.others[length:]

    def trace(self) -> Trace:
        """Return the step as a placement trace, with the step of the optimizer as its last moment."""
        moments = [
            Moment(
                kind=event.kind,
                unit=self._names[event.unit],
                other=other,
                held=tuple(self._names[number] for number in held),
            )
            for event, held, other in zip(self.events, self.held, self.others, strict=True)
        ]
        return Trace((*moments, Moment(kind="step")))

    def place(self, placement: Placement, add_reductions: Callable[[PassProgram], PassProgram]) -> None:
        """Make the programs of the passes, with the moves of a placement.

        Args:
            placement: Placement of the trace of this step.
            add_reductions: Function that adds the reductions of gradients to the program of a pass.
        """
        numbers = {name: number for number, name in enumerate(self._names)}
        # The last moment is the step of the optimizer, which frees all units by itself.
        moves = [
            tuple(PassAction("gather" if tier == "device" else "free", numbers[unit]) for unit, tier in moved)
            for moved in placement.moves[:-1]
        ]
        self.passes = [
            add_reductions(PassProgram(tuple(self.events[start:end]), tuple(moves[start:end])))
            for start, end in pairwise([0, *self.ends])
        ]

    def _note_other(self) -> None:
        """Raise the other bytes of the moment that ends now, because activations may have grown in it."""
        if self.others:
            self.others[-1] = max(self.others[-1], self._other())


class StepBook(PassBook):
    """The programs of complete steps, made by a policy that places units within a budget.

    Args:
        names: Names of the units, by number.
        other: Function that returns the bytes on the device now that are not parameters.
        outer: Sets of unit numbers, one per unit: the units around it.
        chunks: Numbers of the trained chunks of each unit.
        place: Function that places a trace. Its second argument is the number of resident bytes.
        resident: Bytes that stay on this rank's device throughout a step.
        most: Collective function that returns the elementwise maximum of the ranks' lists.

    Attributes:
        trace: Placement trace of the last complete step; None before the first one.
    """

    def __init__(
        self,
        names: Sequence[str],
        other: Callable[[], int],
        *,
        outer: Sequence[frozenset[int]],
        chunks: Sequence[Sequence[int]],
        place: Callable[[Trace, int], Placement],
        resident: int,
        most: Callable[[list[int]], list[int]],
    ) -> None:
        super().__init__(outer, chunks)
        self._new_step = partial(RecordedStep, names, other)
        self._place, self._resident, self._most = place, resident, most
        self._programs: dict[StepEvents, RecordedStep] = {}
        self._after: dict[StepEvents, StepEvents] = {}  # the step that followed each step
        self._step_before: StepEvents | None = None  # the step before this one, if it was equal on all ranks
        self.trace: Trace | None = None
        self._recording = self._new_step()
        self._program: RecordedStep | None = None
        self._grown, self._alike, self._whole = False, True, True

    @property
    def stays(self) -> bool:
        """Whether the current step follows a placement, which decides which units stay gathered between passes."""
        return self._program is not None

    @property
    def is_over(self) -> bool:
        """Whether all passes of the program have ended. All ranks agree, because they end passes together."""
        return self._program is not None and len(self._recording.ends) >= len(self._program.ends)

    @property
    def flags(self) -> tuple[bool, ...]:
        """Flags to combine at the end of a pass: whether the other bytes have exceeded the placement's plan."""
        return (self._grown,)

    def look_up(self, kind: PassKind, start: frozenset[int]) -> PassProgram | None:
        """Return the program of a pass that begins. Without a placement it is that of a single pass."""
        if self._program is None:
            return super().look_up(kind, start)
        return self._program.passes[len(self._recording.ends)]

    def note(self, current: Pass, event: PassEvent, place: int | None, units: Sequence[Unit]) -> None:
        """Record an event and the units that it needs: see `PassBook.note`."""
        program = self._program
        # Without a placement the gathered units are those that "behind" needs. A placement also keeps units that the
        # event does not need, so its events take their units from the program.
        if program is None or current.program is None:
            whole = (unit.number for unit in units if unit.chunks and unit.gathered)
            self._recording.note(event, [number for number in whole if number != event.unit])
        elif place is None:
            self._recording.note(event, ())
        else:
            # The index among the program's events: this rank may have recorded other or fewer events in passes before.
            passed = len(self._recording.ends)
            number = place + (program.ends[passed - 1] if passed else 0)
            self._grown |= self._recording.note(event, program.held[number]) > program.others[number]

    def end_pass(self, current: Pass, *, alike: bool, flags: Sequence[bool]) -> None:
        """Record that a pass has ended on all ranks: see `PassBook.end_pass`."""
        self._recording.end_pass()
        self._alike &= alike
        self._grown |= flags[0]
        if self._program is None:
            super().end_pass(current, alike=alike, flags=())
        # The ranks departed from the program in this pass, all of them, or they would have raised.
        elif current.program is None:
            self.stop()

    def stop(self) -> None:
        """Follow no placement for the rest of this step, and make no placement of it."""
        self._program, self._whole = None, False

    def end_step(self) -> None:
        """Place the step if all ranks have recorded the same new events, and choose the program of the next step.

        Raises:
            ValueError: The budget is too small for the step. All ranks raise.
        """
        recording, program = self._recording, self._program
        recording.drop_open_pass()
        if not recording.events:
            return
        key = tuple(recording.events) if self._alike else None
        whole = self._whole and (program is None or key == tuple(program.events))
        if key is not None and self._step_before is not None:
            self._after[self._step_before] = key
        try:
            # A step that followed its program is placed again if any rank's other bytes exceeded the plan. All ranks
            # take this branch together: `_grown` and the events are equal on all ranks, as `most` is a collective.
            trace = recording.trace() if whole else self.trace
            if whole and key is not None and (program is None or self._grown):
                *others, resident = self._most([*recording.others, self._resident])
                recording.others = others if program is None else list(map(max, others, program.others))
                recording.place(self._place(recording.trace(), resident), self.add_reductions)
                self._programs[key] = recording
            self.trace = trace
        finally:
            self._step_before = key
            following = None if key is None else self._programs.get(self._after.get(key, key))
            # Events differ between ranks if their data decides which units they skip. The program remains valid.
            if key is None and program is not None:
                following = program
            self._begin_step(following)

    def forget(self) -> None:
        """Forget the recording, because a pass has failed. The rest of this step follows no placement."""
        self._begin_step(None)
        self._step_before, self._whole = None, False

    def _begin_step(self, program: RecordedStep | None) -> None:
        self._recording, self._program = self._new_step(), program
        self._grown, self._alike, self._whole = False, True, True
