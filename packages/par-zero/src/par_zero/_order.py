"""The order in which units are gathered at stage 3: learned step by step, then a contract.

An all-gather needs all ranks of its group, in one order. But data may decide, on each rank for itself, which units run.
So the first pass is supervised: before each all-gather the ranks compare which unit they need. What they needed is the
contract of later passes of that kind. Then nothing is compared: a rank that skips a unit still gives the others its
share of it, and one that needs a unit that is not to come gives them all that is to come, and then compares, which the
others do at the end of the pass. There they learn of each other: all that need the same go on and learn it, or else all
of them raise. A rank takes part before it enters a unit for which the others gather, though it has that whole: in there
they may wait for each other, as in an exchange of rows between experts.

    first pass      compare 1 | gather 1 | compare 2 | gather 2 | compare "backward" | ... | compare "end"
    later passes                gather 1               gather 2                      | ... | compare "end"

In later passes the next one begins before it is needed.

In backward a rank begins reductions when it comes to a unit: of all that ran behind that unit, used or not. It does so
behind the gathering for this unit and before the next one, and so does a rank that skips the unit. So all ranks begin
gatherings and reductions in one order. They have communicators of their own nevertheless: where all ranks share all
chunks, a reduction begins as soon as its gradients are complete.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from functools import partial
from operator import itemgetter
from typing import NamedTuple, NoReturn
from zlib import crc32

import torch
import torch.distributed as dist

from par_groups import agree

from ._collectives import all_reduce
from ._reduce import Reducer
from ._unit import State, Unit
from .placement.follow import Follower

Numbers = tuple[int, ...]
"""Units by number, in the order in which they are gathered."""


class Gathering(NamedTuple):
    """One of the gatherings of a pass.

    Args:
        number: The unit.
        in_backward: Whether it is for its backward.
        entry: How often this rank has entered the unit before in this pass, in that direction; -1 where it enters a
            module within alone.
    """

    number: int
    in_backward: bool
    entry: int


_ENTRY = itemgetter(2)

Contract = tuple[Gathering, ...]
"""Units in the order in which they are gathered, and for which of their entries."""

_CONTRACTS = 100
"""How many contracts are kept: a program whose passes are drawn at random has a new one after each."""

_FLAGS = 2
"""For how many flags there is room in a comparison."""


class End(IntEnum):
    """How a pass ends, as it is compared with the numbers of units, which are 0 or more."""

    BACKWARD = -1
    EVALUATION = -2
    UNREDUCED = -3
    FORWARD = -4

    @property
    def text(self) -> str:
        """What a rank does that ends a pass so."""
        return {
            End.BACKWARD: "ends backward",
            End.EVALUATION: "ends a forward without gradients",
            End.UNREDUCED: "ends a backward that reduces no gradients",
            End.FORWARD: "begins backward",
        }[self]


class Kind(NamedTuple):
    """What the program decides about a pass, and so is alike on all ranks. Each kind has an order of its own.

    Args:
        begins_with: What needs its first unit: "forward", "backward" or "evaluation".
        kept: Whether units stay gathered, under `no_sync`.
    """

    begins_with: str
    kept: bool


KINDS = {
    (begins_with, kept): Kind(begins_with, kept)
    for begins_with in ("forward", "backward", "evaluation")
    for kept in (False, True)
}
"""All kinds by their fields, as each call of a module asks for one."""


class Order:
    """The order in which the units of one module are gathered.

    A pass here is all from one comparison of its end to the next: of several microbatches under `no_sync` it is one.

    Args:
        units: The units.
        groups: The ranks that share, by communicators that have no other use: over one after the other all compare.
        device: Where small numbers lie that all ranks compare.
        reducer: Begins reductions between gatherings, and brings all ranks to the same of them before they raise.

    Attributes:
        has_within: Whether the contract of the pass has gatherings for modules within a unit, not for the unit itself.
        on_skipped: Called with a unit by number when other ranks come to it in backward, and this one does not.
    """

    def __init__(
        self, units: Sequence[Unit], groups: Sequence[dist.ProcessGroup], device: torch.device, reducer: Reducer
    ) -> None:
        self._units, self._groups, self._device, self._reducer = tuple(units), tuple(groups), device, reducer
        self._contracts: dict[
            tuple[Kind, Numbers], Contract
        ] = {}  # by the pass before, as an actor's before a critic's
        self._candidates: dict[tuple[Kind, Numbers], Numbers] = {}  # others, until a second pass confirms them
        self._latest: dict[Kind, Contract] = {}  # the contracts after a pass that was never seen before
        self._before: Numbers = ()
        self._follower: Follower | None = None
        self._data_decides = False  # whether the ranks have skipped different units in any pass
        self.on_skipped: Callable[[int], None] = lambda _: None
        self.forget()

    def follow(self, follower: Follower) -> None:
        """Has the ranks tell each other at the end of each pass how they follow a placement."""
        self._follower = follower

    def compare(self, number: int) -> None:
        """Compares with all ranks that they need a unit which no placement has. An all-reduce of a few numbers.

        Args:
            number: The unit.

        Raises:
            RuntimeError: Some need another unit, or end their pass. All of them raise.
        """
        self._meet(number)

    def most(self, numbers: Sequence[int]) -> list[int]:
        """The largest that any rank has at each place of a list that is as long on all. An all-reduce."""
        largest = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        self._take_largest_(largest)
        return [int(number) for number in largest.tolist()]

    def _take_largest_(self, numbers: torch.Tensor) -> None:
        """Each number becomes the largest of all ranks."""
        for group in self._groups:
            all_reduce(numbers, group, dist.ReduceOp.MAX).wait()

    def forget(self) -> None:
        """Forgets the pass under way."""
        self._kind: Kind | None = None
        self._contract: Contract = ()
        self._for_entries: set[Gathering] = set()  # those of the contract
        self.has_within = False
        self._entries: Counter[tuple[int, bool]] = Counter()  # how often each was entered, forward and backward
        self._gathered: list[Gathering] = []  # as they were gathered in this pass
        self._needed: list[bool] = []  # of these, which were for this rank too
        self._ahead: int | None = None  # the place of what is on its way and not needed yet
        self._at_backward = 0  # how many were gathered when the latest backward began
        self._supervised = False

    def gather(self, unit: Unit, kind: Kind, *, in_backward: bool, enters: bool) -> None:
        """Makes the parameters of a unit whole, and begins to gather what comes next.

        Args:
            unit: The unit.
            kind: What pass it is, if it begins with this unit.
            in_backward: Whether the pass has come to its backward.
            enters: Whether the unit itself begins, and not a module within, or once more while it runs.

        Raises:
            RuntimeError: The ranks need different units. All of them raise.
        """
        if self._kind is None:
            latest = self._latest.get(kind, ())
            self._kind, self._contract = kind, self._contracts.get((kind, self._before), latest)
            self._for_entries = set(self._contract)
            self.has_within = -1 in map(_ENTRY, self._contract)
        # Most calls end here: the unit is there, because it runs already or stays. They must cost little.
        way, count = (unit.number, in_backward), -1
        if enters:
            count = self._entries[way]
            self._entries[way] = count + 1
        if unit.gathered:
            if (*way, count) in self._for_entries:
                self._pass_by(Gathering(*way, count))
            if self._ahead is None:
                if in_backward:
                    self._reducer.begin()
                return
        ahead = None if self._ahead is None else self._units[self._gathered[self._ahead].number]
        if ahead is unit and unit.state is not State.FREED and self._ahead is not None:
            self._needed[self._ahead], self._ahead = True, None
        if unit.gathered:
            self._begin_reductions(in_backward)
            return
        if unit.state is State.FREED:
            self._drop_ahead()
            self._come_to(Gathering(*way, count))
            unit.begin_gathering()
        self._begin_reductions(in_backward)
        unit.wait()
        self._begin_next()

    def _begin_reductions(self, in_backward: bool) -> None:
        """In backward, begins to reduce what the ranks have left behind."""
        if in_backward:
            self._reducer.begin()

    def begin_backward(self) -> None:
        """The pass comes to its backward, in which a rank may wait for the others in a unit before it gathers again.

        Nothing is compared where nothing was gathered, as where units stay from an earlier pass.

        Raises:
            RuntimeError: In the first pass, other ranks need a unit before theirs. All of them raise.
        """
        if self._supervised and len(self._gathered) > self._at_backward:
            self._at_backward = len(self._gathered)
            self._compare(End.FORWARD)

    def _pass_by(self, entry: Gathering) -> None:
        """Takes part in the gathering for an entry of a unit that is whole here, as this rank has skipped others.

        It does so before the unit runs, in which the other ranks may wait for it.
        """
        to_come = self._contract[len(self._gathered) :]
        if not self._supervised and entry in to_come:
            self._drop_ahead()
            self._skip(to_come[: to_come.index(entry) + 1])
            self._begin_reductions(entry.in_backward)
            self._begin_next()

    def _drop_ahead(self) -> None:
        """Frees what is on its way and is skipped."""
        if self._ahead is not None:
            skipped, self._ahead = self._gathered[self._ahead], None
            if skipped.in_backward:  # before it is waited for: another rank may wait for these reductions first
                self.on_skipped(skipped.number)
            self._units[skipped.number].free()

    def _come_to(self, entry: Gathering) -> None:
        """Takes part in what the other ranks gather before that of an entry, and notes this one."""
        if not self._supervised:
            to_come = self._contract[len(self._gathered) :]
            # A forward does not take a gathering of the backward: before that, other ranks reduce gradients.
            ways = [(gathering.number, gathering.in_backward) for gathering in to_come]
            way = entry.number, entry.in_backward
            skipped = ways.index(way) if way in ways else len(to_come)
            self._supervised = skipped == len(to_come)
            reduces = self._kind is not None and self._kind.begins_with != "evaluation"
            departs = self._supervised and bool(self._contract) and reduces and self._reducer.is_bounded
            self._skip(to_come[:skipped], departs=departs)
        if self._supervised:
            self._begin_reductions(entry.in_backward)
            self._meet(entry.number)
        self._note(entry, needed=True)

    def _meet(self, number: int) -> None:
        """Compares with all ranks that they need a unit which is not to come in this pass.

        Raises:
            RuntimeError: Some need another unit, or end their pass, or cannot go on from here. All of them raise.
        """
        alike, _, _ = self._compare(number, self._reducer.begun_with_gradients)
        if not alike:
            self._reducer.begin_all(0)
            self.forget()
            raise RuntimeError(
                f"backward comes to {self._units[number].name}, which no backward before needed there, when the ranks "
                "have begun different numbers of reductions; pass Overlap(inflight=...) with the number "
                "of all chunks, which bounds none, or stage=2"
            )
        self._reducer.rejoin()

    def _begin_next(self) -> None:
        """Begins to gather what comes next by contract, unless it is there still."""
        place = len(self._gathered)
        if not self._supervised and place < len(self._contract):
            unit = self._units[self._contract[place].number]
            if unit.state is State.FREED:
                self._ahead = place
                self._note(self._contract[place], needed=False)
                unit.begin_gathering()
                place += 1
            if place < len(self._contract):
                self._units[self._contract[place].number].expect()

    def _note(self, gathering: Gathering, *, needed: bool) -> None:
        self._gathered.append(gathering)
        self._needed.append(needed)

    def _skip(self, gatherings: Sequence[Gathering], *, departs: bool = False) -> None:
        """Gives the other ranks this one's shares of units that it has no need of.

        Args:
            gatherings: What is skipped.
            departs: Whether that is all that is to come, and this rank needs something else. Then it begins the
                reductions of the pass for the others, too, which may wait for them before they come to the end.
        """
        for place, gathering in enumerate(gatherings):
            if departs and gathering.in_backward:
                behind = {after.number for after in gatherings[place + 1 :]} - {gathering.number}
                self._reducer.begin_empty({chunk.number for number in behind for chunk in self._units[number].chunks})
            self._note(gathering, needed=False)
            skips = gathering.in_backward and not departs
            self._units[gathering.number].take_part(partial(self.on_skipped, gathering.number) if skips else _nothing)
        if departs:
            self._reducer.begin_empty()

    def is_to_come(self, number: int) -> bool:
        """Whether other ranks may still come to a unit in this pass which this rank has not called."""
        if self._follower is not None and self._follower.following:
            return self._follower.is_to_come(number)
        if self._kind is None or self._supervised:
            return True
        place = len(self._gathered) if self._ahead is None else self._ahead
        contract = self._contract
        coming = [*self._gathered[place:], *contract[len(self._gathered) :]]
        return any(gathering.number == number for gathering in coming)

    def skip_rest(self) -> None:
        """This rank has no use of what is still to come in this pass, and other ranks may have."""
        if self._follower is not None:
            self._follower.before_end()
        if not self._supervised:
            if self._ahead is not None and self._gathered[self._ahead].in_backward:
                self._drop_ahead()
            self._skip(self._contract[len(self._gathered) :])

    def end(self, end: End, flags: Sequence[bool] = ()) -> list[bool]:
        """A pass ends. An all-reduce of a few numbers.

        Args:
            end: How it ends.
            flags: What the ranks are to know of each other, at most two.

        Returns:
            For each flag, whether any rank has set it.

        Raises:
            RuntimeError: The ranks end differently, or some need another unit. All of them raise.
        """
        self.skip_rest()
        skipped = 0 if all(self._needed) else 1 + crc32(bytes(self._needed)) // 4
        alike, told, notes = self._compare(end, skipped, flags)
        if self._follower is not None:
            self._follower.end_pass(notes)
        if self._kind is not None and self._gathered:
            self._learn(self._kind, alike=alike)
        self.forget()
        return told

    def _learn(self, kind: Kind, *, alike: bool) -> None:
        """Makes a contract of a new order, or changes one that was twice another, so that an odd pass changes nothing.

        Args:
            kind: What pass it was.
            alike: Whether all ranks have skipped the same. What they skip by their data may be needed the next time.
        """
        key, gathered = (kind, self._before), tuple(self._gathered)
        self._data_decides |= not alike
        order = gathered
        if not self._data_decides:
            order = tuple(gathering for gathering, needed in zip(gathered, self._needed, strict=True) if needed)
        numbers = _numbers(order)
        if key not in self._contracts:
            if len(self._contracts) == _CONTRACTS:
                self._contracts.clear()
                self._candidates.clear()
            self._contracts[key] = order if self._supervised else gathered
        if numbers and numbers != _numbers(self._contracts[key]):
            if self._candidates.get(key) == numbers:
                self._contracts[key] = order
            self._candidates[key] = numbers
        self._latest[kind] = self._contracts[key]
        self._before = numbers

    def _compare(self, what: int, skipped: int = 0, flags: Sequence[bool] = ()) -> tuple[bool, list[bool], list[int]]:
        """Compares with all ranks what this one comes to: a unit by number, or an end.

        Returns:
            Whether all ranks have skipped the same; for each flag, whether any rank has set it; and of what each notes
            of the placement that it follows, the largest.
        """
        room = [False] * (_FLAGS - len(flags))  # as other ranks may come to something else
        notes = () if self._follower is None else self._follower.notes()
        mine = [what, -what, skipped, -skipped, *flags, *room, *notes]
        numbers = torch.tensor(mine, dtype=torch.int32, device=self._device)
        self._take_largest_(numbers)
        most, least, most_skipped, least_skipped, *told = numbers.tolist()
        if most != -least:
            self._refuse(what)
        return most_skipped == -least_skipped, [bool(flag) for flag in told[: len(flags)]], told[_FLAGS:]

    def _refuse(self, what: int) -> NoReturn:
        """Says which rank comes to what, on all of them, when none is left waiting for another."""
        said = agree(None, what, *self._groups)
        begun = torch.tensor([self._reducer.begun], dtype=torch.int32, device=self._device)
        self._take_largest_(begun)
        self._reducer.begin_all(int(begun))
        self.forget()
        first, other = min(said), min((rank for rank in said if said[rank] != said[min(said)]), default=min(said))
        raise RuntimeError(
            f"rank {other} {self._text(said[other])} where rank {first} {self._text(said[first])}, and at stage 3 all "
            "ranks gather a unit together; make one unit of what not all ranks run, units=..., or pass stage=2"
        )

    def _text(self, number: int) -> str:
        return f"runs {self._units[number].name}" if number >= 0 else End(number).text


def _nothing() -> None:
    """What is done while units are gathered that are skipped in forward."""


def _numbers(gatherings: Iterable[Gathering]) -> Numbers:
    """The units alone: what all ranks have alike, as each counts its own entries."""
    return tuple(gathering.number for gathering in gatherings)
