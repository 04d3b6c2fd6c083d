"""Reduces gradients chunk by chunk while backward goes on.

backward   a parameter's gradient arrives -> its chunk is complete -> reduce-scatter it        (group)
                                                                   -> all-reduce the share     (replicas, if hybrid)
                                                                   -> all-gather it            (group, stage 0 alone)
           all have arrived               -> which parameters had a gradient on any rank       (both, one int32 or more)
step       the optimizer updates its flat slices in one fused call each
           -> all-gather the parameters                                                        (group, stages 1 and 2)
           at stage 3 a unit's parameters are gathered before it runs, forward and backward    (group)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakMethod

import torch
import torch.distributed as dist
from torch import nn

from ._collectives import Groups, Handle, all_gather, all_reduce, reduce_scatter
from ._torch_private import call_at_end_of_backward, is_in_backward
from .layout.buffers import Buffers
from .layout.chunk import Chunk


class Reducer:
    """Reduces the gradients of chunks during backward.

    Args:
        chunks: The trained chunks, in the order in which their gradients are expected.
        groups: The ranks that take part.
    """

    def __init__(self, chunks: Sequence[Chunk], groups: Groups) -> None:
        self._chunks, self._groups = chunks, groups
        self._deferring = 0  # how many `no_sync` are entered
        self._running = False  # whether a backward pass has begun and not ended
        self._any = False  # whether a gradient has arrived in this pass; it may be a pass for inputs alone
        self._arrived: list[set[int]] = [set() for _ in chunks]  # the members that have their gradient in this pass
        self._taken: set[int] = set()  # the chunks whose gradients lie in their buffers
        self._launched = 0  # how many chunks' reductions have begun; all ranks begin them in one order
        self._reductions = Reductions()
        self._gradients, self._received = Buffers(), Buffers()
        self._used = [torch.zeros(len(chunk.members), dtype=torch.int32) for chunk in chunks]  # since the last step
        self._at_end: list[Callable[[], None]] = []
        for number, chunk in enumerate(chunks):
            chunk.number = number
            for index, member in enumerate(chunk.members):
                _on_gradient(member.parameter, _weakly(self._gradient_arrived, number, index))

    def at_end(self, call: Callable[[], None]) -> None:
        """Has a function called after each backward pass."""
        self._at_end.append(call)

    def has_all_gradients(self, chunk: Chunk) -> bool:
        """Whether the pass under way has brought all gradients of a chunk; one that is not trained waits for none."""
        return chunk.number < 0 or len(self._arrived[chunk.number]) == len(chunk.members)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add up gradients on each rank, and reduce nothing. It may overlap with itself."""
        self._deferring += 1
        try:
            yield
        finally:
            self._deferring -= 1

    def unused(self) -> list[list[int]]:
        """For each chunk, the members that had no gradient on any rank since the last call."""
        unused = [(used == 0).nonzero().flatten().tolist() for used in self._used]
        for used in self._used:
            used.zero_()
        return unused

    def forget(self, chunks: Sequence[Chunk]) -> None:
        """Drops the gradients of some chunks that are not reduced, and which of their members had any."""
        for chunk in chunks:
            chunk.forget_gradients()
            self._used[chunk.number].zero_()

    def reset(self) -> None:
        """Forgets a pass that has failed, and its gradients."""
        self._reductions.abandon()
        self.forget(self._chunks)
        self._forget_pass()

    @property
    def failed(self) -> bool:
        """Whether a pass has begun that did not end, and is not under way."""
        return self._running and not is_in_backward()

    def start(self, *_: torch.Tensor) -> None:
        """A backward pass begins. Passes within it, of activation checkpointing, belong to it."""
        if not self._running:
            self._running = True
            call_at_end_of_backward(self._end)

    def _gradient_arrived(self, number: int, index: int) -> None:
        """Autograd has left a gradient in a member of a chunk."""
        chunk, arrived = self._chunks[number], self._arrived[number]
        member = chunk.members[index]
        if member.parameter.grad is not None and member.parameter.grad.requires_grad:
            raise RuntimeError(
                f"the gradient of {member.names[0]!r} has a graph itself, which would end at the sum over the ranks; "
                "leave out create_graph=True, or ask torch.autograd.grad for gradients of inputs alone"
            )
        self.start()
        self._any = True
        if index in arrived and not self._deferring and self._launched > number:
            raise RuntimeError(
                f"{member.names[0]!r} got another gradient after its sum over the ranks had begun: it is "
                "used in two reentrant checkpoints; pass use_reentrant=False"
            )
        arrived.add(index)
        if len(arrived) == len(chunk.members):  # again where activation checkpointing runs a pass within the pass
            self._take(chunk)

    def _take(self, chunk: Chunk) -> None:
        """Takes the gradients of a chunk, and begins to reduce all chunks whose turn has come."""
        if not self._deferring and chunk.number == self._launched:
            self._reductions.make_room()  # so that its buffer can be lent to this chunk
        used = chunk.take_gradients(self._gradients)
        self._used[chunk.number] |= torch.tensor(used, dtype=torch.int32)
        self._taken.add(chunk.number)
        while not self._deferring and self._launched in self._taken:
            self._launched += 1
            self._reductions.begin(self._reduction(self._chunks[self._launched - 1]))

    def _reduction(self, chunk: Chunk) -> Iterator[Handle]:
        """The collectives of one chunk, each begun when the one before has arrived."""
        groups, gradient = self._groups, chunk.gradient
        if gradient is None:
            raise RuntimeError(f"chunk {chunk.number} is reduced before its gradients were taken; a bug of par-zero")
        share = chunk.place_of_sum(gradient)
        if not chunk.stage.shards_state and groups.is_pair and not chunk.has_earlier:
            yield all_reduce(gradient, groups.shards)
            gradient.mul_(groups.scale)
            chunk.take_sum(share, self._gradients)
            return
        yield reduce_scatter(gradient, share, groups.shards, scale=groups.scale, buffers=self._received)
        chunk.take_sum(share, self._gradients)  # the next chunk may have its buffer
        if groups.replicas is not None:
            yield all_reduce(share, groups.replicas)
        chunk.add_earlier_(share)
        if not chunk.stage.shards_state:
            yield all_gather(gradient, share, groups.shards)

    def _end(self) -> None:
        """A backward pass ends."""
        for chunk in self._chunks if self._any else ():
            if chunk.number not in self._taken and (not self._deferring or self._arrived[chunk.number]):
                self._take(chunk)
        if self._any and not self._deferring:
            device = self._groups.device_of_flags(self._chunks[0].own.device)
            had_all = torch.tensor([all(bool(used.all()) for used in self._used)], dtype=torch.int32, device=device)
            handle = all_reduce(had_all, self._groups.shards, dist.ReduceOp.MAX)
            self._reductions.finish()
            handle.wait()
            self._share_used(had_all)
            for chunk in self._chunks:
                chunk.bind_gradients()
        self._forget_pass()
        for call in self._at_end:
            call()

    def _share_used(self, had_all: torch.Tensor) -> None:
        """Makes `used` say which members had a gradient on any rank.

        Args:
            had_all: (1) int32: whether a rank of the shards had gradients of all members, so that all members had one.
        """
        groups, used = self._groups, torch.cat(self._used)
        if groups.replicas is not None:
            all_reduce(had_all, groups.replicas, dist.ReduceOp.MAX).wait()
        if had_all.item():
            used.fill_(1)
        else:
            used = used.to(had_all.device)
            for group in (groups.shards, groups.replicas):
                if group is not None:
                    all_reduce(used, group, dist.ReduceOp.MAX).wait()
        self._used = list(used.cpu().split([len(chunk.members) for chunk in self._chunks]))

    def _forget_pass(self) -> None:
        self._running, self._any, self._launched = False, False, 0
        self._taken.clear()
        for arrived in self._arrived:
            arrived.clear()


