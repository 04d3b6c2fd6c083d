"""Following a placement: units are fetched and dropped as it says, as long as steps need what it was made for.

A step that nobody has seen runs as without a placement, and is recorded. If all ranks have recorded the same, it is
placed, and when it is expected to come again, followed:

    step 1    runs "behind", is recorded    -> placed
    step 2    follows                       -> each moment is compared with the plan, on this rank alone
    step 3    needs something else          -> the ranks learn of it at the end of the pass, the rest runs "behind"
    step 4    runs "behind", is recorded    -> placed; what comes after what is remembered, so two orders take turns

All ranks must gather the same units in the same order. So a rank that skips a unit fetches it nevertheless, and one
that needs a unit which is neither there nor to come in this pass takes part in all that is to come, and then compares
with the others, which do that at the end of the pass. What each rank has recorded is compared there too, by a digest.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Protocol

from .ledger import Placement
from .moments import Kind, Trace
from .recorder import Need, Plan, Recorder

Needs = tuple[Need, ...]
"""What the moments of a step need."""


class Followed(Protocol):
    """A unit, as far as it is followed here."""

    number: int

    @property
    def freed(self) -> bool:
        """Whether the unit has no gathered parameters and no all-gather in progress."""

    def begin_gathering(self) -> None:
        """Begins to fetch the unit. All-gather over the group."""

    def expect(self) -> None:
        """Announces that the unit is fetched next, so that its shard can be prefetched from the disk."""

    def take_part(self) -> None:
        """Sends this rank's shard to the other ranks if this rank still has the unit. All-gather over the group."""

    def wait(self) -> None:
        """Waits until the unit is gathered."""

    def free(self) -> None:
        """Frees the gathered parameters of the unit."""


