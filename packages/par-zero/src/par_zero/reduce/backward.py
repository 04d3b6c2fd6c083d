"""The state of a backward pass: its hooks, the gradients that have arrived, and the gradients that are expected."""

from collections.abc import Callable, Container, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeVar
from weakref import ref

import torch
from torch import nn

from .._torch_private import will_get_gradient
from ..layout.chunk import Chunk

_Owner = TypeVar("_Owner")


@dataclass
class BackwardHooks:
    """Functions that a reducer calls when a backward pass begins and ends.

    Args:
        at_start: Functions that are called when a pass begins that will reduce gradients. Default: none.
        before_last: Function that is called when backward has ended, before the ranks are compared. Default: does
            nothing.
        compare: Function that compares the ranks of the shards at the end of a pass, and may raise. It receives this
            rank's flags, the second of which is whether gradients arrived late, and returns them combined over the
            ranks. None (default): the reducer exchanges the flags, and late gradients raise an error.
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
        begun: Chunks whose reductions have begun.
        late: Chunks of which gradients arrived after their reduction had begun. They are reduced again at the end.
        empty: Number of reductions of zeros that this rank has begun for other ranks when it departed from the program.
            None: this rank has not departed.
    """

    arrived: list[set[int]]
    number: int = -1
    is_running: bool = False
    has_gradients: bool = False
    expects_gradients: bool | None = None
    is_ending: bool = False
    taken: set[int] = field(default_factory=set)
    completed: set[int] = field(default_factory=set)
    begun: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    empty: int | None = None


class ExpectedGradients:
    """The gradients that a backward pass is expected to bring, according to earlier passes.

    Args:
        chunks: Trained chunks.

    Attributes:
        counts: Number of members that have a gradient when the chunk is complete, one number per chunk.
        from_nested_passes: Whether gradients have ever arrived from a pass within the pass under way.
        recomputed: Numbers of the chunks that backward is still to recompute, in passes within the pass.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self._chunks = chunks
        self._frozen: set[int] = set()  # chunks with frozen members, which are complete without these
        self.counts = [len(chunk.members) for chunk in chunks]
        self.from_nested_passes = False
        self.recomputed: Container[int] = ()

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

    def awaits(self, current: BackwardPass, number: int, *, asks: bool, if_unknown: bool) -> bool:
        """Return whether the pass may bring a gradient of a chunk that has not arrived yet.

        Args:
            current: Pass in progress.
            number: Number of the chunk.
            asks: Whether to ask autograd. If not, all trained members count as coming.
            if_unknown: Result for gradients that autograd does not announce, as those of passes within the pass.
        """
        arrived = current.arrived[number]
        if len(arrived) >= self.counts[number]:
            return False
        if not asks or number in self.recomputed or (if_unknown and self.from_nested_passes):
            return True
        return any(
            will_get_gradient(member.parameter, if_unknown=if_unknown)
            for index, member in enumerate(self._chunks[number].members)
            if index not in arrived
        )

    def brings_any(self, current: BackwardPass) -> bool:
        """Return whether a pass brings gradients of parameters, and not only of inputs.

        Args:
            current: Pass in progress.
        """
        if current.expects_gradients is None:
            members = (member for chunk in self._chunks for member in chunk.members)
            current.expects_gradients = any(will_get_gradient(member.parameter) for member in members)
        return current.expects_gradients or current.has_gradients

    def _count(self, number: int) -> int:
        return sum(member.parameter.requires_grad for member in self._chunks[number].members)


def call_on_gradient(
    parameter: nn.Parameter,
    owner: _Owner,
    call: Callable[[_Owner, int, int, torch.Tensor], None],
    number: int,
    index: int,
) -> None:
    """Call a method for each gradient of a parameter. The parameter may be frozen now and trained later.

    Args:
        parameter: Parameter.
        owner: Object of the method. The hook does not keep it alive.
        call: Method, as a function of the class. Its last argument is the parameter.
        number: First argument of the method.
        index: Second argument of the method.
    """
    # The garbage collector does not see the hooks of a tensor, so a strong reference would be a leak.
    weak = ref(owner)

    def hook(parameter: torch.Tensor) -> None:
        alive = weak()
        if alive is not None:
            call(alive, number, index, parameter)

    frozen = not parameter.requires_grad
    # torch registers hooks only on parameters that require gradients, but keeps them when the parameter is frozen.
    parameter.requires_grad_(True)
    parameter.register_post_accumulate_grad_hook(hook)
    if frozen:
        parameter.requires_grad_(False)
