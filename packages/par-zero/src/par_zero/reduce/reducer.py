"""Reduces gradients chunk by chunk while backward goes on.

backward   a parameter's gradient arrives -> its chunk is complete -> reduce-scatter it        (group)
                                                                   -> all-reduce the shard     (replicas, if hybrid)
                                                                   -> all-gather it            (group, stage 0 alone)
           backward ends                  -> what is not all-reduced or all-gathered yet, and whether any rank had
                                             gradients of all parameters                       (both, two int32)
step       if none had                    -> which parameters had a gradient on any rank       (both)
           the optimizer updates its flat slices in one fused call each
           -> all-gather the parameters                                                        (group, stages 1 and 2)
           at stage 3 a unit's parameters are gathered before it runs, forward and backward    (group)

All ranks begin reductions in one order, on one communicator. It is the order in which the first rank's chunks were
complete in an earlier pass, so a chunk that is frozen or registered elsewhere holds no other back. A chunk that only
this rank does not use is due before others that are complete. Autograd reports that no gradient of it will arrive, so
it is reduced without one. Nothing waits for another rank during backward. If backward itself exchanges, over a
communicator of its own, the other rank may need this one first.

At stage 3 a chunk is closed when backward has finished for its unit. A member without a gradient by then is unused. So
reductions are at one place between the gatherings of all ranks, whatever each rank uses. If not all ranks share all
chunks, ranks exchange in backward. Then chunks are closed at every stage, and no reduction begins before: so reductions
are at one place between these exchanges, too.
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
    """Reduces the gradients of chunks during backward.

    Args:
        chunks: The trained chunks, in the order in which their gradients are expected before any have arrived.
        sharers: The ranks that take part.
        inflight: Number of chunks whose reductions may be in flight in backward; None: two on a device that waits in
            the order of its work, else any number. It is any number also if not all ranks share all chunks, because
            then backward itself exchanges with other ranks.
        meter: Counts the bytes of the buffers that the reducer lends.
        closing: Whether the caller closes chunks, see `close`. Then, if not all ranks share all chunks, none is reduced
            before it is closed: where backward itself exchanges, all ranks must begin both in one order.

    Attributes:
        hooks: Functions that are called when backward begins and ends.
        gradients: The gradients of the chunks, by number.
        buffers: Memory that reductions need one after the other.
        usage: Which parameters have gradients that the optimizer may step by.
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
        self._chunks, self._sharers = chunks, sharers
        self.gradients = [ChunkGradients(chunk) for chunk in chunks]
        self._deferring = 0  # how many `no_sync` are entered
        self._pass = BackwardPass([set() for _ in chunks])
        self._expected = ExpectedGradients(chunks, closing=closing, exchanging=len(sharers.each) > 1)
        self._order = LearnedOrder(range(len(chunks)))  # in which reductions begin
        self._orders = [self._order]  # those that the ranks learn
        self.arriving: set[int] = set()
        self.hooks = BackwardHooks()
        self.usage = GradientUsage(self.gradients, sharers)
        single = all(chunk.groups.replicas is None and chunk.stage.shards_state for chunk in chunks)
        on_cpu = all(chunk.own.is_cpu for chunk in chunks)
        # The CPU that serves a device is so far ahead of it that it never finds a collective complete. So there the
        # device waits, or else all gradients would be in memory, and what follows a reduce-scatter would begin last.
        lends = any(chunk.stage.shards_gradients for chunk in chunks)
        if inflight is None and not on_cpu and (lends or not single) and len(sharers.each) == 1:
            inflight = 2
        self._reductions = Reductions(inflight)
        self.buffers = ReductionBuffers(Buffers(meter), Buffers(meter), inflight or 2)
        self._empty = EmptyReductions()
        for number, chunk in enumerate(chunks):
            chunk.number = number
            for index, member in enumerate(chunk.members):
                call_on_gradient(member.parameter, self, Reducer.note_gradient, number, index)

    def memory(self) -> Iterator[tuple[str, torch.Tensor, str]]:
        """Yield the memory of gradients and of reductions: its kind, a tensor in it, its tier."""
        for gradients in self.gradients:
            yield from gradients.memory()
        for buffer in (*self.buffers.gradients.free, *self.buffers.received.free):
            yield BUFFERS, buffer, "device"

    def pop_sum(self, chunk: Chunk) -> torch.Tensor:
        """Return elements `updated` of a chunk's sum over the ranks, and keep it no longer."""
        return self.gradients[chunk.number].pop_sum()

    def expect_last(self, chunks: Iterable[Chunk]) -> None:
        """Expect that some chunks are closed only when backward ends, so other chunks that wait for that go first."""
        last = {chunk.number for chunk in chunks}
        self._expected.closed_before_end -= last
        if self._expected.only_when_closed:
            self._order.numbers.sort(key=last.__contains__)

    def learn(self, order: LearnedOrder) -> None:
        """Have the ranks learn another order of the chunks, in addition to that of reductions."""
        self._orders.append(order)

    def learn_first(self, order: LearnedOrder) -> None:
        """Have the ranks learn another order in place of that of reductions, which follows from it: see `arrange`."""
        self._orders[0] = order

    def arrange(self, numbers: list[int]) -> None:
        """Begin reductions in a certain order from the next pass on.

        Args:
            numbers: All chunks by number, in the same order on all ranks.
        """
        self._order.numbers = numbers

    @property
    def begun(self) -> int:
        """How many chunks' reductions have begun in this pass."""
        return self._pass.begun

    @property
    def begun_with_gradients(self) -> int:
        """How many reductions had begun in this pass when this rank departed; 0 if it begins none for other ranks."""
        return self._pass.departed_at or 0

    @property
    def is_bounded(self) -> bool:
        """Whether backward may have to wait for a reduction before the next one begins."""
        return self._reductions.is_bounded

    @property
    def failed(self) -> bool:
        """Whether a pass has begun that did not end, and is not under way."""
        return self._pass.is_running and not is_in_backward()

    def begin_all(self, count: int) -> None:
        """Begin reductions until there are as many, and wait for them, though the pass has failed.

        Other ranks have begun as many, which else would never end.
        """
        self.usage.stand_ins.take(None)  # where this rank has not come to its backward pass
        for number in self._order.numbers[self._pass.begun : count]:
            self.gradients[number].take(self.buffers.gradients)
            self._begin(self._chunks[number])
        self._abandon()

    def begin_empty(self, stops: Container[int] = ()) -> None:
        """Begin reductions of zeros, as this rank has left the order that other ranks still follow.

        A rank that bounds its reductions waits in backward for those of other ranks. So a rank that departs, and will
        meet the other ranks behind all of them, has to begin its own.

        Args:
            stops: Where it stops: the chunks that no other rank can have begun yet, by number.
        """
        current, order = self._pass, self._order.numbers
        if current.departed_at is None:
            current.departed_at = current.begun
        while current.begun < len(order) and order[current.begun] not in stops:
            self._empty.begin(self.gradients[order[current.begun]])
            current.begun += 1

    def rejoin(self) -> None:
        """Begin again what was begun with zeros, as all ranks have departed at the same place."""
        self._empty.wait()
        current = self._pass
        if current.departed_at is not None:
            current.begun, current.departed_at = current.departed_at, None

    def _abandon(self) -> None:
        """Wait for all reductions in flight, and forget them."""
        self._reductions.abandon()
        self._empty.wait()

    def has_all_gradients(self, chunk: Chunk) -> bool:
        """Return whether the pass has brought all gradients of a chunk; one that is not trained waits for none."""
        return chunk.number < 0 or len(self._pass.arrived[chunk.number]) >= self._expected.counts[chunk.number]

    def awaits(self, chunk: Chunk) -> bool:
        """Return whether the pass under way brings a gradient of a chunk that has not arrived yet."""
        return not self.has_all_gradients(chunk) and any(map(will_get_gradient, self._missing(chunk)))

    def may_bring(self, chunk: Chunk) -> bool:
        """Return whether the pass may bring a gradient of a chunk; autograd announces none of nested passes."""
        return self._expected.from_nested_passes or self.awaits(chunk)

    def close(self, chunks: Iterable[Chunk]) -> None:
        """Note that the pass brings no more gradients of some chunks: a member without one is unused.

        So a rank that does not use a parameter begins its reduction at the same place as the ranks that do.
        """
        current, observed = self._pass, self._order.observed
        if not current.is_running:  # under no_sync other ranks still come to units of a pass that is over
            return
        current.left += [chunk.number for chunk in chunks if chunk.number >= 0]
        if self._deferring or not current.left or not self._brings_gradients():
            return
        for number in current.left:
            current.closed.add(number)
            if number not in current.taken:
                self._take(self._chunks[number])
            if number not in observed:
                observed.append(number)
        current.left.clear()

    def begin(self, before: Iterable[Chunk] = ()) -> None:
        """Begin to reduce all chunks whose turn has come.

        Args:
            before: Where it stops, though more may be reduced.
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
        """Return whether a chunk that is due holds back others, though no gradient of it will arrive.

        Another rank that uses it may wait for its reduction before this rank can come to the end of backward. Autograd
        does not announce the gradients of passes within the pass, so with these the chunk waits to the end. A chunk
        that is closed before the end has its place between the gatherings of all ranks, and is not given up.
        """
        current, expected = self._pass, self._expected
        holds_back = len(current.taken) > current.begun and number not in expected.closed_before_end
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
        """Return whether the pass under way brings gradients of parameters, and not of inputs only."""
        current = self._pass
        if current.expects_gradients is None:
            members = (member for chunk in self._chunks for member in chunk.members)
            current.expects_gradients = any(will_get_gradient(member.parameter) for member in members)
        return current.expects_gradients or current.has_gradients

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add up gradients on each rank, and reduce nothing. It may overlap with itself."""
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
        """Begin a backward pass, unless one is under way: passes within it, of activation checkpointing, belong to it.

        Args:
            arrived: The parameter whose gradient has reported it.
        """
        if not self._pass.is_running:
            self._pass.is_running, self._pass.number = True, current_pass()
            self._expected.begin_pass()
            call_at_end_of_backward(self._end)
            for call in () if self._deferring else self.hooks.at_start:
                call()
            self.usage.begin_pass(arrived)

    def note_gradient(self, number: int, index: int) -> None:
        """Note that autograd has set the gradient of a member of a chunk."""
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
        if len(arrived) >= expected.counts[number]:  # again where activation checkpointing runs a pass within the pass
            current.completed.add(number)
            if not expected.only_when_closed:
                self._order.observed.append(number)
            self._take(chunk)
            self.begin()

    def _take(self, chunk: Chunk) -> None:
        """Take the gradients of a chunk."""
        current, order, gradients = self._pass, self._order.numbers, self.gradients[chunk.number]
        if not self._deferring and current.begun < len(order) and chunk.number == order[current.begun]:
            self._reductions.make_room()  # so that its buffer can be lent to this chunk
        self.usage.add(chunk.number, gradients.take(self.buffers.gradients))
        current.taken.add(chunk.number)

    def _begin(self, chunk: Chunk) -> None:
        """Begin to reduce the next chunk."""
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
        for chunk in self._chunks[:1]:
            chunk.meter.note("release")
        if self.buffers.end_pass():
            for gradients in self.gradients:
                gradients.forget_buffer()
        for number in range(len(self._chunks)) if reduced else ():  # in the memory that buffers have freed
            self.usage.bind(number)
        self._forget_pass()
        for call in self.hooks.at_end:
            call(reduced=reduced)

    def _finish(self, *, requests_order: bool) -> None:
        """Wait for all reductions, and have the ranks exchange flags that later steps need.

        The flags are read in the next pass, when they have long arrived; before, in a step, only by ranks that had no
        gradient of some member.

        Args:
            requests_order: Whether this rank requests that an order be learned.
        """
        had_all = self.usage.has_all
        mine, groups = [had_all, requests_order], self._sharers.agreeing
        if self.hooks.compare is not None:
            mine = self.hooks.compare(mine)  # first: if the ranks differ, they raise, some of them amid reductions
            groups = self._sharers.beside_gathering
        flags = Flags(mine, groups, self.usage.device)
        self.usage.share()  # what the pass before has left to exchange, behind which this pass is kept
        self._reductions.finish()
        flags.pass_on()
        before = self.usage.end_pass(flags, had_all=had_all)
        if before is None:
            return
        if before.read()[1]:  # the same on all ranks
            learn_orders(self._orders, self._sharers.agreeing, self.usage.device)
        for order in self._orders:
            order.is_agreed = True

    def _forget_pass(self) -> None:
        self._pass = BackwardPass([set() for _ in self._chunks])
        self._order.observed.clear()