@dataclass
class _Reduction:
    """The reduction of a chunk under way.

    Args:
        steps: Its collectives that are still to come, each begun by asking for it.
        handle: The collective under way.
        at_first: Whether that is the first one.
    """

    steps: Iterator[Handle]
    handle: Handle
    at_first: bool = True


class Reductions:
    """Reductions under way, in the order in which they began.

    At most two are at their first collective, which needs a whole chunk's memory: one that is sent, and the next.
    Those before them may be at later ones.
    """

    def __init__(self) -> None:
        self._under_way: list[_Reduction] = []

    def begin(self, steps: Iterator[Handle]) -> None:
        """Begins a reduction.

        Args:
            steps: Its collectives, each begun by asking for it, when the one before has arrived.
        """
        self.make_room()
        self._under_way.append(_Reduction(steps, next(steps)))

    def make_room(self) -> None:
        """Where two reductions are at their first collective, waits for the older one's, and for those before it."""
        first = [number for number, reduction in enumerate(self._under_way) if reduction.at_first]
        if len(first) == 2:
            self._wait_for(self._under_way[: first[1]])

    def finish(self) -> None:
        """Waits for all reductions, which go on in turn."""
        while self._under_way:
            self._wait_for(list(self._under_way))

    def abandon(self) -> None:
        """Waits for what is on its way, as it writes into buffers that are used again, and begins nothing more."""
        for reduction in self._under_way:
            reduction.handle.wait()
        self._under_way.clear()

    def _wait_for(self, reductions: Sequence[_Reduction]) -> None:
        """Waits for the collectives of some reductions, the oldest first, and begins the next one of each at once."""
        for reduction in reductions:
            reduction.handle.wait()
            following = next(reduction.steps, None)
            if following is None:
                self._under_way.remove(reduction)
            else:
                reduction.handle, reduction.at_first = following, False


def _weakly(method: Callable[[int, int], None], number: int, index: int) -> Callable[[torch.Tensor], None]:
    """A hook that keeps nothing alive: the garbage collector does not see through the hooks of a tensor."""
    weak = WeakMethod(method)

    def hook(_: torch.Tensor) -> None:
        alive = weak()
        if alive is not None:
            alive(number, index)

    return hook


def _on_gradient(parameter: nn.Parameter, call: Callable[[torch.Tensor], None]) -> None:
    """Calls back for each gradient, also of a parameter that is frozen now and trained later."""
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)  # torch takes hooks for no others, but keeps them through a change
    parameter.register_post_accumulate_grad_hook(call)
    if frozen:
        parameter.requires_grad_(False)
