"""When units were called, from which follows what a backward pass has left behind. Pure arithmetic."""

from collections.abc import Iterable, Sequence
from weakref import WeakSet

import torch


class Call:
    """A call of modules of a unit, or of several units.

    Args:
        began: When it began, by a clock that ticks when a call begins or ends.
        ended: When it ended.

    Attributes:
        is_past: Whether a backward pass that has ended went through it.
    """

    def __init__(self, began: int, ended: int) -> None:
        self.began, self.ended = began, ended
        self.is_past = False


class Calls:
    """When units were called, from which follows which of them a backward pass has left behind.

    Autograd runs backward what ran last forward. So when it comes to what a call has returned, it is done with all that
    was called after that: with a unit, when all calls of it began later. A call is known as long as there is a graph of
    it, as any backward pass may go through that. One that a pass went through counts only for units that have no other:
    its graph may be there for no better reason than that somebody keeps the loss.

    Args:
        count: Number of units.

    Attributes:
        uncalled: The units that were not called when the backward pass under way began.
        returned: Whether that pass has come to the first call of any unit but the root. Before, all that it goes
            through was called once more, as in the second of two forwards: it may come to any unit again, also to one
            that this rank has not called and others have.
    """

    def __init__(self, count: int) -> None:
        self._clock = 0
        self._under_way: list[tuple[int, bool]] = []  # when calls under way began, and whether gradients were wanted
        self._known: list[WeakSet[Call]] = [WeakSet() for _ in range(count)]
        self._kept: list[list[Call]] = [[] for _ in range(count)]  # those without a graph that may get one in backward
        self._repeated: list[list[Call]] = [[] for _ in range(count)]  # of these, what this pass has called again
        self._ahead: list[tuple[int, int]] | None = None  # beginnings of the units that this pass comes to, ascending
        self._first: set[int] = set()  # when units began for the first time, but for the root
        self._come: list[Call] = []  # what this pass has come to
        self._graphed: list[Call] = []  # what passes that made a graph have come to
        self.uncalled: list[int] = []
        self.returned = False

    def begin(self) -> None:
        """A module begins."""
        self._clock += 1
        self._under_way.append((self._clock, torch.is_grad_enabled()))

    def end(self, units: Sequence[int], *, has_graph: bool) -> Call:
        """The module ends that began last, which is of some units.

        Args:
            units: Their numbers.
            has_graph: Whether the graph tells when its backward begins, and holds what is returned here.
        """
        began = self._under_way.pop()[0] if self._under_way else self._clock
        self._clock += 1
        call = Call(began, self._clock)
        is_expected = torch.is_grad_enabled() or any(wanted for _, wanted in self._under_way)
        for number in units if is_expected else ():
            self._known[number].add(call)
            if not has_graph:
                self._kept[number].append(call)
        return call

    def end_within(self) -> None:
        """The module ends that began last, within a call of its unit that goes on."""
        if self._under_way:
            self._under_way.pop()
        self._clock += 1

    def repeat(self, units: Sequence[int]) -> Call:
        """The module ends that began last, in a backward pass, which needs again what was computed in forward.

        Args:
            units: The numbers of its units.

        Returns:
            The call in forward that had no graph, which is the latest that was not repeated yet.
        """
        call = self.end([], has_graph=True)
        for number in units:
            left = self._kept[number][: len(self._kept[number]) - len(self._repeated[number])]
            if left:
                call = left[-1]
                self._repeated[number].append(call)
        return call

    def left_behind(self, call: Call) -> list[int]:
        """The units that a backward pass has left behind since it was asked before, now that it comes to a call."""
        if self._ahead is None:
            first = [(_first(calls).began, number) for number, calls in enumerate(self._known) if calls]
            self._ahead = sorted(first)
            self._first = {began for began, number in first if number}
            self.uncalled = [number for number, calls in enumerate(self._known) if not calls]
        self._come.append(call)
        self.returned |= call.began in self._first
        left = []
        while self._ahead and self._ahead[-1][0] > call.ended:
            left.append(self._ahead.pop()[1])
        return left

    def end_pass(self, *, graphed: bool = False) -> None:
        """A backward pass has ended.

        Args:
            graphed: Whether it made a graph, as for a gradient penalty. A later pass goes through that, and from there
                through the same calls once more.
        """
        for number, repeated in enumerate(self._repeated):
            if repeated:
                del self._kept[number][len(self._kept[number]) - len(repeated) :]
                repeated.clear()
        if graphed:  # what knows of these calls may go with their outputs, while the new graph leads into their midst
            self._graphed += self._come
        else:
            for call in self._come:
                call.is_past = True
        self._come.clear()
        self._ahead = None
        self.uncalled, self.returned = [], False

    def forget(self) -> None:
        """No backward pass goes through what was called before."""
        self._under_way.clear()  # what has failed there may never have ended
        self._graphed.clear()
        for known, kept in zip(self._known, self._kept, strict=True):
            known.clear()
            kept.clear()
        self.end_pass()


def _first(calls: Iterable[Call]) -> Call:
    """The call of a unit that a backward pass comes to last."""
    return min(calls, key=lambda call: (call.is_past, call.began))
