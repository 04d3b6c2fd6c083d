"""Follows the program of each pass at stage 3. One rule for events, one for departing.

1. When an event comes, everything that the program has before it is done, in its order, on every rank. So a rank that
   skips a unit gathers and frees it with the others, and what is whole is alike on all ranks. A rank delays a `free`
   only while it uses the unit, and then sends its share where the others gather the unit again.
2. A rank that needs a unit which is neither whole nor to come does the rest of the program for the others, begins the
   reductions of the pass with nothing in them if others may wait for those, and compares with the others which unit it
   needs. They compare at the end of the pass. If all have departed alike, they go on, compare each gathering from
   there on, and learn. If not, the comparison differs, and all raise.

No rank waits for ever: collectives of one pass have one order on all ranks, that of the program (rule 1). A rank leaves
that order at one place alone, behind its last entry (rule 2), and there it meets all others, who come there too when
their pass ends, or depart themselves. A comparison is one all-reduce of as many numbers, whatever it is for. In between
a rank may wait for a reduction of this one, where reductions are bounded: therefore rule 2 begins them.

A pass of which nothing is known runs as if its ranks had departed at its beginning: each gathering is compared first.

In backward a rank begins reductions when an event comes, before the actions of that event: of all that ran behind it,
used or not. So does a rank that skips the event. So all ranks begin gatherings and reductions in one order. They have
communicators of their own nevertheless: where all ranks share all chunks, a reduction begins as soon as its gradients
are complete.
"""

from collections.abc import Callable, Sequence

from .._unit import Unit
from ..reduce.reducer import Reducer
from .agreement import FLAGS, Agreement, PassEnd
from .book import Book, Pass, PassKind
from .compiler import ROOT, find_event, over_at
from .entries import BACKWARD, PassEvent, PassSegment, UnitAction


