"""A backward pass: what calls and is called, what the pass has brought, and which gradients it is expected to bring."""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import ref

import torch
from torch import nn

from ..layout.chunk import Chunk

_Owner = TypeVar("_Owner")


@dataclass
class BackwardHooks:
    """Functions that a reducer calls when a backward pass begins and ends.

    Args:
        at_start: Called when a pass begins that will reduce gradients.
        before_last: Called when backward has ended, before the last reductions begin.
        compare: Called then with this rank's flags; returns which of them any rank of the shards has set. It may
            raise. None: the reducer exchanges the flags itself.
        at_end: Called after each pass, with `reduced`: whether gradients were reduced.
    """

    at_start: list[Callable[[], None]] = field(default_factory=list)
    before_last: Callable[[], None] = lambda: None
    compare: Callable[[Sequence[bool]], list[bool]] | None = None
    at_end: list[Callable[..., None]] = field(default_factory=list)


@dataclass
class BackwardPass:
    """The backward pass under way, or the next one. Chunks are given by number.

    A pass that ends or fails is replaced by a new one, so nothing of it remains.

    Args:
        arrived: For each chunk, the members that have their gradient.
        number: Autograd's number of the pass.
        is_running: Whether the pass has begun and not ended.
        has_gradients: Whether a gradient of a parameter has arrived. The pass may be for gradients of inputs only.
        expects_gradients: Whether the pass brings gradients of parameters; None: not known yet.
        is_ending: Whether all gradients of the pass have arrived.
        taken: The chunks whose gradients are in their buffers.
        completed: The chunks of which all gradients have arrived.
        left: The chunks of which no more gradients will arrive, and whose gradients were not taken for that yet.
        closed: The chunks whose gradients were taken because no more will arrive.
        given_up: The chunks that were reduced before others because autograd will compute no gradient of them.
        begun: Number of reductions that have begun.
        departed_at: Number of reductions that had begun when this rank departed from the agreed order, and began
            others for the other ranks, with zeros; None: it follows the order.
    """

    arrived: list[set[int]]
    number: int = -1
    is_running: bool = False
    has_gradients: bool = False
    expects_gradients: bool | None = None
    is_ending: bool = False
    taken: set[int] = field(default_factory=set)
    completed: set[int] = field(default_factory=set)
    left: list[int] = field(default_factory=list)
    closed: set[int] = field(default_factory=set)
    given_up: set[int] = field(default_factory=set)
    begun: int = 0
    departed_at: int | None = None


class ExpectedGradients:
    """Which gradients the next backward passes bring, and when, as earlier passes have shown.

    Args:
        chunks: The trained chunks.
        closing: Whether the caller closes chunks, see `Reducer.close`.
        exchanging: Whether backward itself exchanges with other ranks. Then a chunk is reduced after it is closed
            only, so that all ranks begin reductions between the same exchanges.

    Attributes:
        counts: For each chunk, the number of members that have a gradient when the chunk is complete.
        closed_before_end: Numbers of the chunks that the caller closes before backward ends.
        only_when_closed: Whether chunks are reduced after they are closed only.
        from_nested_passes: Whether gradients have ever arrived from a pass within the pass under way.
    """

    def __init__(self, chunks: Sequence[Chunk], *, closing: bool, exchanging: bool) -> None:
        self._chunks = chunks
        self._frozen: set[int] = set()  # the chunks that are complete with fewer than all members
        self.counts = [len(chunk.members) for chunk in chunks]
        self.closed_before_end = set(range(len(chunks))) if closing else set()
        self.only_when_closed = closing and exchanging
        self.from_nested_passes = False

    def begin_pass(self) -> None:
        """Count the members of chunks with frozen ones again, as the program may have thawed some since."""
        for number in self._frozen:
            self.counts[number] = self._count(number)

    def end_pass(self, completed: Set[int]) -> None:
        """Look for frozen members in the chunks that the pass has not completed.

        Only there: asking each parameter in each pass would cost more than all else that is done for it.
        """
        if len(completed) < len(self._chunks):
            for number, chunk in enumerate(self._chunks):
                if number not in completed:
                    self.counts[number] = count = self._count(number)
                    (self._frozen.discard if count == len(chunk.members) else self._frozen.add)(number)

    def _count(self, number: int) -> int:
        return sum(member.parameter.requires_grad for member in self._chunks[number].members)


def call_on_gradient(
    parameter: nn.Parameter, owner: _Owner, call: Callable[[_Owner, int, int], None], number: int, index: int
) -> None:
    """Call a method for each gradient of a parameter, also of one that is frozen now and trained later.

    Args:
        parameter: The parameter.
        owner: The object of the method, which the hook does not keep alive: the garbage collector does not see through
            the hooks of a tensor.
        call: The method, of the class.
        number: Its first argument.
        index: Its second argument.
    """
    weak = ref(owner)

    def hook(_: torch.Tensor) -> None:
        alive = weak()
        if alive is not None:
            call(alive, number, index)

    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)  # torch takes hooks for no others, but keeps them through a change
    parameter.register_post_accumulate_grad_hook(hook)
    if frozen:
        parameter.requires_grad_(False)
