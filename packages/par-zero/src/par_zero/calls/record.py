"""The calls of units, from which follows for which units backward has finished. Pure arithmetic."""

from collections.abc import Iterable, Sequence
from weakref import WeakSet

import torch


class Call:
    """A call of a module of one or several units.

    Args:
        began: Tick at which the call began. The clock ticks when a call begins or ends.
        ended: Tick at which the call ended.

    Attributes:
        is_past: Whether a backward pass that has ended went through this call.
    """

    def __init__(self, began: int, ended: int) -> None:
        self.began, self.ended = began, ended
        self.is_past = False


class Calls:
    """The calls of units, from which follows for which units a backward pass has finished.

    Autograd runs calls backward in the reverse order of forward. When it reaches the output of a call, it has finished
    all calls that began after the end of that call. It has finished a unit when it has finished all calls of the unit.

    A call is recorded as long as its graph exists, because any backward pass may go through the graph. If a pass that
    has ended went through a call, the call counts only for units without a newer call: its graph may exist only because
    the caller keeps the loss.

    Args:
        count: Number of units.

    Attributes:
        uncalled: Numbers of the units without a call when the current backward pass began.
        returned: Whether the current pass has reached the first call of any unit except the root. Until then the pass
            may reach every unit again, because it may go through the second of two forwards. This includes a unit that
            only other ranks have called.
    """

    def __init__(self, count: int) -> None:
        self._clock = 0
        self._under_way: list[tuple[int, bool]] = []  # begin of each open call, and whether it records gradients
        # Weak references: the hooks on a call's outputs hold the call, so it disappears with its graph.
        self._known: list[WeakSet[Call]] = [WeakSet() for _ in range(count)]
        # Calls without a graph have no hook that holds them. Activation checkpointing recomputes them in backward.
        self._kept: list[list[Call]] = [[] for _ in range(count)]
        self._repeated: list[list[Call]] = [[] for _ in range(count)]  # the kept calls that this pass has recomputed
        self._ahead: list[tuple[int, int]] | None = None  # first begin and number of the units ahead, ascending
        self._first: set[int] = set()  # first begin of each unit, except the root
        self._come: list[Call] = []  # calls that this pass has reached
        self._graphed: list[Call] = []  # calls that passes with `create_graph` have reached
        self.uncalled: list[int] = []
        self.returned = False

    def begin(self) -> None:
        """Record that a module begins."""
        self._clock += 1
        self._under_way.append((self._clock, torch.is_grad_enabled()))

    def end(self, units: Sequence[int], *, has_graph: bool) -> Call:
        """Record that the latest open module ends, and return its call.

        Args:
            units: Numbers of the module's units.
            has_graph: Whether hooks on the graph report the backward of the call, and hold the returned object.
        """
        began = self._under_way.pop()[0] if self._under_way else self._clock
        self._clock += 1
        call = Call(began, self._clock)
        # Under checkpointing the inner call records no gradients, but an outer call does: backward will recompute it.
        is_expected = torch.is_grad_enabled() or any(wanted for _, wanted in self._under_way)
        for number in units if is_expected else ():
            self._known[number].add(call)
            if not has_graph:
                self._kept[number].append(call)
        return call

    def end_within(self) -> None:
        """Record that the latest open module ends, within a call of its unit that continues."""
        if self._under_way:
            self._under_way.pop()
        self._clock += 1

    def repeat(self, units: Sequence[int]) -> Call:
        """Record that the latest open module ends, which backward has recomputed.

        Args:
            units: Numbers of the module's units.

        Returns:
            The call in forward that is recomputed: the latest call without a graph that was not recomputed yet.
        """
        call = self.end([], has_graph=True)
        for number in units:
            # Backward recomputes calls in the reverse order of forward, so the last one that is left is the match.
            left = self._kept[number][: len(self._kept[number]) - len(self._repeated[number])]
            if left:
                call = left[-1]
                self._repeated[number].append(call)
        return call

    def left_behind(self, call: Call) -> list[int]:
        """Return the numbers of the units that backward has finished since the last call of this method.

        Args:
            call: Call whose output backward has reached.
        """
        # Computed once per pass: calls within backward are recomputations, and add no unit.
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
        """End the current backward pass.

        Args:
            graphed: Whether the pass created a graph, such as for a gradient penalty. A later pass goes through this
                graph, and from there through the same calls again. Default: False.
        """
        for number, repeated in enumerate(self._repeated):
            if repeated:
                del self._kept[number][len(self._kept[number]) - len(repeated) :]
                repeated.clear()
        # The outputs that hold these calls may be deleted, while the new graph still leads into the calls.
        if graphed:
            self._graphed += self._come
        else:
            for call in self._come:
                call.is_past = True
        self._come.clear()
        self._ahead = None
        self.uncalled, self.returned = [], False

    def forget(self) -> None:
        """Forget all calls, because no backward pass goes through them any more."""
        self._under_way.clear()  # a call that raised may never have ended
        self._graphed.clear()
        for known, kept in zip(self._known, self._kept, strict=True):
            known.clear()
            kept.clear()
        self.end_pass()


def _first(calls: Iterable[Call]) -> Call:
    """Return the call of a unit that a backward pass reaches last."""
    return min(calls, key=lambda call: (call.is_past, call.began))
