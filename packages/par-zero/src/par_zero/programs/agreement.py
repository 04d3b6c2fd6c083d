"""Comparisons of the ranks at stage 3: which unit a rank needs next, or how it ends a pass."""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import torch
import torch.distributed as dist

from par_groups import agree

from .._collectives import largest_of
from .._unit import Unit
from ..reduce.reducer import Reducer
from ..reduce.refusals import refuse_steps
from ..watch.calls import RESET, ModuleCalls
from .entries import PassEvent, event_of


class PassEnd(IntEnum):
    """Ways to end a pass. The values are negative because a comparison also takes numbers of events, from 0 up."""

    BACKWARD = -1
    EVALUATION = -2
    UNREDUCED = -3
    FORWARD = -4
    FAILED = -5

    @property
    def text(self) -> str:
        """Text for error messages: an action of a rank that ends a pass this way."""
        return {
            PassEnd.BACKWARD: "ends backward",
            PassEnd.EVALUATION: "ends a forward without gradients",
            PassEnd.UNREDUCED: "ends a backward that reduces no gradients",
            PassEnd.FORWARD: "begins backward",
            PassEnd.FAILED: RESET,
        }[self]


_CANNOT_JOIN = 1 << 30
"""Added to the detail of a rank that cannot gather for others. It costs no number of its own in each comparison."""


def _with_steps(end: int, steps: int) -> int:
    """Return the number of a `PassEnd` after some steps of optimizers. 0 steps leave the end as it is."""
    return end - len(PassEnd) * steps


def _parted(number: int) -> tuple[PassEnd, int]:
    """Return the end and the steps of a number of `_with_steps`."""
    steps, end = divmod(-number - 1, len(PassEnd))
    return PassEnd(-1 - end), steps


class Compared(NamedTuple):
    """The result of a comparison.

    Args:
        alike: Whether all ranks passed the same detail.
        least: The smallest detail of all ranks.
        flags: One boolean per flag: whether any rank has set it.
        comes: Number that all ranks have passed, or the one that comes first: see `Agreement.compare`.
        gathers: Whether a rank that has passed the number `comes` has set the first two flags.
    """

    alike: bool
    least: int
    flags: list[bool]
    comes: int
    gathers: bool


