"""The order of reductions at stages 0 to 2 if not all ranks shard all chunks: one order on all ranks.

1. In backward, the gradient of a section's output arrives. Backward has then finished for all sections that were called
   after this one, see `Calls`.
2. Sections that this rank did not call count as finished at their position in the agreed order.
3. A chunk is reduced when backward has finished for all of its sections.
4. When the pass ends, all other chunks are reduced. Without an agreed order, all chunks are reduced then.

In such a model, backward itself communicates with other ranks, such as for the gradients of tokens that were routed to
experts, and data may decide on each rank which parameters receive gradients. If each rank reduced a chunk as soon as
its gradients were complete, one rank would reduce it before such an exchange, and another rank after the exchange. Both
would hang if a device runs one communicator at a time. The finished sections tell each rank which exchanges it has
completed, in the same way on all ranks.

A rank that does not call a section cannot see when backward finishes for it on the other ranks. The section therefore
counts as finished after all sections that come before it in the agreed order, which an earlier pass has defined.
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
    """The object that closes chunks in the reducer when backward has finished for their sections.

    Args:
        root: Sharded module. Any code may use parameters of the root itself, or of several sections, at any time, so
            their chunks are closed only at the end of a pass.
        chunks: Trained chunks.
        reducer: Reducer of the chunks.
    """

    def __init__(self, root: nn.Module, chunks: Sequence[Chunk], reducer: Reducer) -> None:
        modules = sections(root)
        owner = owners(root, [[module] for module in modules])
        self._chunks, self._reducer, self._calls = chunks, reducer, Calls(len(modules))
        self._owners = [{owner[member.parameter] for member in chunk.members} for chunk in chunks]
        # Backward never finishes for the root within a pass, so the root stays last in every order.
        self._order = LearnedOrder(reversed(range(len(modules))))
        self._arranged_by: list[int] = []
        self._place: dict[int, int] = {}  # position of each section in the order
        self._places: list[tuple[int, Chunk]] = []  # chunks, with the position of the last of their sections, ascending
        self._in_backward = False
        self._graphed = False  # whether the current pass creates a graph, for a gradient of a gradient
        self._left: set[int] = set()  # sections for which the current pass has finished
        self._passed = 0  # length of the prefix of the order for which the pass has finished
        self._closed = 0  # number of closed chunks
        reducer.learn_first(self._order)
        reducer.hooks.at_end.append(self._end_pass)
        self._arrange()
        for number, module in enumerate(modules):
            hook_(module, self._enter, partial(self._leave, number))

    def forget(self) -> None:
        """Forget all calls, because a step has ended or a pass has failed. No backward goes through them any more."""
        self._calls.forget()
        self._end_pass()

    def _enter(self, *_: Any) -> None:
        """Record that a section begins."""
        self._calls.begin()

    def _leave(self, number: int, _: nn.Module, __: Any, output: Any) -> None:
        """Record that a section ends, and hook the gradient of its output, with which its backward begins."""
        tensors = computed(output) if torch.is_grad_enabled() else []
        calls = self._calls
        call = calls.repeat([number]) if self._in_backward else calls.end([number], has_graph=bool(tensors))
        if tensors:
            torch.autograd.graph.register_multi_grad_hook(tensors, partial(self._before_backward, call), mode="any")

    def _before_backward(self, call: Call, _: torch.Tensor) -> None:
        """Close chunks, because the gradient of an output has arrived: later calls have finished their backward."""
        self._in_backward, self._graphed = True, torch.is_grad_enabled()
        self._reducer.start()
        left = [number for number in self._calls.left_behind(call) if number]
        self._left.update(left)
        # Before an order is agreed, this rank cannot place the sections that it did not call, so nothing is closed.
        if self._order.is_agreed:
            left = sorted([*left, *self._pass_uncalled()], key=self._place.__getitem__)
            self._close()
        self._order.observed += left

    def _pass_uncalled(self) -> list[int]:
        """Advance in the order, and return the uncalled sections that count as finished now."""
        # Until backward reaches the first call of a section, it may still reach any section, see `Calls.returned`. The
        # root (0) is closed at the end of the pass.
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
        """Close the chunks of finished sections in order, and begin their reductions."""
        first = self._closed
        while self._closed < len(self._places):
            place, chunk = self._places[self._closed]
            # A parameter that was read outside of its section may still receive a gradient. The chunks behind it wait,
            # too, because all ranks close chunks in one order.
            if place >= self._passed or self._reducer.awaits(chunk.number):
                break
            self._closed += 1
        for _, chunk in self._places[first : self._closed]:
            self._reducer.reduce(chunk.number)

    def _arrange(self) -> None:
        """Sort the chunks by the position of their last section in the order."""
        # The identity of the list: a learned order is a new list, and most passes learn none.
        if self._arranged_by is not self._order.numbers:
            self._arranged_by = self._order.numbers
            self._place = {number: place for place, number in enumerate(self._order.numbers)}
            last = [max(self._place[number] for number in owners) for owners in self._owners]
            self._places = sorted(zip(last, self._chunks, strict=True), key=lambda each: (each[0], -each[1].number))
            self._reducer.arrange([chunk.number for _, chunk in self._places])

    def _end_pass(self, *, reduced: bool = False) -> None:  # noqa: ARG002 - the reducer passes it
        self._calls.end_pass(graphed=self._graphed)
        self._in_backward, self._graphed, self._passed, self._closed = False, False, 0, 0
        self._left.clear()
        self._order.observed.clear()
        self._arrange()
