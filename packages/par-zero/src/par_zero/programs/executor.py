"""The executor of stage 3: it follows the program of each pass, by two rules for events and one rule for departures.

1. When an event happens, a rank first executes every program entry before this event, in order. A rank that skips a
   unit therefore still gathers and frees it with the other ranks, and the same units are gathered on all ranks. A rank
   delays a `free` only while it uses the unit. It then sends its shard when the other ranks gather the unit again.
2. A chunk is due at its `reduce` entry. Its reduction begins in turn, when all gradients have arrived that will arrive.
   If `Overlap(inflight=n)` bounds reductions, the entry also begins all but the last n of those that are due, with the
   gradients that have arrived, and waits for them. Gradients that arrive later are reduced at the end of the pass.
3. A rank departs from the program when it needs a unit that is neither gathered nor in the rest of the program. It
   executes the rest of the program for the other ranks. If another rank may wait for reductions of this pass, it also
   begins them, with zeros. It then compares with the other ranks which unit it needs. If all ranks need the same unit,
   they continue: they compare before each gather until the pass ends, and learn the new trace. If not, all ranks raise.

No rank waits forever in a pass with a program, for four reasons:

- All ranks issue the collectives of a pass in the order of the program (rule 1). A reduction that waits for a gradient
  begins later than its entry, but reductions have a communicator of their own, and keep their order.
- A rank waits for a reduction only if its bound is reached, at the entry of a later reduction. Every other rank reaches
  this entry, because the waiting rank has issued everything before it, and begins the reduction there at the latest.
  A rank may begin a reduction before its entry only if nothing is left to do before the entry.
- A rank leaves this order only after the last program entry (rule 3). Its next collective is a comparison.
- Every other rank reaches the same comparison, because it also departs or its pass ends, and each pass ends with a
  comparison. All comparisons have the same shape, so a comparison of units pairs with a comparison of ends. Before it,
  another rank may wait for a reduction. The departed rank has begun this reduction too (rule 3).

A pass without a program runs as if all ranks had departed at its beginning. The ranks compare before each gather, and
how many chunks have all their gradients. All ranks then begin those that are ready on every rank.

In such a pass the ranks may need different units, because the data decides which units run. All ranks then gather the
unit that comes first among those that they need, in the order of registration, and compare again. A rank that has
reached its end joins these gathers, too. Each comparison brings at least one rank to its next event, so the pass ends.
The program of later passes contains the units of all ranks.
"""

from collections.abc import Callable, Sequence
from itertools import chain

import torch

from .._unit import Unit
from ..reduce.reducer import Reducer
from .agreement import Agreement, Compared, PassEnd
from .book import Pass, PassBook, PassKind
from .compiler import ROOT, find_event, over_at
from .entries import BACKWARD, EVENT_NAMES, PassAction, PassEvent, event_of

_BEGINS = {
    "forward": "begins a forward",
    "evaluation": "begins a forward without gradients",
    "backward": "begins a backward through an earlier forward",
}
"""Texts for messages: how a pass begins."""