class Follower:
    """Records what steps need, and follows a placement of it.

    Args:
        units: The units, by number.
        recorder: Records.
        place: Makes a placement of a trace, with bytes that lie on the device throughout.
        resident: How many these are on this rank.
        most: The largest of all ranks' numbers, at each place of a list. A collective.
        compare: Compares the number of a unit with what the other ranks come to; raises where it is something else.
        busy: Whether a unit may not be dropped, as it runs, or its backward does.
        before: Called with a unit before something is moved for its backward, of ranks that skip it too.
        depart: Called before this rank takes part in all that is to come of a pass with a backward, and then compares.

    Attributes:
        trace: What the last whole step has needed; None before there was one.
        alone: Whether all ranks need in this pass what the plan does not know, so that nothing of the plan is left.
    """

    def __init__(
        self,
        units: Sequence[Followed],
        recorder: Recorder,
        *,
        place: Callable[[Trace, int], Placement],
        resident: int,
        most: Callable[[list[int]], list[int]],
        compare: Callable[[int], None],
        busy: Callable[[int], bool],
        before: Callable[[int], None] = lambda _: None,
        depart: Callable[[], None] = lambda: None,
    ) -> None:
        self._units, self._recorder, self._place, self._resident = tuple(units), recorder, place, resident
        self._most, self._compare, self._busy, self._before_moves = most, compare, busy, before
        self._depart = depart
        self._plans: dict[Needs, Plan] = {}  # by what a step needs
        self._after: dict[Needs, Needs] = {}  # by what a step needs, what the step behind it did
        self._before: Needs | None = None  # what the step before this one has needed, if all ranks know that
        self.trace: Trace | None = None
        self._plan: Plan | None = None
        self._position = 0  # the number of moments of the plan that are over
        self._late: set[int] = set()  # units that were to be dropped while they were in use
        self._departed, self._grown, self._alike, self._whole = False, False, True, True
        self.alone = False
        self._begin_step(None)

    @property
    def following(self) -> bool:
        """Whether the step under way follows a plan."""
        return self._plan is not None

    @property
    def is_over(self) -> bool:
        """Whether all passes of the plan that is followed have ended: what comes is not in it, as all ranks know."""
        return self._plan is not None and len(self._recorder.ends) >= len(self._plan.ends)

    def meet(self, kind: Kind, number: int) -> None:
        """A unit is needed. While a plan is followed, it is there afterwards, and what the plan drops is not.

        Args:
            kind: What happens.
            number: The unit.

        Raises:
            RuntimeError: The ranks need different units that the plan does not have. All of them raise.
        """
        if self._plan is None:
            return
        plan, unit = self._plan, self._units[number]
        to_come = range(self._position, self._end(plan))
        place = next((place for place in to_come if plan.needs[place] == (kind, number)), None)
        if place is None or self._departed:
            self._departed = True
            # A forward does not go on to moments of the backward, before which other ranks reduce gradients.
            within = takewhile(lambda place: kind == "backward" or plan.needs[place][0] != "backward", to_come)
            fetched = (place for place in within if (number, True) in plan.moves[place])
            place = next(fetched, None) if unit.freed else None
        if place is not None:
            self._move(plan, place + 1)
        if unit.freed:
            self._departed = True
            following = plan.needs[self._position : self._end(plan)]
            if not self.alone and (kind == "backward" or any(other == "backward" for other, _ in following)):
                self._depart()
            self._move(plan, self._end(plan))
            self._compare(number)
            self.alone = True
            if unit.freed:
                unit.begin_gathering()
        unit.wait()

    def note(self, kind: Kind, number: int, held: Sequence[int]) -> None:
        """The unit is there, and what was dropped for it is not.

        Args:
            kind: What happens.
            number: The unit.
            held: Further units that are needed, where no plan says so.
        """
        if self._plan is not None and not self._departed:
            place = self._position - 1
            held = self._plan.held[place]
            self._recorder.note(kind, number, tuple(held))
            self._grown |= self._recorder.others[-1] > self._plan.others[place]
        else:
            self._recorder.note(kind, number, tuple(held))

    def notes(self) -> tuple[int, ...]:
        """What the ranks compare of this one when a pass ends: four numbers, of which each gets the largest."""
        digest = self._recorder.digest // 4  # an int32 has room for it
        return int(self._departed), int(self._grown), digest, -digest

    def is_to_come(self, number: int) -> bool:
        """Whether other ranks may still come to a unit in this pass."""
        to_come = () if self._plan is None else self._plan.needs[self._position : self._end(self._plan)]
        return any(needed == number for _, needed in to_come)

    def before_end(self) -> None:
        """A pass is about to end: what the plan fetches in it still is fetched, as other ranks wait for it."""
        if self._plan is not None:
            self._move(self._plan, self._end(self._plan))

    def end_pass(self, told: Sequence[int]) -> None:
        """A pass has ended on all ranks.

        Args:
            told: The largest of each of their `notes`.
        """
        departed, grown, most, least = told
        self._recorder.end_pass()
        self._alike &= most == -least
        self._grown |= bool(grown)
        if departed:
            self.stop()

    def settle(self) -> None:
        """Between passes of a plan nothing is in use, so what was to be dropped while it was, is."""
        for number in self._late:
            self._units[number].free()
        self._late.clear()

    def stop(self) -> None:
        """The rest of this step runs without a plan, and is none to make a plan of."""
        self._plan, self._whole = None, False
        self._late.clear()

    def end_step(self) -> None:
        """The optimizer has stepped, and all units were dropped. Where all have recorded something new, it is placed.

        Raises:
            ValueError: The budget is too small for it; on every rank.
        """
        recorder, plan = self._recorder, self._plan
        recorder.cut()
        if not recorder.needs:
            return
        key = tuple(recorder.needs) if self._alike else None
        whole = self._whole and (plan is None or tuple(recorder.needs) == plan.needs)
        if key is not None and self._before is not None:
            self._after[self._before] = key
        try:
            if whole and key is not None and (plan is None or self._grown):
                *others, resident = self._most([*recorder.others, self._resident])
                if plan is not None:
                    others = list(map(max, others, plan.others))
                self._plans[key] = recorder.plan(self._place(recorder.trace(others), resident), others)
            if whole:
                self.trace = recorder.trace(recorder.others)
        finally:
            self._before = key
            following = None if key is None else self._plans.get(self._after.get(key, key))
            if key is None and plan is not None:  # data decides on each rank what it skips
                following = plan
            self._begin_step(following)

    def forget(self) -> None:
        """A pass has failed: what was recorded is of no use, and the rest of this step runs without a plan."""
        self._begin_step(None)
        self._before, self._whole = None, False

    def _begin_step(self, plan: Plan | None) -> None:
        self._recorder.clear()
        self._plan = plan
        self._position = 0
        self._late.clear()
        self._departed, self._grown, self._alike, self._whole = False, False, True, True
        self.alone = False

    def _end(self, plan: Plan) -> int:
        """The number of the moment behind the pass under way."""
        passes = len(self._recorder.ends)
        return plan.ends[passes] if passes < len(plan.ends) else len(plan.needs)

    def _move(self, plan: Plan, stop: int) -> None:
        """Fetches and drops what the plan says of all moments before one."""
        for number in sorted(self._late):
            self._drop(number)
        for place in range(self._position, stop):
            kind, needed = plan.needs[place]
            if kind == "backward":
                self._before_moves(needed)
            for number, fetch in plan.moves[place]:
                if not fetch:
                    self._drop(number)
                    continue
                self._late.discard(number)
                unit = self._units[number]
                if unit.freed:
                    unit.begin_gathering()
                else:
                    unit.take_part()
            self._position = place + 1
        fetches = (number for moves in plan.moves[self._position :] for number, fetch in moves if fetch)
        following = next(fetches, None)
        if following is not None:
            self._units[following].expect()

    def _drop(self, number: int) -> None:
        """Drops a unit, or as soon as it is not in use any more."""
        if self._busy(number):
            self._late.add(number)
        else:
            self._late.discard(number)
            self._units[number].free()
