"""The state of a backward pass: its hooks, the gradients that have arrived, and the gradients that are expected."""

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
        at_start: Functions that are called when a pass begins that will reduce gradients. Default: none.
        before_last: Function that is called when backward has ended, before the last reductions begin. Default: does
            nothing.
        compare: Function that is called after the last reductions have begun, with this rank's flags. It returns the
            flags that any rank of the shards has set, and may raise. None (default): the reducer exchanges the flags.
        at_end: Functions that are called after each pass. `reduced=` specifies whether gradients were reduced. Default:
            none.
    """

    at_start: list[Callable[[], None]] = field(default_factory=list)
    before_last: Callable[[], None] = lambda: None
    compare: Callable[[Sequence[bool]], list[bool]] | None = None
    at_end: list[Callable[..., None]] = field(default_factory=list)


@dataclass
class BackwardPass:
    """The backward pass in progress, or the next one. Chunks are given by number.

    When a pass ends or fails, a new object replaces this one, so no state of the pass remains.

    Args:
        arrived: Sets of members whose gradient has arrived, one set per chunk.
        number: Autograd's number of the pass.
        is_running: Whether the pass has begun and not ended.
        has_gradients: Whether a gradient of a parameter has arrived. The pass may be for gradients of inputs only.
        expects_gradients: Whether the pass brings gradients of parameters. None: autograd was not asked yet.
        is_ending: Whether all gradients of the pass have arrived.
        taken: Chunks whose gradients are in their buffers.
        completed: Chunks of which all gradients have arrived.
        left: Chunks that the caller has closed, and that are not in `closed` yet.
        closed: Chunks whose gradients were taken because no more gradients will arrive.
        given_up: Chunks that were reduced without a gradient, because autograd will compute none and they blocked
            complete chunks.
        begun: Number of reductions that have begun.
        departed_at: Number of reductions that had begun when this rank departed from the program. It then began
            reductions of zeros for the other ranks. None: this rank follows the program.
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
    """The gradients that a backward pass is expected to bring, according to earlier passes.

    Args:
        chunks: Trained chunks.
        closing: Whether the caller closes chunks, see `Reducer.close`.
        exchanging: Whether backward itself communicates with other ranks. A chunk is then reduced only after it is
            closed, so that all ranks begin reductions between the same exchanges.

    Attributes:
        counts: Number of members that have a gradient when the chunk is complete, one number per chunk.
        closed_before_end: Numbers of the chunks that the caller closes before backward ends.
        only_when_closed: Whether chunks are reduced only after they are closed.
        from_nested_passes: Whether gradients have ever arrived from a pass within the pass under way.
    """

    def __init__(self, chunks: Sequence[Chunk], *, closing: bool, exchanging: bool) -> None:
        self._chunks = chunks
        self._frozen: set[int] = set()  # chunks with frozen members, which are complete without these
        self.counts = [len(chunk.members) for chunk in chunks]
        self.closed_before_end = set(range(len(chunks))) if closing else set()
        self.only_when_closed = closing and exchanging
        self.from_nested_passes = False

    def begin_pass(self) -> None:
        """Count the trained members again in chunks with frozen members, which the caller may have unfrozen."""
        for number in self._frozen:
            self.counts[number] = self._count(number)

    def end_pass(self, completed: Set[int]) -> None:
        """Find frozen members in the chunks that the pass has not completed.

        Complete chunks have no frozen members. To check all parameters in each pass would take longer than all other
        work per parameter.

        Args:
            completed: Numbers of the chunks that the pass has completed.
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
    """Call a method for each gradient of a parameter. The parameter may be frozen now and trained later.

    Args:
        parameter: Parameter.
        owner: Object of the method. The hook does not keep it alive.
        call: Method, as a function of the class.
        number: First argument of the method.
        index: Second argument of the method.
    """
    # The garbage collector does not see the hooks of a tensor, so a strong reference would be a leak.
    weak = ref(owner)

    def hook(_: torch.Tensor) -> None:
        alive = weak()
        if alive is not None:
            call(alive, number, index)

    frozen = not parameter.requires_grad
    # torch registers hooks only on parameters that require gradients, but keeps them when the parameter is frozen.
    parameter.requires_grad_(True)
    parameter.register_post_accumulate_grad_hook(hook)
    if frozen:
        parameter.requires_grad_(False)