class Agreement:
    """Comparisons of the ranks that gather together. Each comparison all-reduces a few int32 numbers over each group.

    Args:
        units: Units, by number.
        groups: Process groups for comparisons only. A comparison reduces over the groups one after the other, and so
            reaches all ranks.
        device: Device of the compared numbers.
        reducer: Reducer that begins the same reductions on all ranks before they raise.
        calls: Record of the calls since the ranks last agreed.
        flags: Number of flags in a comparison, two or more, the same on all ranks.

    Attributes:
        calls: Record of the calls since the ranks last agreed.
        flags: Number of flags in a comparison.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        groups: Sequence[dist.ProcessGroup],
        device: torch.device,
        reducer: Reducer,
        calls: ModuleCalls,
        *,
        flags: int = 2,
    ) -> None:
        self._units, self._groups, self._device, self._reducer = tuple(units), tuple(groups), device, reducer
        self.calls, self.flags = calls, flags
        self._has_refused = False  # whether the latest comparison has raised here

    def most(self, numbers: Sequence[int]) -> list[int]:
        """Return the elementwise maximum of the ranks' lists, by an all-reduce.

        Args:
            numbers: List of integers, with the same length on all ranks.
        """
        return largest_of(numbers, self._groups, self._device, torch.int64)

    def compare(self, what: int, detail: int = 0, flags: Sequence[bool] = (), *, joins: bool = False) -> Compared:
        """Compare the next step of this rank with all other ranks.

        Args:
            what: Number of the event for which this rank needs a unit, or a `PassEnd`.
            detail: A number from 0 to 2^30 - 1 that may differ between ranks.
            flags: Flags to combine over the ranks, at most the number that the constructor received.
            joins: Whether this rank can gather a unit for other ranks. If all ranks can, and some are at an event, the
                result names the event that comes first. All others join it, and compare again. Else what the ranks pass
                must be equal. Default: False.

        Raises:
            RuntimeError: The ranks need different units, end the pass differently, or have taken different numbers of
                steps since the last end of a pass. All ranks raise, except those whose pass has failed.
        """
        self._has_refused = False
        # A rank that has left out a step holds a shard of older weights than the others. A failed pass leaves the count
        # to the next pass.
        counts_steps = what < 0 and what != PassEnd.FAILED
        number = _with_steps(what, self.calls.steps) if counts_steps else what
        # Padding to one shape: another rank may compare something else, with another number of flags.
        first, second, *more = [*flags, *[False] * (self.flags - len(flags))]
        # The maximum of a number and of its negative shows in one all-reduce whether the number is equal on all ranks.
        # If it is equal, the lowest bit of the maximum is a flag that any rank has set. If not, all ranks raise.
        coded = detail if joins else detail + _CANNOT_JOIN
        # Ends come after all events, so that the lowest number is that of the event that comes first.
        events = 6 * len(self._units)
        place = number if number >= 0 else events - number
        numbers = [2 * place + first, -2 * place + second, coded, -coded, *more]
        most, least, most_detail, least_detail, *told = largest_of(numbers, self._groups, self._device)
        highest, lowest = most >> 1, -(least >> 1)
        if highest != lowest:
            if lowest < events and most_detail < _CANNOT_JOIN:
                return Compared(alike=False, least=0, flags=[], comes=lowest, gathers=bool(least & 1))
            self._refuse(number)
        elif what < 0 and what != PassEnd.FORWARD:
            self.calls.agree()
        if counts_steps:
            self.calls.steps = 0
        set_flags = [bool(flag) for flag in (most & 1, least & 1, *told)]
        alike, smallest = most_detail == -least_detail, -least_detail % _CANNOT_JOIN
        return Compared(alike, smallest, set_flags, what, gathers=bool(most & 1))

    def meet(self, event: PassEvent, *, gathers: bool, joins: bool) -> Compared:
        """Compare whether all ranks are at the same event, which is in no program.

        Args:
            event: Event of this rank.
            gathers: Whether this rank must gather the unit of the event.
            joins: Whether this rank can gather another unit for other ranks.

        Returns:
            The result of the comparison. It names the event that comes first, and whether its unit is gathered.

        Raises:
            RuntimeError: Some ranks need another unit, or end their pass, or cannot continue. All ranks raise.
        """
        reducer, departed = self._reducer, self._reducer.has_departed
        number = event.number(len(self._units))
        # If the ranks continue, they repeat the reductions of zeros with gradients. Ranks that had begun different
        # numbers of reductions would resume at different chunks.
        detail = reducer.begun if departed else reducer.count_ready()
        compared = self.compare(number, detail, [gathers, gathers], joins=joins)
        if not departed:
            # The ranks that gather together have done the same before, so all begin the same reductions here.
            if compared.gathers:
                reducer.reduce(*reducer.order.numbers[: compared.least])
        elif compared.alike:
            reducer.rejoin()
        else:
            reducer.begin_all(())
            raise RuntimeError(
                f"backward comes to {self._units[event.unit].name}, which no backward before needed there, when the "
                "ranks have begun different numbers of reductions; pass Overlap(inflight=...) with the number "
                "of all chunks, which bounds none, or stage=2"
            )
        return compared

    def fail(self) -> None:
        """Report to the other ranks that the pass of this rank has failed. Does not raise.

        A rank whose pass has not failed raises at its next comparison. It reaches this comparison, because this rank
        has begun every collective of the pass before.
        """
        # If a comparison has raised, it has raised on all ranks, and they leave the pass together.
        if not self._has_refused:
            self.compare(PassEnd.FAILED)
        self._has_refused = False

    def _refuse(self, number: int) -> None:
        """Raise on all ranks, with two ranks that differ, after all reductions in flight have completed.

        Does not raise on a rank whose pass has failed, because its caller has an error already.

        Args:
            number: Number of this rank in the comparison.
        """
        said = agree(None, number, *self._groups)
        # Reductions that only some ranks have begun would never complete, so every rank begins the same number first.
        self._reducer.begin_all(self._groups)
        self.calls.agree()  # ranks that have come to different ends continue from here
        if number == PassEnd.FAILED:
            return
        self._has_refused = True
        failed = [rank for rank in said if said[rank] == PassEnd.FAILED]
        if failed:
            other = min(rank for rank in said if said[rank] != PassEnd.FAILED)
            raise RuntimeError(
                f"rank {min(failed)} calls par_zero.reset where rank {other} {self._text(said[other])}, because its "
                f"pass has failed; call par_zero.reset(module) on all ranks, and see the error of rank {min(failed)}"
            )
        first, other = min(said), min((rank for rank in said if said[rank] != said[min(said)]), default=min(said))
        if said[first] < 0 and said[other] < 0:
            (_, steps), (_, others) = _parted(said[first]), _parted(said[other])
            if steps != others:
                self.calls.steps = 0  # the error is raised once
                refuse_steps({first: steps, other: others})
        raise RuntimeError(
            f"rank {other} {self._text(said[other])} where rank {first} {self._text(said[first])}, and at stage 3 all "
            "ranks gather a unit together; make one unit of what not all ranks run, units=..., or pass stage=2"
        )

    def _text(self, number: int) -> str:
        return (
            f"runs {self._units[event_of(number, len(self._units)).unit].name}"
            if number >= 0
            else _parted(number)[0].text
        )
