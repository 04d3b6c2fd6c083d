"""Stages 0 to 2, where not all ranks share all chunks: when a chunk is reduced, in one order on all ranks.

backward   the gradient of a section's output is there -> what was called behind it is left behind, see `Calls`
                                                       -> so is, by turns, what this rank did not call
                                                       -> chunks are reduced all of whose sections are left behind
           the pass is over                            -> the rest, and all as long as no order is agreed on

Backward itself exchanges with other ranks there, such as gradients of rows between experts, and data may decide on each
rank which parameters get gradients. A chunk that is reduced as soon as it is complete is so before an exchange on one
rank, and behind it on another: with room for one communicator at a time both would stop for good. Which exchanges lie
behind a rank it knows by the sections that it has left behind, and so do all ranks alike.

A rank that does not call a section cannot know when others leave it behind. Its turn comes behind that of all sections
which others have left behind before, in the order of an earlier pass that all ranks have agreed on.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..layout.chunk import Chunk
from ..layout.units import owners, sections
from ..reduce.order import LearnedOrder
from ..reduce.reducer import Reducer
from ..watch.outputs import computed, hook_
from .record import Call, Calls


class Closer:
    """Tells the reducer which chunks a backward pass has left behind.

    Args:
        root: The sharded module. What it has itself, or several of its sections have, is used by anybody, at any time,
            and closed at the end of a pass alone.
        chunks: The trained chunks.
        reducer: Reduces them.
    """

    def __init__(self, root: nn.Module, chunks: Sequence[Chunk], reducer: Reducer) -> None:
        modules = sections(root)
        owner = owners(root, [[module] for module in modules])
        self._chunks, self._reducer, self._calls = chunks, reducer, Calls(len(modules))
        self._owners = [{owner[member.parameter] for member in chunk.members} for chunk in chunks]
        # The root is never left behind, and so stays last of all orders.
        self._order = LearnedOrder(reversed(range(len(modules))))
        self._arranged_by: list[int] = []
        self._place: dict[int, int] = {}  # of each section in the order
        self._places: list[tuple[int, Chunk]] = []  # of the last of its sections in the order, for each chunk in turn
        self._in_backward = False
        self._graphed = False  # whether the pass under way makes a graph, for a gradient of a gradient
        self._left: set[int] = set()  # the sections that the pass under way has left behind
        self._passed = 0  # how many sections of the order are left behind, and all before them
        self._closed = 0  # how many chunks are closed
        reducer.learn_first(self._order)
        reducer.hooks.at_end.append(self._end_pass)
        self._arrange()
        for number, module in enumerate(modules):
            hook_(module, self._enter, partial(self._leave, number))

    def forget(self) -> None:
        """A step has ended, or a pass has failed: no backward pass goes through what was called before."""
        self._calls.forget()
        self._end_pass()

    def _enter(self, *_: Any) -> None:
        """A section begins."""
        self._calls.begin()

    def _leave(self, number: int, _: nn.Module, __: Any, output: Any) -> None:
        """A section ends, and the gradient of what it returns begins its backward."""
        tensors = computed(output) if torch.is_grad_enabled() else []
        calls = self._calls
        call = calls.repeat([number]) if self._in_backward else calls.end([number], has_graph=bool(tensors))
        if tensors:
            torch.autograd.graph.register_multi_grad_hook(tensors, partial(self._before_backward, call), mode="any")

    def _before_backward(self, call: Call, _: torch.Tensor) -> None:
        """The gradient of an output is there, so backward is done with what was called after that."""
        self._in_backward, self._graphed = True, torch.is_grad_enabled()
        self._reducer.start()
        left = [number for number in self._calls.left_behind(call) if number]
        self._left.update(left)
        if self._order.is_agreed:
            left = sorted([*left, *self._pass_uncalled()], key=self._place.__getitem__)
            self._close()
        self._order.observed += left

    def _pass_uncalled(self) -> list[int]:
        """Goes on in the order, and finds the sections that this rank has not called and whose turn has come."""
        uncalled = {*self._calls.uncalled} - {0} - self._left if self._calls.returned else set()
        found = []
        order = self._order.numbers
        while order[self._passed] in self._left or order[self._passed] in uncalled:
            if order[self._passed] in uncalled:
                found.append(order[self._passed])
            self._passed += 1
        self._left.update(found)
        return found

    def _close(self) -> None:
        """Has chunks reduced in turn, unless a parameter that was read outside of its section still waits."""
        first = self._closed
        while self._closed < len(self._places):
            place, chunk = self._places[self._closed]
            if place >= self._passed or self._reducer.awaits(chunk):
                break
            self._closed += 1
        self._reducer.close(chunk for _, chunk in self._places[first : self._closed])
        self._reducer.begin()

    def _arrange(self) -> None:
        """Puts the chunks in the order in which all their sections are left behind."""
        if self._arranged_by is not self._order.numbers:
            self._arranged_by = self._order.numbers
            self._place = {number: place for place, number in enumerate(self._order.numbers)}
            last = [max(self._place[number] for number in owners) for owners in self._owners]
            self._places = sorted(zip(last, self._chunks, strict=True), key=lambda each: (each[0], -each[1].number))
            self._reducer.arrange([chunk.number for _, chunk in self._places])

    def _end_pass(self, *, reduced: bool = False) -> None:  # noqa: ARG002 - as the reducer calls it
        self._calls.end_pass(graphed=self._graphed)
        self._in_backward, self._graphed, self._passed, self._closed = False, False, 0, 0
        self._left.clear()
        self._order.observed.clear()
        self._arrange()
