"""What the ranks compare at stage 3: which unit they come to, or how they end a pass."""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist

from par_groups import agree

from .._collectives import all_reduce
from .._unit import Unit
from ..reduce.reducer import Reducer

FLAGS = 2
"""How many flags the ranks tell each other in every comparison, beside those of a budget."""


class PassEnd(IntEnum):
    """How a pass ends, as it is compared with the numbers of units, which are 0 or more."""

    BACKWARD = -1
    EVALUATION = -2
    UNREDUCED = -3
    FORWARD = -4

    @property
    def text(self) -> str:
        """What a rank does that ends a pass so."""
        return {
            PassEnd.BACKWARD: "ends backward",
            PassEnd.EVALUATION: "ends a forward without gradients",
            PassEnd.UNREDUCED: "ends a backward that reduces no gradients",
            PassEnd.FORWARD: "begins backward",
        }[self]


class Compared(NamedTuple):
    """What a comparison has shown.

    Args:
        alike: Whether all ranks have told the same detail.
        flags: For each flag, whether any rank has set it.
    """

    alike: bool
    flags: list[bool]


class Agreement:
    """Comparisons of the ranks that gather together. Each is an all-reduce of a few numbers over each group.

    Args:
        units: The units.
        groups: The ranks, by communicators that have no other use: over one after the other all compare.
        device: Where small numbers lie that all ranks compare.
        reducer: Brings all ranks to the same reductions before they raise.
        flags: For how many flags there is room in a comparison.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        groups: Sequence[dist.ProcessGroup],
        device: torch.device,
        reducer: Reducer,
        *,
        flags: int = FLAGS,
    ) -> None:
        self._units, self._groups, self._device, self._reducer = tuple(units), tuple(groups), device, reducer
        self._flags = flags

    def most(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest that any rank has at each place of a list that is as long on all. An all-reduce."""
        largest = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        self._take_largest_(largest)
        return [int(number) for number in largest.tolist()]

    def compare(self, what: int, detail: int = 0, flags: Sequence[bool] = ()) -> Compared:
        """Compare with all ranks what this one comes to.

        Args:
            what: A unit by number, or a `PassEnd`. It must be alike on all ranks.
            detail: A number that may differ.
            flags: What the ranks are to know of each other, at most as many as there is room for.

        Raises:
            RuntimeError: The ranks come to different things. All of them raise.
        """
        room = [False] * (self._flags - len(flags))  # as other ranks may come to something else
        numbers = torch.tensor([what, -what, detail, -detail, *flags, *room], dtype=torch.int32, device=self._device)
        self._take_largest_(numbers)
        most, least, most_detail, least_detail, *told = numbers.tolist()
        if most != -least:
            self._refuse(what)
        return Compared(most_detail == -least_detail, [bool(flag) for flag in told])

    def meet(self, number: int) -> None:
        """Compare with all ranks that they need a unit which no program has.

        Raises:
            RuntimeError: Some need another unit, or end their pass, or cannot go on from here. All of them raise.
        """
        if not self.compare(number, self._reducer.begun_with_gradients).alike:
            self._reducer.begin_all(0)
            raise RuntimeError(
                f"backward comes to {self._units[number].name}, which no backward before needed there, when the ranks "
                "have begun different numbers of reductions; pass Overlap(inflight=...) with the number "
                "of all chunks, which bounds none, or stage=2"
            )
        self._reducer.rejoin()

    def _take_largest_(self, numbers: torch.Tensor) -> None:
        """Each number becomes the largest of all ranks."""
        for group in self._groups:
            all_reduce(numbers, group, dist.ReduceOp.MAX).wait()

    def _refuse(self, what: int) -> NoReturn:
        """Says which rank comes to what, on all of them, when none is left waiting for another."""
        said = agree(None, what, *self._groups)
        begun = torch.tensor([self._reducer.begun], dtype=torch.int32, device=self._device)
        self._take_largest_(begun)
        self._reducer.begin_all(int(begun))
        first, other = min(said), min((rank for rank in said if said[rank] != said[min(said)]), default=min(said))
        raise RuntimeError(
            f"rank {other} {self._text(said[other])} where rank {first} {self._text(said[first])}, and at stage 3 all "
            "ranks gather a unit together; make one unit of what not all ranks run, units=..., or pass stage=2"
        )

    def _text(self, number: int) -> str:
        return f"runs {self._units[number].name}" if number >= 0 else PassEnd(number).text
