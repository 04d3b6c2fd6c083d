"""The program of reductions at stages 0 to 2 if not all ranks shard all chunks.

In such a model, backward itself communicates with other ranks, such as for the gradients of tokens that were routed to
experts, and data may decide on each rank which parameters receive gradients. If each rank reduced a chunk as soon as
its gradients were complete, one rank would reduce it before such an exchange, and another rank after the exchange. Both
would hang if a device runs one communicator at a time.

The ranks therefore follow one program, as at stage 3. Its events are the beginnings of the sections' backwards, in the
order of an earlier pass of the lowest rank. A chunk is due before the event that follows the last backward of its
sections. When an event happens, a rank reduces all chunks that are due before it, and so passes sections that only
other ranks have called. All other chunks are reduced at the end of the pass; in the first pass, all chunks.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..layout.chunk import Chunk
from ..layout.units import owners, sections
from ..watch.outputs import call_at_backward, computed
from .order import LearnedOrder
from .reducer import Reducer


class SectionProgram:
    """The object that reduces chunks between the exchanges of backward.

    Args:
        root: Sharded module. Any code may use parameters of the root itself at any time, so their chunks are reduced at
            the end of a pass.
        chunks: Trained chunks.
        reducer: Reducer of the chunks.
    """

    def __init__(self, root: nn.Module, chunks: Sequence[Chunk], reducer: Reducer) -> None:
        modules = sections(root)
        owner = owners(root, [[module] for module in modules])
        self._chunks, self._reducer = chunks, reducer
        self._owners = [{owner[member.parameter] for member in chunk.members} for chunk in chunks]
        self._order = LearnedOrder(reversed(range(1, len(modules))), repeats=True)
        self._due: list[list[int]] = []  # chunks that are due before each event
        self._arranged_by: list[int] = []
        self._at = 0  # number of events that have passed
        self._is_training = False  # whether the latest forward of the root records gradients
        self._in_backward = False
        # Calls without a graph in such a forward, which reentrant checkpoints recompute in backward, by section.
        self._unrecorded = [0] * len(modules)
        reducer.order.learn(self._order)
        reducer.hooks.at_end.append(self._end_pass)
        self._arrange()
        root.register_forward_pre_hook(torch.compiler.disable(self._enter))
        # The root (0) is no event. It may return the tensor of a section, and which section this is may differ between
        # ranks, so its backward may begin before or after another event.
        for number, module in list(enumerate(modules))[1:]:
            module.register_forward_hook(torch.compiler.disable(partial(self._leave, number)))

    def forget(self) -> None:
        """Forget all calls, because a step has ended or a pass has failed."""
        self._unrecorded = [0] * len(self._unrecorded)
        self._end_pass()

    def _enter(self, *_: Any) -> None:
        self._is_training = torch.is_grad_enabled()

    def _leave(self, number: int, _: nn.Module, __: Any, output: Any) -> None:
        """Record that a section ends, and hook the gradient of its output, with which its backward begins."""
        tensors = computed(output) if torch.is_grad_enabled() else []
        if tensors:
            call_at_backward(tensors, partial(self._before_backward, number))
        if self._in_backward:
            self._unrecorded[number] = max(0, self._unrecorded[number] - 1)
        elif self._is_training and not torch.is_grad_enabled():
            self._unrecorded[number] += 1

    def _before_backward(self, number: int, _: torch.Tensor) -> None:
        """Reduce the chunks that are due before the backward of a section."""
        self._in_backward = True
        self._reducer.start()
        self._order.observed.append(number)
        # Before an order is agreed, the ranks have no program, so all chunks wait for the end of the pass.
        if not self._order.is_agreed:
            return
        left = {section for section, count in enumerate(self._unrecorded) if count}
        self._reducer.expected.recomputed = {n for n, owned_by in enumerate(self._owners) if owned_by & left}
        self._reducer.begin()
        if number in self._order.numbers[self._at :]:
            place = self._order.numbers.index(number, self._at) + 1
            self._reducer.reduce(*(chunk for due in self._due[self._at : place] for chunk in due))
            self._at = place

    def _arrange(self) -> None:
        """Place the reductions in the order of the sections."""
        # The identity of the list: a learned order is a new list, and most passes learn none.
        if self._arranged_by is not self._order.numbers:
            self._arranged_by = self._order.numbers
            last = {section: place for place, section in enumerate(self._order.numbers)}
            self._due = [[] for _ in range(len(self._order.numbers) + 1)]
            for number, owners in enumerate(self._owners):
                place = max(last.get(section, len(self._due)) for section in owners) + 1
                if 0 not in owners and place < len(self._due):
                    self._due[place].append(number)
            placed = [number for due in self._due for number in due]
            self._reducer.order.arrange([*placed, *(n for n in range(len(self._chunks)) if n not in placed)])

    def _end_pass(self, *, reduced: bool = False) -> None:  # noqa: ARG002 - the reducer passes it
        self._at, self._in_backward = 0, False
        self._order.observed.clear()
        self._reducer.expected.recomputed = ()
        self._arrange()
        self._reducer.order.follow(())  # a pass without reductions leaves no chunk due