class Executor:
    """Gathers and frees the units of one module.

    Args:
        units: The units, the root's first.
        book: Which program a pass follows.
        agreement: What the ranks compare.
        reducer: Begins reductions between gatherings.

    Attributes:
        on_skipped: Called with a unit by number when other ranks come to its backward, and this one does not.
        on_next: Called with the unit that is gathered next, whose shares can be read from a disk meanwhile.
    """

    def __init__(self, units: Sequence[Unit], book: Book, agreement: Agreement, reducer: Reducer) -> None:
        self._units, self._book, self._agreement, self._reducer = tuple(units), book, agreement, reducer
        self._pass: Pass | None = None
        self._late: set[int] = set()  # units that were to be freed while they were in use
        self._mark: object = None  # of what the units returned whose backward began last
        self._together: set[int] = set()  # those units
        self._graphed = False
        self._at_backward = 0  # how many gatherings were compared when the latest backward began
        self.on_skipped: Callable[[int], None] = lambda _: None
        self.on_next: Callable[[Unit], None] | None = None

    @property
    def is_following(self) -> bool:
        """Whether the pass under way follows a program, or a program says what stays whole until the next pass."""
        return self._book.stays if self._pass is None else self._pass.program is not None

    @property
    def stays(self) -> bool:
        """Whether units stay whole between passes, as a program says."""
        return self._book.stays

    def begin_backward(self) -> None:
        """Come to the backward of a pass, in which a rank may wait for others in a unit before it gathers again.

        Nothing is compared where nothing was gathered, as where units stay from an earlier pass.

        Raises:
            RuntimeError: In a pass that is not known, other ranks need a unit before theirs. All of them raise.
        """
        current = self._pass
        if current is not None and current.program is None and len(current.shared) > self._at_backward:
            self._at_backward = len(current.shared)
            self._agreement.compare(PassEnd.FORWARD)

    def begin_unit_backward(self, unit: Unit, mark: object, *, graphed: bool) -> None:
        """The backward of a unit begins: what else has begun with the same tensor is not over.

        Args:
            unit: The unit.
            mark: What stands for the tensor whose gradient has come.
            graphed: Whether the backward makes a graph, through which a later one goes: nothing is freed.
        """
        self._together = {*self._together, unit.number} if mark is self._mark else {unit.number}
        self._mark, self._graphed = mark, graphed

    def meet(self, event: PassEvent, kind: PassKind, *, in_backward: bool) -> None:
        """A unit is needed: do what the program has before that. The unit is whole afterwards.

        Args:
            event: What begins.
            kind: What pass it is, if it begins with this event.
            in_backward: Whether the pass has come to its backward.

        Raises:
            RuntimeError: The ranks need different units that no program has. All of them raise.
        """
        current = self._pass or self._begin_pass(kind)
        unit = self._units[event.unit]
        current.record(event)
        segments = () if current.program is None else current.program.segments
        place = find_event(segments, event, current.at)
        if place is not None:
            self._follow(current, segments[:place])
        # Where each gathering is compared first, a rank that waits for a reduction could keep others from comparing. It
        # needs no bound there: a comparison waits for the device, so that what was reduced before is there.
        self._reducer.lift_bound(lifted=current.program is None)
        if in_backward:
            self._reducer.begin()
        self._free_late(current)
        if place is not None:
            current.at = place + 1
            self._act(current, segments[place].actions)
        elif current.program is None:
            self._free_over(current, event)
        if unit.freed or event.unit in self._late:  # which the other ranks have freed
            self._depart(current)
            self._agreement.meet(event.unit)
            current.shared.append(event)
            if unit.freed or event.unit in self._late:
                self._act(current, [UnitAction("gather", event.unit)])
        if event.keeps:
            current.kept.add(event.unit)
        if event.op == BACKWARD and event.unit not in current.begun:
            current.begun.append(event.unit)
        unit.wait()
        unit.note(event.op)
        if self.on_next is not None:
            self._announce_next(current, self.on_next)
        self._book.note(current, event, place, self._units)

    def is_to_come(self, number: int) -> bool:
        """Return whether other ranks may still come to a unit in this pass which this rank has not called."""
        current = self._pass
        if current is None or current.program is None:
            return True
        return any(segment.event.unit == number for segment in current.program.segments[current.at :])

    def finish_program(self) -> None:
        """Do what is still to come in this pass: this rank has no use of it, and other ranks may have."""
        if self._pass is not None and self._pass.program is not None:
            self._follow(self._pass, self._pass.program.segments)

    def end_pass(self, end: PassEnd, flags: Sequence[bool] = ()) -> list[bool]:
        """End a pass together with all ranks. An all-reduce of a few numbers.

        Args:
            end: How it ends.
            flags: What the ranks are to know of each other, at most two.

        Returns:
            For each flag, whether any rank has set it.

        Raises:
            RuntimeError: The ranks end differently, or some need another unit. All of them raise.
        """
        self.finish_program()
        current = self._pass
        room = [False] * (FLAGS - len(flags))  # as other ranks may end the pass in another way
        digest = 0 if current is None else current.digest >> 2  # an int32 has room for it
        alike, told = self._agreement.compare(end, digest, [*flags, *room, *self._book.flags])
        if current is not None:
            self._book.end_pass(current, alike=alike, flags=told[FLAGS:])
        self.forget_pass()
        return told[: len(flags)]

    def end_step(self) -> None:
        """The optimizer has stepped, and whatever was whole is freed."""
        if self._pass is not None and self._pass.program is not None:  # a forward without a backward
            self._pass.shared, self._pass.program = list(self._pass.program.trace), None
        self._late.clear()
        self._book.end_step()

    def end_backward(self) -> None:
        """A backward has ended, and its pass goes on if units stay whole for another one."""
        if self._pass is not None:
            self._pass.begun.clear()
        self._mark, self._graphed = None, False
        self._together.clear()

    def settle(self) -> None:
        """Between two passes nothing is in use: free what was to be freed while it was."""
        for number in self._late:
            self._units[number].free()
        self._late.clear()

    def stop(self) -> None:
        """Follow no program for the rest of the step, as what is whole was freed."""
        self._late.clear()
        self._book.stop()

    def forget_pass(self) -> None:
        """Forget the pass under way, or that has ended."""
        self.end_backward()
        self._pass, self._at_backward = None, 0

    def forget(self) -> None:
        """Forget a pass that has failed, and what was recorded of the step."""
        self.forget_pass()
        self._late.clear()
        self._book.forget()

    def _begin_pass(self, kind: PassKind) -> Pass:
        if self._book.is_over:
            for unit in self._units:
                unit.free()
            self.stop()
        start = frozenset(unit.number for unit in self._units if unit.chunks and not unit.freed)
        self._pass = Pass(kind=kind, start=start, program=self._book.look_up(kind, start), kept=set(start))
        return self._pass

    def _follow(self, current: Pass, segments: Sequence[PassSegment]) -> None:
        """Do what other ranks do in segments that this rank skips."""
        for place in range(current.at, len(segments)):
            event, actions = segments[place].event, segments[place].actions
            current.at = place + 1
            if event.op == BACKWARD:  # before anything is waited for: another rank may wait for these reductions first
                self.on_skipped(event.unit)
            self._act(current, actions)

    def _depart(self, current: Pass) -> None:
        """This rank needs what its program does not have: it does the rest of that for the other ranks."""
        if current.program is None:
            return
        segments = current.program.segments
        bounded = current.kind.begins_with != "evaluation" and self._reducer.is_bounded
        for place in range(current.at, len(segments)):
            event, actions = segments[place].event, segments[place].actions
            current.at = place + 1
            if event.op == BACKWARD and bounded:
                # What other ranks reduce behind a later backward none of them can have begun yet.
                later = {each.event.unit for each in segments[place + 1 :] if each.event.op == BACKWARD} - {event.unit}
                self._reducer.begin_empty({chunk.number for unit in later for chunk in self._units[unit].chunks})
            elif event.op == BACKWARD:
                self.on_skipped(event.unit)
            self._act(current, actions)
        if bounded:
            self._reducer.begin_empty()
        current.shared, current.program = list(current.program.trace), None

    def _act(self, current: Pass, actions: Sequence[UnitAction]) -> None:
        """Do some actions of the program."""
        for action in actions:
            unit = self._units[action.unit]
            if action.op == "free":
                if self._is_busy(current, unit):
                    self._late.add(unit.number)
                else:
                    unit.free()
                continue
            self._late.discard(unit.number)
            if unit.freed:
                unit.begin_gathering()
            else:  # it was in use when the other ranks freed it
                unit.take_part()

    def _free_late(self, current: Pass) -> None:
        for number in [number for number in self._late if not self._is_busy(current, self._units[number])]:
            self._late.discard(number)
            self._units[number].free()

    def _free_over(self, current: Pass, event: PassEvent) -> None:
        """Frees what is over, where no program says so."""
        if event.keeps:
            return
        whole = [unit.number for unit in self._units if unit.chunks and unit.gathered]
        in_use = {ROOT, event.unit, *self._units[event.unit].outer}
        for number in over_at(event, whole, current.begun, current.kept):
            if number not in in_use and not self._is_busy(current, self._units[number]):
                self._units[number].free()

    def _is_busy(self, current: Pass, unit: Unit) -> bool:
        """Whether a unit may not be freed: it runs, is kept, or gradients of it are still to come."""
        if unit.running or unit.kept or self._graphed or unit.number in self._together:
            return True
        return unit.number in current.begun and not all(self._reducer.has_all_gradients(chunk) for chunk in unit.chunks)

    def _announce_next(self, current: Pass, announce: Callable[[Unit], None]) -> None:
        """Tells which unit is gathered next."""
        for segment in () if current.program is None else current.program.segments[current.at :]:
            for action in segment.actions:
                if action.op == "gather":
                    announce(self._units[action.unit])
                    return
