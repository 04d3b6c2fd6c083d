"""The reduction of gradients, chunk by chunk, while backward continues.

In backward, the gradient of a parameter arrives. When all gradients of its chunk have arrived, the rank begins:

- a reduce-scatter of the chunk over the group;
- with hybrid sharding, an all-reduce of the shard over the replicas;
- at stage 0, an all-gather of the chunk over the group.

When backward ends, the rank finishes the remaining collectives. The ranks also all-reduce two int32 flags, one of which
is whether any rank had gradients of all parameters. If no rank had all of them, the ranks all-reduce in the step which
parameters had a gradient on any rank. The optimizer then updates each of its flat slices in one fused call. Stages 1
and 2 all-gather the updated parameters. Stage 3 gathers a unit's parameters before its forward and backward.

All ranks begin reductions in one order, on one communicator. It is the order in which the lowest rank's chunks were
complete in an earlier pass. A chunk that is frozen, or registered in another order, therefore blocks no other chunk. A
chunk that this rank does not use may come before complete chunks in this order. If autograd reports that no gradient of
it will arrive, it is reduced without a gradient. No rank waits for another rank during backward: if backward itself
communicates over another communicator, the other rank may need this rank first.

At stage 3 a chunk is closed when backward has finished for its unit. A member without a gradient is then unused. All
ranks therefore begin reductions at the same position between the gathers, whichever parameters each rank uses. If not
all ranks shard all chunks, backward itself communicates. Chunks are then closed at every stage, and are reduced only
afterwards, so that all ranks begin reductions at the same position between these exchanges, too.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from .._collectives import Flags
from .._torch_private import call_at_end_of_backward, current_pass, is_in_backward, will_get_gradient
from ..layout.buffers import Buffers
from ..layout.chunk import Chunk
from ..layout.gradients import ChunkGradients
from ..layout.meter import BUFFERS, Meter
from ..layout.sharers import Sharers
from .backward import BackwardHooks, BackwardPass, ExpectedGradients, call_on_gradient
from .in_flight import EmptyReductions, ReductionBuffers, Reductions, is_one_all_reduce, reduction
from .order import LearnedOrder, learn_orders
from .refusals import refuse_another, refuse_arriving, refuse_closed, refuse_given_up, refuse_gradient
from .usage import GradientUsage


class Reducer:
    """The object that reduces the gradients of chunks during backward.

    Args:
        chunks: Trained chunks, in the order in which their gradients are expected in the first pass.
        sharers: Ranks that shard the chunks.
        inflight: Maximum number of chunks whose reductions are in flight in backward. None (default): two on a GPU, and
            any number on a CPU, or if not all ranks shard all chunks, because backward itself then communicates.
        meter: Meter that counts the bytes of the lent buffers. Default: none.
        closing: Whether the caller closes chunks, see `close`. If not all ranks shard all chunks, a chunk is then
            reduced only after it is closed, because all ranks must begin reductions and exchanges in one order.
            Default: False.

    Attributes:
        hooks: Functions that are called when backward begins and ends.
        gradients: Gradients of the chunks, by number.
        buffers: Buffers that reductions use one after the other.
        usage: Parameters that have gradients for the optimizer.
        arriving: Numbers of the chunks whose parameters are in flight after a step, and were not read yet.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        sharers: Sharers,
        inflight: int | None = None,
        meter: Meter | None = None,
        *,
        closing: bool = False,
    ) -> None:
        self._chunks, self._sharers, self._meter = chunks, sharers, meter or Meter()
        self.gradients = [ChunkGradients(chunk) for chunk in chunks]
        self._deferring = 0  # number of open `no_sync` contexts
        self._pass = BackwardPass([set() for _ in chunks])
        self._expected = ExpectedGradients(chunks, closing=closing, exchanging=len(sharers.each) > 1)
        self._order = LearnedOrder(range(len(chunks)))  # order in which reductions begin
        self._orders = [self._order]  # the orders that the ranks learn
        self.arriving: set[int] = set()
        self.hooks = BackwardHooks()
        self.usage = GradientUsage(self.gradients, sharers)
        single = all(chunk.groups.replicas is None and chunk.stage.shards_state for chunk in chunks)
        on_cpu = all(chunk.own.is_cpu for chunk in chunks)
        # The host launches work far ahead of a GPU, so it never finds a collective complete. The GPU waits instead.
        # Otherwise all gradients would be in memory, and the collectives after a reduce-scatter would begin last.
        lends = any(chunk.stage.shards_gradients for chunk in chunks)
        if inflight is None and not on_cpu and (lends or not single) and len(sharers.each) == 1:
            inflight = 2
        self._reductions = Reductions(inflight)
        self.buffers = ReductionBuffers(Buffers(self._meter), Buffers(self._meter), inflight or 2)
        self._empty = EmptyReductions()
        for number, chunk in enumerate(chunks):
            chunk.number = number
            for index, member in enumerate(chunk.members):
                call_on_gradient(member.parameter, self, Reducer.note_gradient, number, index)

    def memory(self) -> Iterator[tuple[str, torch.Tensor, str]]:
        """Yield the memory of gradients and reductions, as tuples of kind, tensor and tier."""
        for gradients in self.gradients:
            yield from gradients.memory()
        for buffer in (*self.buffers.gradients.free, *self.buffers.received.free):
            yield BUFFERS, buffer, "device"

    def pop_sum(self, chunk: Chunk) -> torch.Tensor:
        """Return the elements `updated` of a chunk's sum over the ranks, and drop the sum.

        Args:
            chunk: Chunk.
        """
        return self.gradients[chunk.number].pop_sum()

    def expect_last(self, chunks: Iterable[Chunk]) -> None:
        """Expect some chunks to be closed only when backward ends.

        Args:
            chunks: Chunks, such as those of the root.
        """
        last = {chunk.number for chunk in chunks}
        # If all chunks wait until they are closed, these chunks would block the chunks behind them.
        self._expected.closed_before_end -= last
        if self._expected.only_when_closed:
            self._order.numbers.sort(key=last.__contains__)

    def learn(self, order: LearnedOrder) -> None:
        """Let the ranks learn another order, in addition to the order of reductions.

        Args:
            order: Order that the caller observes and follows.
        """
        self._orders.append(order)

    def learn_first(self, order: LearnedOrder) -> None:
        """Let the ranks learn another order instead of the order of reductions, which follows from it: see `arrange`.

        Args:
            order: Order that the caller observes and follows.
        """
        self._orders[0] = order

    def arrange(self, numbers: list[int]) -> None:
        """Set the order of reductions from the next pass on.

        Args:
            numbers: Numbers of all chunks, in the same order on all ranks.
        """
        self._order.numbers = numbers

    @property
    def begun(self) -> int:
        """Number of reductions that have begun in this pass."""
        return self._pass.begun

    @property
    def begun_with_gradients(self) -> int:
        """Number of reductions that had begun in this pass when this rank departed; 0 if it has not departed."""
        return self._pass.departed_at or 0

    @property
    def has_departed(self) -> bool:
        """Whether this rank has begun reductions of zeros for other ranks in this pass."""
        return self._pass.departed_at is not None

    def wait_only_for(self, count: int | None) -> None:
        """Let backward wait only for the first reductions of the pass, which all ranks have begun.

        Args:
            count: Number of these reductions. None: all reductions, because the ranks begin them at the same places.
        """
        self._reductions.shared = count

    @property
    def is_bounded(self) -> bool:
        """Whether backward may have to wait for a reduction before the next one begins."""
        return self._reductions.is_bounded

    @property
    def failed(self) -> bool:
        """Whether a pass has begun and failed: it has not ended, and no backward is in progress."""
        return self._pass.is_running and not is_in_backward()

    def begin_all(self, count: int) -> None:
        """Begin reductions up to a number, and wait for them, although the pass has failed.

        Args:
            count: Number of reductions that another rank has begun, and that would otherwise never complete.
        """
        # If this rank has not begun its backward, the stand-ins are still in place of gradients.
        self.usage.stand_ins.take(None)
        for number in self._order.numbers[self._pass.begun : count]:
            self.gradients[number].take(self.buffers.gradients)
            self._begin(self._chunks[number])
        self._abandon()

    def begin_empty(self, stops: Container[int] = ()) -> None:
        """Begin reductions of zeros, because this rank has departed from the program that other ranks still follow.

        Another rank that bounds its reductions waits in backward for the reductions of this rank. This rank reaches the
        comparison with the other ranks only after all reductions, so it must begin its part of them first.

        Args:
            stops: Numbers of chunks that no other rank can have begun yet. The loop ends at the first of them, in the
                order of reductions. Default: empty.
        """
        current, order = self._pass, self._order.numbers
        if current.departed_at is None:
            current.departed_at = current.begun
        while current.begun < len(order) and order[current.begun] not in stops:
            self._empty.begin(self.gradients[order[current.begun]])
            current.begun += 1

    def rejoin(self) -> None:
        """Repeat the reductions of zeros with gradients later, because all ranks have departed at the same position."""
        # The sums of zeros are dropped. `begun` returns to its value before, so the same chunks are due again.
        self._empty.wait()
        current = self._pass
        if current.departed_at is not None:
            current.begun, current.departed_at = current.departed_at, None

    def _abandon(self) -> None:
        """Wait for all reductions in flight, and drop their results."""
        self._reductions.abandon()
        self._empty.wait()

    def has_all_gradients(self, chunk: Chunk) -> bool:
        """Return whether all gradients of a chunk have arrived in this pass. An untrained chunk expects no gradients.

        Args:
            chunk: Chunk.
        """
        return chunk.number < 0 or len(self._pass.arrived[chunk.number]) >= self._expected.counts[chunk.number]

    def awaits(self, chunk: Chunk) -> bool:
        """Return whether the current pass will bring a gradient of a chunk that has not arrived yet.

        Args:
            chunk: Chunk.
        """
        return not self.has_all_gradients(chunk) and any(map(will_get_gradient, self._missing(chunk)))

    def may_bring(self, chunk: Chunk) -> bool:
        """Return whether the pass may bring a gradient of a chunk.

        Args:
            chunk: Chunk.
        """
        # Autograd announces no gradients of passes within the pass, so any chunk may receive one then.
        return self._expected.from_nested_passes or self.awaits(chunk)

    def close(self, chunks: Iterable[Chunk]) -> None:
        """Record that the pass brings no more gradients of some chunks. A member without a gradient is unused.

        A rank that does not use a parameter therefore begins its reduction at the same position as the other ranks.

        Args:
            chunks: Chunks to close.
        """
        current, observed = self._pass, self._order.observed
        # Under `no_sync`, other ranks may still reach units of a pass that has ended on this rank.
        if not current.is_running:
            return
        current.left += [chunk.number for chunk in chunks if chunk.number >= 0]
        if self._deferring or not current.left or not self._brings_gradients():
            return
        for number in current.left:
            current.closed.add(number)
            if number not in current.taken:
                # Without a wait: this rank may still have to gather with ranks that have not begun those reductions.
                self._take(self._chunks[number], waits=False)
            if number not in observed:
                observed.append(number)
        current.left.clear()

    def begin(self, before: Iterable[Chunk] = ()) -> None:
        """Begin the reductions of all chunks that are ready and next in the order.

        Args:
            before: Chunks at which the loop stops, even if they are ready. Default: none.
        """
        order, stops = self._order.numbers, {chunk.number for chunk in before}
        current, waits = self._pass, self._expected.only_when_closed
        while not self._deferring and current.begun < len(order) and order[current.begun] not in stops:
            number = order[current.begun]
            if number not in current.taken and (current.is_ending or self._gives_up(number)):
                self._take(self._chunks[number])
            if number not in current.taken or (waits and not current.is_ending and number not in current.closed):
                break
            self._begin(self._chunks[number])

    def _gives_up(self, number: int) -> bool:
        """Return whether to reduce the next chunk without gradients, because it blocks complete chunks.

        Another rank that uses the chunk may wait for its reduction before this rank can reach the end of backward.
        """
        current, expected = self._pass, self._expected
        # A chunk that is closed before the end has its position between the gathers of all ranks, so it must wait.
        holds_back = len(current.taken) > current.begun and number not in expected.closed_before_end
        # Autograd does not announce the gradients of passes within the pass, so the chunk waits for the end then.
        if not holds_back or expected.from_nested_passes or expected.only_when_closed:
            return False
        # In the first pass the order is a guess, and gradients may still turn out to arrive from nested passes.
        if not self._order.is_agreed or not is_in_backward():
            return False
        if any(will_get_gradient(parameter, if_unknown=True) for parameter in self._missing(self._chunks[number])):
            return False
        current.given_up.add(number)
        return True

    def _missing(self, chunk: Chunk) -> Iterator[nn.Parameter]:
        """Yield the parameters of a chunk whose gradient has not arrived in this pass."""
        arrived = self._pass.arrived[chunk.number]
        return (member.parameter for index, member in enumerate(chunk.members) if index not in arrived)

    def _brings_gradients(self) -> bool:
        """Return whether the current pass brings gradients of parameters, and not only of inputs."""
        current = self._pass
        if current.expects_gradients is None:
            members = (member for chunk in self._chunks for member in chunk.members)
            current.expects_gradients = any(will_get_gradient(member.parameter) for member in members)
        return current.expects_gradients or current.has_gradients

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on each rank in backward passes inside, without reductions. Contexts may be nested."""
        self._deferring += 1
        try:
            yield
        finally:
            self._deferring -= 1

    def reset(self) -> None:
        """Forget a pass that has failed, and its gradients."""
        self._abandon()
        self.usage.forget(self._chunks)
        self._forget_pass()

    def start(self, *_: torch.Tensor, arrived: torch.Tensor | None = None) -> None:
        """Begin a backward pass, unless a pass is in progress. Passes within it, of checkpointing, belong to it.

        Args:
            arrived: Parameter whose gradient has reported the pass. None (default): another event has reported it.
        """
        if not self._pass.is_running:
            self._pass.is_running, self._pass.number = True, current_pass()
            self._expected.begin_pass()
            call_at_end_of_backward(self._end)
            for call in () if self._deferring else self.hooks.at_start:
                call()
            self.usage.begin_pass(arrived)

    def note_gradient(self, number: int, index: int) -> None:
        """Record that autograd has set the gradient of a member of a chunk.

        Args:
            number: Number of the chunk.
            index: Index of the member.
        """
        current, expected, chunk = self._pass, self._expected, self._chunks[number]
        arrived, member = current.arrived[number], chunk.members[index]
        name, gradient = member.names[0], member.parameter.grad
        if gradient is not None and (gradient.layout != torch.strided or gradient.requires_grad):
            refuse_gradient(name, gradient)
        if number in self.arriving:
            refuse_arriving(name)
        if not current.is_running:
            self.start(arrived=member.parameter)
        current.has_gradients = True
        expected.from_nested_passes = expected.from_nested_passes or current_pass() != current.number
        if number in current.given_up:
            refuse_given_up(name)
        if number in current.closed:
            refuse_closed(name)
        if index in arrived and not self._deferring and number in self._order.numbers[: current.begun]:
            refuse_another(name)
        arrived.add(index)
        # True again for later gradients: checkpointing may run a pass within the pass, with another gradient.
        if len(arrived) >= expected.counts[number]:
            current.completed.add(number)
            if not expected.only_when_closed:
                self._order.observed.append(number)
            self._take(chunk)
            self.begin()

    def _take(self, chunk: Chunk, *, waits: bool = True) -> None:
        """Take the gradients of a chunk, and wait before for a reduction whose buffer it can borrow."""
        current, order, gradients = self._pass, self._order.numbers, self.gradients[chunk.number]
        is_next = current.begun < len(order) and chunk.number == order[current.begun]
        if waits and is_next and not self._deferring:
            self._reductions.make_room()  # a finished reduction returns its buffer, which this chunk can borrow
        self.usage.add(chunk.number, gradients.take(self.buffers.gradients))
        current.taken.add(chunk.number)

    def _begin(self, chunk: Chunk) -> None:
        """Begin the reduction of the next chunk."""
        self._pass.begun += 1
        gradients = self.gradients[chunk.number]
        one = chunk.stage.shards_state or is_one_all_reduce(gradients)
        self._reductions.begin(reduction(gradients, self.buffers), single=one and chunk.groups.replicas is None)

    def _end(self) -> None:
        """End a backward pass."""
        current = self._pass
        reduced = current.has_gradients and not self._deferring
        if reduced:
            self._expected.end_pass(current.completed)
            requests = [order.end_pass() for order in self._orders]
            current.is_ending = True
            self.hooks.before_last()
            self.begin()
            self._finish(requests_order=any(requests))
        else:
            for number in self._order.numbers:
                if current.arrived[number] and number not in current.taken:
                    self._take(self._chunks[number])
        self._meter.note("release")
        if self.buffers.end_pass():
            for gradients in self.gradients:
                gradients.forget_buffer()
        # After `end_pass` of the buffers, so that the optimizer's gradients can use the memory that it has freed.
        for number in range(len(self._chunks)) if reduced else ():
            self.usage.bind(number)
        self._forget_pass()
        for call in self.hooks.at_end:
            call(reduced=reduced)

    def _finish(self, *, requests_order: bool) -> None:
        """Wait for all reductions, and exchange the flags that later steps need.

        The next pass reads the flags, which have arrived by then. The step reads them earlier only on ranks that lack
        a gradient of some member.

        Args:
            requests_order: Whether this rank requests that the ranks learn an order.
        """
        had_all = self.usage.has_all
        mine, groups = [had_all, requests_order], self._sharers.agreeing
        if self.hooks.compare is not None:
            mine = self.hooks.compare(mine)  # first, because ranks that differ raise, and may have reductions in flight
            groups = self._sharers.beside_gathering
        flags = Flags(mine, groups, self.usage.device)
        # The usage of the previous pass must be exchanged before this pass replaces its flags.
        self.usage.share()
        self._reductions.finish()
        flags.pass_on()
        before = self.usage.end_pass(flags, had_all=had_all)
        if before is None:
            return
        # The flag is equal on all ranks, so all ranks join the all-reduce of `learn_orders`, or no rank does.
        if before.read()[1]:
            learn_orders(self._orders, self._sharers.agreeing, self.usage.device)
        for order in self._orders:
            order.is_agreed = True

    def _forget_pass(self) -> None:
        self._pass = BackwardPass([set() for _ in self._chunks])
        self._order.observed.clear()