class Executor:
    """The object that gathers and frees the units of one module.

    Args:
        units: Units, the root unit first.
        book: Programs of earlier passes.
        agreement: Comparisons with the other ranks.
        reducer: Reducer that begins reductions between gathers.

    Attributes:
        on_next: Function that is called with the next unit to gather, so that its shard can be prefetched from disk.
    """

    def __init__(self, units: Sequence[Unit], book: PassBook, agreement: Agreement, reducer: Reducer) -> None:
        self._units, self._book, self._agreement, self._reducer = tuple(units), book, agreement, reducer
        reducer.order.expect_last({chunk.number for chunk in units[ROOT].chunks})
        self._pass: Pass | None = None
        self._late: set[int] = set()  # units that the program freed while this rank used them
        # Units that return the same tensor begin backward together: the next event must not free the first of them.
        self._mark: object = None  # identity of the tensor whose gradient arrived last
        self._together: set[int] = set()  # units that returned this tensor
        self._graphed = False
        self._at_backward = 0  # number of compared gathers when the latest backward began
        self.on_next: Callable[[Unit], None] | None = None

    @property
    def stays(self) -> bool:
        """Whether a program keeps units gathered between passes."""
        return self._book.stays

    def par_doing(self) -> str:
        """Return the event of this rank and its position in the pass, in words; see `par_groups.attributes.DOING`."""
        current = self._pass
        if current is None or not current.trace:
            return "between two passes at stage 3"
        event, program = current.trace[-1], current.program
        place = f"event {current.at} of {len(program.trace)} of the pass" if program else "in a pass without a program"
        return f"in the {EVENT_NAMES[event.op]} of {self._units[event.unit].name} at stage 3, {place}"

    def note(self, call: str) -> None:
        """Record a call that all ranks make together: see `par_groups.CallWatch.note`."""
        self._agreement.calls.note(call)

    def begin_backward(self) -> None:
        """Compare the ranks at the beginning of backward, if the pass has no program.

        Raises:
            RuntimeError: Another rank still gathers units in forward. All ranks raise.
        """
        current = self._pass
        # A module may communicate within its own backward, before this rank gathers again. A rank that is still in
        # forward would never reach that exchange. A pass that gathered nothing since has nothing to compare: its units
        # stay from an earlier pass.
        if current is not None and current.program is None and len(current.shared) > self._at_backward:
            while (met := self._agreement.compare(PassEnd.FORWARD, joins=current.learns)).comes >= 0:
                self._join(current, met)
            self._at_backward = len(current.shared)

    def begin_unit_backward(self, unit: Unit, mark: object, *, graphed: bool) -> None:
        """Begin the backward of a unit, together with all units that returned the same tensor.

        Args:
            unit: Unit whose backward begins.
            mark: Identity of the tensor whose gradient has arrived.
            graphed: Whether backward creates a graph. A later backward needs the parameters, so no unit is freed.
        """
        self._together = {*self._together, unit.number} if mark is self._mark else {unit.number}
        self._mark, self._graphed = mark, graphed

    def meet(self, event: PassEvent, *, in_backward: bool) -> None:
        """Execute the program up to an event. Afterwards the unit of the event is gathered.

        Args:
            event: Event that happens on this rank.
            in_backward: Whether the pass has reached its backward.

        Raises:
            RuntimeError: The ranks need different units that are in no program. All ranks raise.
        """
        current = self._pass or self._begin_pass(event, in_backward=in_backward)
        unit = self._units[event.unit]
        current.trace.append(event)
        program = current.program
        if in_backward:
            self._reducer.begin()  # chunks that were due before, and whose last gradients have arrived since
        place = None if program is None else find_event(program.trace, event, current.at)
        if place is not None and place > current.at:
            self._follow(current, place)
        if self._late:
            self._free_late(current)
        if program is not None and place is not None:
            current.at = place + 1
            if actions := program.actions[place]:
                self._act(current, actions)
            if in_backward:
                self._allow_early(current)
        elif program is None:
            self._free_over(current, event)
        # A late unit is full on this rank only: the other ranks have freed it and would gather it with a collective.
        missing = unit.freed or event.unit in self._late
        # A pass that learns records all events in one order, equal on all ranks. Units that stay gathered need none.
        if missing or (current.learns and not event.keeps):
            self._depart(current)
            number = event.number(len(self._units))
            while (met := self._agreement.meet(event, gathers=missing, joins=current.learns)).comes != number:
                self._join(current, met)
            current.shared.append(event)
            # Rule 2 executed the rest of the program, which may have gathered the unit.
            if met.gathers and (current.learns or unit.freed or event.unit in self._late):
                self._act(current, [PassAction("gather", event.unit)])
        if event.keeps:
            current.kept.add(event.unit)
        if event.op == BACKWARD and event.unit not in current.begun:
            current.begun.append(event.unit)
        unit.wait()
        unit.note(event.op)
        if self.on_next is not None:
            self._announce_next(current, self.on_next)
        self._book.note(current, event, place, self._units)

    def finish_program(self) -> None:
        """Execute the rest of the program, which other ranks may need even if this rank does not."""
        if self._pass is not None and self._pass.program is not None:
            self._follow(self._pass)
            # Before the comparison: a rank that departs has begun these, too. Without a program, no rank begins any
            # reduction before all ranks are known to end backward.
            self._reducer.reduce_rest()

    def end_pass(self, end: PassEnd, flags: Sequence[bool] = ()) -> list[bool]:
        """End a pass together with all ranks. All-reduces a few int32 numbers.

        Args:
            end: Way in which the pass ends.
            flags: Flags to combine over the ranks. Default: none.

        Returns:
            One boolean per flag: whether any rank has set it.

        Raises:
            RuntimeError: The ranks end the pass differently, or some ranks need another unit. All ranks raise.
        """
        self.finish_program()
        current = self._pass
        # Padding: the flags of the book come last, also if a rank ends the pass in another way, with fewer flags.
        own = self._agreement.flags - len(self._book.flags)
        room = [False] * (own - len(flags))
        digest = 0 if current is None else current.digest >> 2  # fits into an int32
        given = [*flags, *room, *self._book.flags]
        joins = current is not None and current.learns
        # Only a pass without a program joins the events of other ranks.
        while (compared := self._agreement.compare(end, digest, given, joins=joins)).comes >= 0 and current is not None:
            self._join(current, compared)
        if current is not None:
            self._book.end_pass(current, alike=compared.alike, flags=compared.flags[own:])
        self.forget_pass()
        return compared.flags[: len(flags)]

    def end_step(self) -> None:
        """End the step after the optimizer has updated the parameters and all units were freed."""
        # A forward without a backward has not ended its pass. All units were freed, so its program no longer applies.
        if self._pass is not None:
            self._pass.leave_program()
        self._late.clear()
        self._book.end_step()

    def end_backward(self) -> None:
        """Clear the state of a backward. Its pass continues if units stay gathered for another backward."""
        if self._pass is not None:
            self._pass.begun.clear()
        self._mark, self._graphed = None, False
        self._together.clear()

    def settle(self) -> None:
        """Free the units whose `free` was delayed. No unit is in use between two passes."""
        for number in self._late:
            self._units[number].free()
        self._late.clear()

    def stop(self) -> None:
        """Follow no program for the rest of the step, because the caller has freed the gathered units."""
        self._late.clear()
        self._book.stop()

    def forget_pass(self) -> None:
        """Forget the current pass, which is in progress or has ended."""
        self.end_backward()
        self._pass, self._at_backward = None, 0

    def forget(self) -> None:
        """Forget a pass that has failed, and the recording of the step."""
        self.forget_pass()
        self._late.clear()
        self._book.forget()

    def _begin_pass(self, event: PassEvent, *, in_backward: bool) -> Pass:
        forward = "forward" if torch.is_grad_enabled() else "evaluation"
        kind = PassKind("backward" if in_backward else forward, event.keeps)
        # The step has more passes than its program. All ranks count the same passes, so all free their units here.
        if self._book.is_over:
            for unit in self._units:
                unit.free()
            self.stop()
        self.note(_BEGINS[kind.begins_with] + (" within no_sync() or summon()" if kind.keeps else ""))
        start = frozenset(unit.number for unit in self._units if unit.chunks and not unit.freed)
        program = self._book.look_up(kind, start)
        self._pass = Pass(kind=kind, program=program, kept=set(start))
        self._reducer.order.follow(() if program is None else chain.from_iterable(program.reductions))
        return self._pass

    def fail(self) -> None:
        """Execute the rest of the program for the other ranks, because the pass has failed here, and report it."""
        current = self._pass
        if current is not None and current.program is not None:
            self._reducer.order.early = ()
            self._follow(current, reduce=self._reducer.begin_failed)
            # Another rank begins the chunks that follow no program before its comparison, too, and may wait for them.
            if current.kind.begins_with != "evaluation":
                self._reducer.begin_failed(None)
        self._agreement.fail()

    def _follow(self, current: Pass, stop: int | None = None, *, reduce: Callable[[int], None] | None = None) -> None:
        """Execute the actions before events that this rank skips, for the other ranks.

        Args:
            current: Pass in progress.
            stop: Index of the first event that is not skipped. Default: all events are.
            reduce: Function that is called in place of `Reducer.reduce`. Default: none.
        """
        actions = () if current.program is None else current.program.actions
        for place in range(current.at, len(actions) if stop is None else stop):
            current.at = place + 1
            self._act(current, actions[place], reduce)

    def _allow_early(self, current: Pass) -> None:
        """Let the reducer begin the reductions that come next in the program, as soon as their gradients arrive."""
        # Nothing comes between, as the actions before an event begin with its reductions. So the order of all
        # collectives is the same.
        program = current.program
        if program is not None:
            is_last = current.at == len(program.trace)
            self._reducer.order.early = None if is_last else program.reductions[current.at]

    def _depart(self, current: Pass) -> None:
        """Leave the program by rule 3: execute the rest of it for the other ranks, and begin the reductions."""
        if current.program is None:
            return
        self._reducer.order.early = ()
        # Without a bound no rank waits for a reduction before its pass ends. An evaluation reduces nothing.
        if current.kind.begins_with != "evaluation" and self._reducer.is_bounded:
            self._follow(current, reduce=self._reducer.begin_empty)
            self._reducer.begin_empty(None)
        else:
            self._follow(current, reduce=lambda _: None)
            self._reducer.hold()
        current.leave_program()

    def _join(self, current: Pass, met: Compared) -> None:
        """Record an event of other ranks, and gather its unit with them, in a pass whose events no rank knows yet.

        Args:
            current: Pass in progress.
            met: Result of a comparison, which names the event.
        """
        event = event_of(met.comes, len(self._units))
        current.shared.append(event)
        if not met.gathers:
            return
        unit = self._units[event.unit]
        was_freed = unit.freed
        self._act(current, [PassAction("gather", event.unit)])
        unit.wait()
        if event.keeps:
            current.kept.add(event.unit)
        elif was_freed:
            unit.free()

    def _act(self, current: Pass, actions: Sequence[PassAction], reduce: Callable[[int], None] | None = None) -> None:
        """Execute actions of the program: see `_follow`."""
        for action in actions:
            if action.op == "reduce":
                (reduce or self._reducer.reduce)(action.of)
                continue
            unit = self._units[action.of]
            if action.op == "free":
                if self._is_busy(current, unit):
                    self._late.add(unit.number)
                else:
                    unit.free()
                continue
            self._late.discard(unit.number)
            if unit.freed:
                unit.begin_gathering()
            else:
                # This rank used the unit while the other ranks freed it. It needs no data, but its shard is needed.
                unit.join_gather()

    def _free_late(self, current: Pass) -> None:
        for number in [number for number in self._late if not self._is_busy(current, self._units[number])]:
            self._late.discard(number)
            self._units[number].free()

    def _free_over(self, current: Pass, event: PassEvent) -> None:
        """Free the units that the pass no longer needs, if no program decides it."""
        if event.keeps:
            return
        whole = [unit.number for unit in self._units if unit.chunks and unit.gathered]
        # The modules around the unit run as well, and any code may read a parameter of the root.
        in_use = {ROOT, event.unit, *self._units[event.unit].outer}
        for number in over_at(event, whole, current.begun, current.kept):
            if number not in in_use and not self._is_busy(current, self._units[number]):
                self._units[number].free()

    def _is_busy(self, current: Pass, unit: Unit) -> bool:
        """Return whether a unit must stay: it runs, is kept, or more gradients of it will arrive."""
        if unit.running or unit.kept or self._graphed or unit.number in self._together:
            return True
        # Autograd may still compute an input gradient with these parameters until their own gradients have arrived.
        return unit.number in current.begun and not all(self._reducer.has_all_gradients(chunk) for chunk in unit.chunks)

    def _announce_next(self, current: Pass, announce: Callable[[Unit], None]) -> None:
        """Call `announce` with the unit that the program gathers next, if any."""
        coming = () if current.program is None else chain.from_iterable(current.program.actions[current.at :])
        gathers = (action for action in coming if action.op == "gather")
        if (following := next(gathers, None)) is not None:
            announce(self._units[following.of])
