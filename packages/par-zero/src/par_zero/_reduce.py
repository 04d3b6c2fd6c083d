"""A training step: gradients are reduced chunk by chunk while backward goes on, and parameters follow the optimizer.

backward   a parameter's gradient arrives -> its chunk is complete -> reduce-scatter it        (group)
                                                                   -> all-reduce the share     (replicas, if hybrid)
                                                                   -> all-gather it            (group, stage 0 alone)
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

from par_groups import backend_of

from ._collectives import Handle, all_gather, all_reduce, reduce_scatter
from .layout.buffers import Buffers
from .layout.chunk import Chunk


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Who shares a chunk.

    Args:
        shards: The ranks that each keep a share.
        replicas: The ranks that keep the same share, for hybrid sharding; None without.
        mean: Whether gradients are averaged, or else summed.
    """

    shards: dist.ProcessGroup
    replicas: dist.ProcessGroup | None
    mean: bool

    @property
    def pair(self) -> bool:
        """Whether there are two ranks in all: a sum of two is the same in either order, so any all-reduce will do."""
        return self.replicas is None and dist.get_world_size(self.shards) == 2

    def device_of_flags(self, device: torch.device) -> torch.device:
        """The CPU, unless a group is one of NCCL alone; then the chunks' device."""
        groups = [self.shards] if self.replicas is None else [self.shards, self.replicas]
        return torch.device("cpu") if all(backend_of(each, "cpu") for each in groups) else device

    @property
    def scale(self) -> float:
        """What a sum over all ranks is multiplied with."""
        if not self.mean:
            return 1.0
        copies = 1 if self.replicas is None else dist.get_world_size(self.replicas)
        return 1.0 / (dist.get_world_size(self.shards) * copies)


class Reducer:
    """Reduces gradients during backward.

    Args:
        chunks: In the order in which their gradients are expected.
        stage: Where gradients live afterwards: whole (0), as a share of a whole buffer (1), or as a share alone.
        groups: Who takes part.
        at_end: Called after each pass.
    """

    def __init__(
        self, chunks: Sequence[Chunk], stage: int, groups: Groups, at_end: Callable[[], None] | None = None
    ) -> None:
        self._holders = 0  # those who hold reductions back
        self._chunks, self._stage, self._groups = chunks, stage, groups
        self._at_end = at_end
        self._gradients = Buffers() if stage > 1 else None  # whole gradients, from the first one to their reduction
        self._received = Buffers()
        self._running = False
        self._any = False  # whether a gradient has arrived in this pass; it may be one for inputs alone
        self._launched = 0
        self._complete: set[int] = set()
        self._moving: list[Reduction] = []
        self._used = [torch.zeros(len(chunk.members), dtype=torch.int32) for chunk in chunks]
        for chunk in chunks:
            chunk.begin()
            for index, member in enumerate(chunk.members):
                _on_gradient(member.parameter, _weakly(self._arrived, chunk.number, index))

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add up gradients on each rank, and reduce nothing. It may overlap with itself."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1

    @property
    def sync(self) -> bool:
        """Whether backward passes reduce."""
        return self._holders == 0

    def unused(self) -> list[list[int]]:
        """By chunk: the members that had no gradient on any rank since the last call."""
        found = [(used == 0).nonzero().flatten().tolist() for used in self._used]
        for used in self._used:
            used.zero_()
        return found

    def forget(self, chunks: Sequence[Chunk]) -> None:
        """Drops gradients of some chunks that are not reduced, and who had any."""
        for chunk in chunks:
            chunk.forget()
            self._used[chunk.number].zero_()

    def reset(self) -> None:
        """Forgets a pass that failed, gradients included."""
        for each in self._moving:
            each.handle.wait()  # it writes into buffers that the next pass uses
        self.forget(self._chunks)
        self._begin()

    @property
    def failed(self) -> bool:
        """Whether a pass has begun that did not end, and is not under way."""
        return self._running and torch._C._current_graph_task_id() == -1

    def start(self, *_: torch.Tensor) -> None:
        """A backward pass begins. Passes within it, of activation checkpointing, belong to it."""
        if not self._running:
            self._running = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _arrived(self, number: int, index: int) -> None:
        """A gradient is there."""
        chunk = self._chunks[number]
        member = chunk.members[index]
        if member.parameter.grad is not None and member.parameter.grad.requires_grad:
            raise RuntimeError(
                f"the gradient of {member.names[0]!r} has a graph itself, which would end at the sum over the ranks; "
                "leave out create_graph=True, or ask torch.autograd.grad for gradients of inputs alone"
            )
        self.start()
        self._any = True
        if not chunk.ready[index]:
            chunk.ready[index] = True
            chunk.pending -= 1
        elif self.sync and self._launched > chunk.number:
            raise RuntimeError(
                f"{member.names[0]!r} got another gradient after its sum over the ranks had begun: it is "
                "used in two reentrant checkpoints; pass use_reentrant=False"
            )
        if chunk.pending == 0:  # again where activation checkpointing runs a pass within the pass
            self._completed(chunk)

    def _completed(self, chunk: Chunk) -> None:
        if self.sync and chunk.number == self._launched:
            self._make_room()  # and have its buffer back
        self._used[chunk.number] |= torch.tensor(chunk.take_gradients(self._gradients), dtype=torch.int32)
        self._complete.add(chunk.number)
        while self.sync and self._launched < len(self._chunks) and self._launched in self._complete:
            self._launch(self._chunks[self._launched])

    def _launch(self, chunk: Chunk) -> None:
        """Begins to reduce a chunk. All ranks do so in one order."""
        self._launched += 1
        self._make_room()
        self._moving.append(Reduction(self._reduction(chunk)))

    def _make_room(self) -> None:
        """Brings the older of two reductions to its second collective, and those before it to their next."""
        first = [each for each in self._moving if each.first]
        if len(first) == 2:
            self._advance(self._moving[: self._moving.index(first[1])])

    def _advance(self, some: Sequence["Reduction"]) -> None:
        """Waits for the collectives of some reductions and begins the next ones; what then waits is sent meanwhile."""
        for each in list(some):
            if each.ended():
                self._moving.remove(each)

    def _reduction(self, chunk: Chunk) -> Iterator[Handle]:
        """The collectives of one chunk, each begun when the one before has arrived."""
        groups, gradient = self._groups, chunk.gradient
        if gradient is None:
            raise RuntimeError("a chunk is reduced before its gradients were taken")
        into = chunk.reduction_target(self._stage)
        if self._stage == 0 and groups.pair and not chunk.has_earlier:
            yield all_reduce(gradient, groups.shards)
            gradient.mul_(groups.scale)
            chunk.reduced_(self._stage, into, self._gradients)
            return
        yield reduce_scatter(gradient, into, groups.shards, scale=groups.scale, buffers=self._received)
        chunk.reduced_(self._stage, into, self._gradients)  # the next chunk may have its buffer
        if groups.replicas is not None:
            yield all_reduce(into, groups.replicas)
        chunk.add_earlier_(into)
        if self._stage == 0:
            yield all_gather(gradient, into, groups.shards)

    def _finish(self) -> None:
        """The end of a backward pass."""
        for chunk in self._chunks if self._any else ():
            if chunk.number not in self._complete and (self.sync or any(chunk.ready)):
                self._completed(chunk)
        if self.sync and self._any:
            device = self._groups.device_of_flags(self._chunks[0].share.device)
            whole = torch.tensor([all(bool(used.all()) for used in self._used)], dtype=torch.int32, device=device)
            told = all_reduce(whole, self._groups.shards, dist.ReduceOp.MAX)
            while self._moving:
                self._advance(self._moving)
            told.wait()
            self._tell(whole)
            for chunk in self._chunks:
                chunk.bind_gradients(self._stage)
        self._begin()
        if self._at_end is not None:
            self._at_end()

    def _tell(self, whole: torch.Tensor) -> None:
        """Makes known which members had a gradient on any rank; if one rank had all of them there is nothing to tell.

        Args:
            whole: (1) int32: whether one of the shards had all.
        """
        groups, flags = self._groups, torch.cat(self._used)
        if groups.replicas is not None:
            all_reduce(whole, groups.replicas, dist.ReduceOp.MAX).wait()
        if whole.item():
            flags.fill_(1)
        else:
            flags = flags.to(whole.device)
            for group in (groups.shards, groups.replicas):
                if group is not None:
                    all_reduce(flags, group, dist.ReduceOp.MAX).wait()
        self._used = list(flags.cpu().split([len(chunk.members) for chunk in self._chunks]))

    def _begin(self) -> None:
        self._running, self._any, self._launched = False, False, 0
        self._complete.clear()
        self._moving.clear()
        for chunk in self._chunks:
            chunk.begin()


class Reduction:
    """The reduction of a chunk under way.

    Args:
        steps: Its collectives, each begun when the one before has arrived; the first begins here.

    Attributes:
        handle: Of the collective under way.
        first: Whether that is the first.
    """

    def __init__(self, steps: Iterator[Handle]) -> None:
        self._steps, self.handle, self.first = steps, next(steps), True

    def ended(self) -> bool:
        """Waits for the collective under way, and begins the next; whether there is none."""
        self.handle.wait()
        following = next(self._steps, None)
        if following is not None:
            self.handle, self.first = following, False
        return following is None


def _weakly(method: Callable[[int, int], None], number: int, index: int) -> Callable[[torch.Tensor], None]:
    """A hook that keeps nothing alive: the garbage collector does not see through the hooks of a tensor."""
    weak = WeakMethod(method)

    def hook(_: torch.Tensor) -> None:
        alive = weak()
        if alive is not None:
            alive(number, index)

    return hook


def _on_gradient(parameter: torch.nn.Parameter, call: Callable[[torch.Tensor], None]) -> None:
    """Calls back for each gradient, also of a parameter that is frozen now and trained later."""
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)  # torch takes hooks for no others, but keeps them through a change
    parameter.register_post_accumulate_grad_hook(call)
    if frozen:
        parameter.requires_grad_(False)
