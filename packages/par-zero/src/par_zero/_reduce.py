"""Reduces gradients chunk by chunk while backward goes on.

backward   a parameter's gradient arrives -> its chunk is complete -> reduce-scatter it        (group)
                                                                   -> all-reduce the share     (replicas, if hybrid)
                                                                   -> all-gather it            (group, stage 0 alone)
           backward ends                  -> what is not all-reduced or all-gathered yet, and whether any rank had
                                             gradients of all parameters                       (both, two int32)
step       if none had                    -> which parameters had a gradient on any rank       (both)
           the optimizer updates its flat slices in one fused call each
           -> all-gather the parameters                                                        (group, stages 1 and 2)
           at stage 3 a unit's parameters are gathered before it runs, forward and backward    (group)

All ranks begin reductions in one order, on one communicator: that in which the first rank's chunks were complete in an
earlier pass. So a chunk that is frozen or registered elsewhere holds no other back. A chunk that this rank alone does
not use is due before others that are complete: autograd knows that no gradient of it will come, so it is reduced
without one. Nothing waits for another rank while backward goes on: that rank may need this one first, where backward
itself exchanges, over a communicator of its own.

At stage 3 a chunk is closed when backward has left its unit behind, and what of it has no gradient by then is unused.
So reductions fall at one place between the gatherings of all ranks, whatever each of them uses. Where not all ranks
share all chunks, and so exchange in backward, chunks are closed at every stage, and no reduction begins before: so they
fall between these exchanges too.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn

from ._collectives import Flags, Handle, all_gather, all_reduce, reduce_scatter, scaled_sum
from ._torch_private import (
    call_at_end_of_backward,
    current_pass,
    is_in_backward,
    will_get_gradient,
    without_torch_functions,
)
from .layout.buffers import Buffers
from .layout.chunk import Chunk
from .layout.meter import Meter
from .layout.sharers import Sharers
from .layout.stand_ins import Dropped, StandIns


class LearnedOrder:
    """An order of chunks that all ranks follow: the first rank's, learned in the first pass, and when it has changed.

    Args:
        numbers: The chunks in the order that holds until one was learned.

    Attributes:
        numbers: The chunks in the order that holds.
        is_agreed: Whether it was learned, or no rank has asked for another in the first pass.
    """

    def __init__(self, numbers: Iterable[int]) -> None:
        self.numbers = list(numbers)
        self._seen: list[int] | None = None  # the order of the pass before
        self._asked: list[int] | None = None  # the last one that this rank wanted to be learned
        self.is_agreed = False

    def asks(self, came: Sequence[int]) -> bool:
        """Whether this rank wants the order to be learned anew: in the first pass, or when two that follow are alike.

        Args:
            came: The chunks in the order in which they came in this pass. Those that did not come are last.
        """
        if came == self.numbers:
            self._seen = self.numbers
            return False
        known = dict.fromkeys(came)
        before, self._seen = self._seen, [*known, *(number for number in self.numbers if number not in known)]
        if self._seen in (self.numbers, self._asked) or before not in (None, self._seen):
            return False
        self._asked = self._seen
        return True

    @property
    def latest(self) -> list[int]:
        """The order of the latest pass."""
        return self._seen or self.numbers


class Reducer:
    """Reduces the gradients of chunks during backward.

    Args:
        chunks: The trained chunks, in the order in which their gradients are expected before any have come.
        sharers: The ranks that take part.
        inflight: Number of chunks whose reductions may be under way in backward; None: two where a device waits in the
            order of its work, else any number; and any number where not all ranks share all chunks, as then backward
            itself exchanges with other ranks.
        meter: Counts the bytes of the buffers that it lends.
        closing: Whether somebody closes chunks, see `close`. Then, where not all ranks share all chunks, none is
            reduced before it is closed: where backward itself exchanges, all ranks must begin both in one order.

    Attributes:
        begun: How many chunks' reductions have begun in this pass.
        arriving: Numbers of the chunks whose parameters are on their way after a step, and were not read yet.
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
        self._deferring = 0  # how many `no_sync` are entered
        self._running = False  # whether a backward pass has begun and not ended
        self._any = False  # whether a gradient has arrived in this pass; it may be a pass for inputs alone
        self._ending = False  # whether all that this pass brings is there
        self._arrived: list[set[int]] = [set() for _ in chunks]  # the members that have their gradient in this pass
        self._awaited = [len(chunk.members) for chunk in chunks]  # how many members have one when a chunk is complete
        self._frozen: set[int] = set()  # the chunks with fewer than all
        self._taken: set[int] = set()  # the chunks whose gradients lie in their buffers
        self._completed: set[int] = set()  # the chunks that had all gradients in this pass
        self._waits = closing and len(sharers.each) > 1  # whether chunks are reduced when they are closed
        self._left: list[int] = []  # the chunks of which this pass will bring no more gradients
        self._closed: set[int] = set()  # those of them whose gradients were taken for that
        self._closed_before_end = set(range(len(chunks))) if closing else set()  # those that somebody closes in time
        self._given_up: set[int] = set()  # the chunks that were reduced before others because no gradient will come
        self._pass = -1  # the number of the backward pass under way, by autograd
        self._nests = False  # whether gradients have ever come from a pass within the pass under way
        self._empty: list[Handle] = []  # reductions with nothing in them, which this rank has begun for others
        self._departed_at: int | None = None  # how many reductions had begun before these
        self._reduces: bool | None = None  # whether this pass brings gradients of parameters, if that is known
        self._came: list[int] = []  # the chunks that could be reduced in this pass, in that order
        self._order = LearnedOrder(range(len(chunks)))  # in which reductions begin
        self._learned = [(self._order, self._came)]  # orders, and what has come of each in this pass
        self.begun = 0
        self.arriving: set[int] = set()
        single = all(chunk.groups.replicas is None and chunk.stage.shards_state for chunk in chunks)
        on_cpu = all(chunk.own.is_cpu for chunk in chunks)
        # The CPU that serves a device is so far ahead of it that it never finds a collective complete. So there the
        # device waits, or else all gradients would be in memory, and what follows a reduce-scatter would begin last.
        lends = any(chunk.stage.shards_gradients for chunk in chunks)
        if inflight is None and not on_cpu and (lends or not single) and len(sharers.each) == 1:
            inflight = 2
        self._reductions = Reductions(inflight)
        self._kept = inflight or 2  # buffers between two passes
        self._gradients, self._received = Buffers(meter), Buffers(meter)
        self._used = [torch.zeros(len(chunk.members), dtype=torch.int32) for chunk in chunks]  # since they were dropped
        self._stand_ins = StandIns()
        self._had = [[0] * len(chunk.members) for chunk in chunks]  # the same on this rank
        self._unshared: set[int] = set()  # the chunks of which the ranks have not told each other that yet
        self._had_all = False  # whether this rank had gradients of all members in the latest pass that reduced
        self._told: Flags | None = None  # whether any rank had, and whether any asks for an order
        self._compare: Callable[[Sequence[bool]], list[bool]] | None = None
        self._before_last: Callable[[], None] = lambda: None
        self._at_start: list[Callable[[], None]] = []
        self._at_end: list[Callable[..., None]] = []
        for number, chunk in enumerate(chunks):
            chunk.number = number
            for index, member in enumerate(chunk.members):
                _on_gradient(member.parameter, _weakly(self, number, index))

    @property
    def buffers(self) -> tuple[torch.Tensor, ...]:
        """The buffers that no chunk has borrowed."""
        return (*self._gradients.free, *self._received.free)

    @property
    def pools(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Bytes of the buffers that no chunk has borrowed: those for gradients, and those for what is received."""
        lent, received = (
            tuple(buffer.untyped_storage().nbytes() for buffer in pool.free)
            for pool in (self._gradients, self._received)
        )
        return lent, received

    @property
    def kept_buffers(self) -> int:
        """How many buffers of each kind are kept between two passes."""
        return self._kept

    def at_start(self, call: Callable[[], None]) -> None:
        """Has a function called when a backward pass begins that will reduce gradients."""
        self._at_start.append(call)

    def at_end(self, call: Callable[..., None]) -> None:
        """Has a function called after each backward pass, with `reduced`: whether gradients were reduced."""
        self._at_end.append(call)

    def compare_by(self, compare: Callable[[Sequence[bool]], list[bool]]) -> None:
        """Has a function tell at the end of backward which flags any rank of the shards has set. It may raise."""
        self._compare = compare

    def lead(self, call: Callable[[], None]) -> None:
        """Has a function called when backward has ended, before the last reductions begin."""
        self._before_last = call

    def expect_last(self, chunks: Iterable[Chunk]) -> None:
        """Some chunks are closed at the end of backward alone. Where all are held back until then, others go first."""
        last = {chunk.number for chunk in chunks}
        self._closed_before_end -= last
        if self._waits:
            self._order.numbers.sort(key=last.__contains__)

    def learn(self, order: LearnedOrder, came: list[int]) -> None:
        """Has another order of the chunks learned, beside that of reductions.

        Args:
            order: The order.
            came: The chunks as they come in a pass, by number. The caller appends to it, and clears it.
        """
        self._learned.append((order, came))

    def learn_first(self, order: LearnedOrder, came: list[int]) -> None:
        """Has another order learned in place of that of reductions, which follows from it: see `arrange`.

        Args:
            order: The order, of something else than chunks.
            came: What is in it, as it comes in a pass. The caller appends to it, and clears it.
        """
        self._learned[0] = order, came

    def arrange(self, numbers: list[int]) -> None:
        """Has reductions begin in a certain order, from the next pass on. It must be alike on all ranks.

        Args:
            numbers: All chunks by number.
        """
        self._order.numbers = numbers

    def begin_all(self, count: int) -> None:
        """Begins reductions until there are as many, and waits for them, though the pass has failed.

        Other ranks have begun as many, which else would never end.
        """
        self._stand_ins.take(None)  # where this rank has not come to its backward pass
        for number in self._order.numbers[self.begun : count]:
            self._chunks[number].take_gradients(self._gradients)
            self._begin(self._chunks[number])
        self._abandon()

    def begin_empty(self, stops: Container[int] = ()) -> None:
        """Begins reductions with nothing in them, as this rank has left the order that other ranks still follow.

        A rank that bounds its reductions waits in backward for those of the others. So a rank that departs, and will
        meet the others behind all of them, has to begin its own.

        Args:
            stops: Where it stops: the chunks that no other rank can have begun yet, by number.
        """
        if self._departed_at is None:
            self._departed_at = self.begun
        order = self._order.numbers
        while self.begun < len(order) and order[self.begun] not in stops:
            chunk = self._chunks[order[self.begun]]
            flat, share = chunk.without_gradients()
            groups = chunk.groups
            handle = reduce_scatter(flat, share, groups.shards, scale=groups.scale, buffers=Buffers())
            self.begun += 1
            self._drop_empty(over=True)
            self._empty.append(handle)

    @property
    def is_bounded(self) -> bool:
        """Whether backward may have to wait for a reduction before the next one begins."""
        return self._reductions.is_bounded

    @property
    def begun_with_gradients(self) -> int:
        """How many reductions had begun in this pass when this rank has departed; 0 if it begins none for others."""
        return self._departed_at or 0

    def rejoin(self) -> None:
        """All ranks have departed at the same place: what they have begun with nothing in it is begun again."""
        self._drop_empty()
        if self._departed_at is not None:
            self.begun, self._departed_at = self._departed_at, None

    def _drop_empty(self, *, over: bool = False) -> None:
        """Waits for reductions with nothing in them, or drops those alone that are over."""
        left = []
        for handle in self._empty:
            if over and not handle.is_completed():
                left.append(handle)
            else:
                handle.wait()
        self._empty = left

    def _abandon(self) -> None:
        """Waits for all reductions on their way, and forgets them."""
        self._reductions.abandon()
        self._drop_empty()

    def has_all_gradients(self, chunk: Chunk) -> bool:
        """Whether the pass under way has brought all gradients of a chunk; one that is not trained waits for none."""
        return chunk.number < 0 or len(self._arrived[chunk.number]) >= self._awaited[chunk.number]

    def awaits(self, chunk: Chunk) -> bool:
        """Whether the pass under way brings a gradient of a chunk that has not come yet."""
        arrived = self._arrived[chunk.number]
        missing = (member for index, member in enumerate(chunk.members) if index not in arrived)
        return not self.has_all_gradients(chunk) and any(will_get_gradient(member.parameter) for member in missing)

    def close(self, chunks: Iterable[Chunk]) -> None:
        """The pass under way will bring no more gradients of some chunks: what has none of its own yet is unused.

        So a rank that has no use of a parameter begins its reduction where the others do.
        """
        if not self._running:  # under no_sync other ranks still come to units of a pass that is over, not of the next
            return
        self._left += [chunk.number for chunk in chunks if chunk.number >= 0]
        if self._deferring or not self._left or not self._brings_gradients():
            return
        for number in self._left:
            self._closed.add(number)
            if number not in self._taken:
                self._take(self._chunks[number])
            if number not in self._came:
                self._came.append(number)
        self._left.clear()

    def begin(self, before: Iterable[Chunk] = ()) -> None:
        """Begins to reduce all chunks whose turn has come.

        Args:
            before: Where it stops, though more may be reduced.
        """
        order, stops = self._order.numbers, {chunk.number for chunk in before}
        while not self._deferring and self.begun < len(order) and order[self.begun] not in stops:
            number = order[self.begun]
            if number not in self._taken and (self._ending or self._gives_up(number)):
                self._take(self._chunks[number])
            if number not in self._taken or (self._waits and not self._ending and number not in self._closed):
                break
            self._begin(self._chunks[number])

    def _gives_up(self, number: int) -> bool:
        """Whether a chunk that is due holds back others, though no gradient of it will come.

        Another rank that uses it may wait for its reduction before this rank can come to the end of backward. Autograd
        does not announce the gradients of passes within the pass, so with these a chunk is waited for to the end. A
        chunk that is closed before the end has its place between the gatherings of all ranks, and is not given up.
        """
        holds_back = len(self._taken) > self.begun and number not in self._closed_before_end
        if not holds_back or self._nests or self._waits or not self._order.is_agreed or not is_in_backward():
            return False
        arrived = self._arrived[number]
        missing = (
            member.parameter for index, member in enumerate(self._chunks[number].members) if index not in arrived
        )
        if any(will_get_gradient(parameter, if_unknown=True) for parameter in missing):
            return False
        self._given_up.add(number)
        return True

    def _brings_gradients(self) -> bool:
        """Whether the pass under way brings gradients of parameters, and not of inputs alone."""
        if self._reduces is None:
            members = (member for chunk in self._chunks for member in chunk.members)
            self._reduces = any(will_get_gradient(member.parameter) for member in members)
        return self._reduces or self._any

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside add up gradients on each rank, and reduce nothing. It may overlap with itself."""
        self._deferring += 1
        try:
            yield
        finally:
            self._deferring -= 1

    def unused(self, chunks: Sequence[Chunk]) -> list[list[int]]:
        """For each of some chunks, the members that had no gradient on any rank since gradients were dropped.

        An all-reduce of a number for each member, if none of the ranks had gradients of all.
        """
        self._share_used()
        return [(self._used[chunk.number] == 0).nonzero().flatten().tolist() for chunk in chunks]

    def look_before_step(self, chunks: Sequence[Chunk]) -> None:
        """Looks whether the gradients of some chunks are those to step by: the program may have dropped some.

        Raises:
            RuntimeError: A parameter was given a gradient by hand, or gradients wait for their sum over the ranks.
        """
        for chunk in chunks:
            dropped = self._stand_ins.dropped_before_step(chunk)
            if dropped is not None:
                self._drop(dropped)
            if chunk.waits_for_sum:
                raise RuntimeError(
                    f"gradients of {chunk.members[0].names[0]!r} and others wait for their sum over the ranks, as the "
                    "latest backward pass was within no_sync(); leave no_sync() before the last backward of a step"
                )

    def _drop(self, dropped: Dropped) -> None:
        """Drops gradients that the optimizer holds, as the program has in the module."""
        chunk = dropped.chunk
        if dropped.others:
            self._share_used()  # first, since it tells of the pass before
            chunk.drop_members(dropped.members)
            self._used[chunk.number][dropped.members] = 0
            for index in dropped.members:
                self._had[chunk.number][index] = 0
        else:
            chunk.drop_reduced()
            self._forget_used(chunk)
            self._unshared.discard(chunk.number)

    def _forget_dropped(self) -> None:
        """Forgets which members had gradients where the program has dropped those in the optimizer's tensors."""
        gone: dict[int, bool] = {}  # by optimizer
        for chunk in self._chunks:
            if chunk.is_stepped_here:
                gone[chunk.owner] = gone.get(chunk.owner, True) and chunk.has_no_gradient
        for chunk in self._chunks:
            # A rank may hold no part of a small chunk, and still be the only one whose data has used its members.
            if chunk.has_no_gradient and (chunk.is_stepped_here or gone.get(chunk.owner, False)):
                self._forget_used(chunk)

    def _forget_used(self, chunk: Chunk) -> None:
        """No member of a chunk has a gradient."""
        self._used[chunk.number].zero_()
        self._had[chunk.number] = [0] * len(chunk.members)

    def forget(self, chunks: Sequence[Chunk]) -> None:
        """Drops the gradients of some chunks that are not reduced, and which of their members had any."""
        with without_torch_functions():  # quicker, where parameters are on their way
            for chunk in chunks:
                chunk.forget_gradients()
        for chunk in chunks:
            self._stand_ins.forget(chunk)
            self._forget_used(chunk)
            self._unshared.discard(chunk.number)

    def reset(self) -> None:
        """Forgets a pass that has failed, and its gradients."""
        self._abandon()
        self.forget(self._chunks)
        self._forget_pass()

    @property
    def failed(self) -> bool:
        """Whether a pass has begun that did not end, and is not under way."""
        return self._running and not is_in_backward()

    def start(self, *_: torch.Tensor, arrived: torch.Tensor | None = None) -> None:
        """A backward pass begins. Passes within it, of activation checkpointing, belong to it.

        Args:
            arrived: The parameter whose gradient has told of it.
        """
        if not self._running:
            self._running, self._pass = True, current_pass()
            for number in self._frozen:  # or not any more
                self._awaited[number] = _trainable(self._chunks[number])
            call_at_end_of_backward(self._end)
            for call in () if self._deferring else self._at_start:
                call()
            for dropped in self._stand_ins.take(arrived):
                self._drop(dropped)
            self._forget_dropped()

    def note_gradient(self, number: int, index: int) -> None:
        """Autograd has left a gradient in a member of a chunk."""
        chunk, arrived = self._chunks[number], self._arrived[number]
        member = chunk.members[index]
        gradient = member.parameter.grad
        if gradient is not None and gradient.layout != torch.strided:
            raise RuntimeError(
                f"the gradient of {member.names[0]!r} is sparse, and chunks are dense; set sparse=False where it is "
                "looked up"
            )
        if gradient is not None and gradient.requires_grad:
            raise RuntimeError(
                f"the gradient of {member.names[0]!r} has a graph itself, which would end at the sum over the ranks; "
                "leave out create_graph=True, or ask torch.autograd.grad for gradients of inputs alone"
            )
        if number in self.arriving:
            raise RuntimeError(
                f"{member.names[0]!r} was read after a step while it was on its way from the other ranks, by something "
                "that reads memory past torch's functions, such as a captured graph or an extension; enter "
                "par_zero.summon(module) before that, which waits"
            )
        if not self._running:
            self.start(arrived=member.parameter)
        self._any = True
        self._nests = self._nests or current_pass() != self._pass
        if number in self._given_up:
            raise RuntimeError(
                f"{member.names[0]!r} got a gradient after its sum over the ranks had begun without it: it came from a "
                "backward within backward, as of a reentrant checkpoint, which no pass before had; pass "
                "use_reentrant=False, or use such checkpoints from the first step on"
            )
        if number in self._closed:
            raise RuntimeError(
                f"{member.names[0]!r} got a gradient when backward had gone on to what was called before its module, "
                "and its sum over the ranks had begun without it: it was read outside of a call of its module; call "
                "that, or give units= that make one of both modules"
            )
        if index in arrived and not self._deferring and number in self._order.numbers[: self.begun]:
            raise RuntimeError(
                f"{member.names[0]!r} got another gradient after its sum over the ranks had begun: it is "
                "used in two reentrant checkpoints; pass use_reentrant=False"
            )
        arrived.add(index)
        if len(arrived) >= self._awaited[number]:  # again where activation checkpointing runs a pass within the pass
            self._completed.add(number)
            if not self._waits:
                self._came.append(number)
            self._take(chunk)
            self.begin()

    def _take(self, chunk: Chunk) -> None:
        """Takes the gradients of a chunk."""
        order = self._order.numbers
        if not self._deferring and self.begun < len(order) and chunk.number == order[self.begun]:
            self._reductions.make_room()  # so that its buffer can be lent to this chunk
        used = chunk.take_gradients(self._gradients)
        self._used[chunk.number] |= torch.tensor(used, dtype=torch.int32)
        self._had[chunk.number] = [old | new for old, new in zip(self._had[chunk.number], used, strict=True)]
        self._taken.add(chunk.number)

    def _begin(self, chunk: Chunk) -> None:
        """Begins to reduce the next chunk."""
        self.begun += 1
        one = chunk.stage.shards_state or self._reduces_at_once(chunk)
        self._reductions.begin(self._reduction(chunk), single=one and chunk.groups.replicas is None)

    def _reduces_at_once(self, chunk: Chunk) -> bool:
        """Whether one all-reduce is enough, whose sum has the same bits as one in the order of the ranks."""
        return not chunk.stage.shards_state and chunk.groups.is_pair and not chunk.has_earlier

    def _reduction(self, chunk: Chunk) -> Iterator[Handle]:
        """The collectives of one chunk, each begun when the one before has arrived."""
        groups, gradient = chunk.groups, chunk.gradient
        if gradient is None:
            raise RuntimeError(f"chunk {chunk.number} is reduced before its gradients were taken; a bug of par-zero")
        share = chunk.place_of_sum(gradient)
        if self._reduces_at_once(chunk):
            chunk.meter.note("reduce", chunk.name)
            yield scaled_sum(gradient, groups.shards, scale=groups.scale)
            chunk.take_sum(share, self._gradients)
            chunk.meter.note("sum", chunk.name)
            return
        chunk.meter.note("scatter", chunk.name)
        yield reduce_scatter(gradient, share, groups.shards, scale=groups.scale, buffers=self._received)
        chunk.take_sum(share, self._gradients)  # the next chunk may have its buffer
        chunk.meter.note("sum", chunk.name)
        if groups.replicas is not None:
            yield scaled_sum(share, groups.replicas, scale=groups.scale_of_replicas)
        chunk.add_earlier_(share)
        chunk.send_away()
        if not chunk.stage.shards_state:
            yield all_gather(gradient, share, groups.shards)

    def _end(self) -> None:
        """A backward pass ends."""
        reduced = self._any and not self._deferring
        asks = self._asks_for_order() if reduced else False
        if reduced:
            self._ending = True
            self._before_last()
            self.begin()
            self._finish(asks=asks)
        else:
            for number in self._order.numbers:
                if self._arrived[number] and number not in self._taken:
                    self._take(self._chunks[number])
        for chunk in self._chunks[:1]:
            chunk.meter.note("release")
        self._received.keep(self._kept)
        if self._gradients.keep(self._kept):
            for chunk in self._chunks:
                chunk.forget_buffer()
        for chunk in self._chunks if reduced else ():  # in what memory buffers have left
            chunk.bind_gradients()
            self._stand_ins.show(chunk, self._had[chunk.number])
        self._forget_pass()
        for call in self._at_end:
            call(reduced=reduced)

    def _finish(self, *, asks: bool) -> None:
        """Waits for all reductions, and has the ranks tell each other what later steps want to know.

        What they have told is looked at in the next pass, when it is long there; before, in a step, only by ranks that
        had no gradient of some member.

        Args:
            asks: Whether this rank wants an order to be learned.
        """
        had_all = all(bool(used.all()) for used in self._used)
        mine, groups = [had_all, asks], self._sharers.agreeing
        if self._compare is not None:
            mine = self._compare(mine)  # first: if the ranks differ, they raise, some of them amid reductions
            groups = self._sharers.beside_gathering
        flags = Flags(mine, groups, self._device_of_flags)
        self._share_used()
        self._reductions.finish()
        flags.pass_on()
        before, self._told = self._told, flags
        self._had_all, self._unshared = had_all, set(range(len(self._chunks)))
        if before is not None:
            if before.read()[1]:
                self._learn_orders()
            for order, _ in self._learned:
                order.is_agreed = True

    def _asks_for_order(self) -> bool:
        """Whether this rank wants an order to be learned anew."""
        if len(self._completed) < len(self._chunks):
            for number, chunk in enumerate(self._chunks):
                if number not in self._completed:
                    self._awaited[number] = count = _trainable(chunk)
                    (self._frozen.discard if count == len(chunk.members) else self._frozen.add)(number)
        asked = [order.asks(came) for order, came in self._learned if came]
        return any(asked)

    def _learn_orders(self) -> None:
        """Takes the first rank's orders for those of all ranks. An all-reduce of a number for each place in them.

        It is of maxima, in which the lowest rank wins everywhere: groups that overlap come to the same, as they would
        not by broadcasts, of which each has a first rank of its own.
        """
        lengths = [len(order.numbers) for order, _ in self._learned]
        latest = torch.tensor([number for order, _ in self._learned for number in order.latest], dtype=torch.int64)
        ahead = dist.get_world_size() - 1 - dist.get_rank()
        orders = (latest + ahead * max(lengths)).to(self._device_of_flags)
        for group in self._sharers.agreeing:
            all_reduce(orders, group, dist.ReduceOp.MAX).wait()
        for (order, _), numbers in zip(self._learned, (orders % max(lengths)).split(lengths), strict=True):
            order.numbers = numbers.tolist()

    def _share_used(self) -> None:
        """Makes `used` say which members had a gradient on any rank, in the latest pass that reduced or before."""
        if not self._unshared or self._told is None:
            return
        if self._had_all or self._told.read()[0]:  # all ranks come to the same
            for number in self._unshared:
                self._used[number].fill_(1)
        else:
            used = torch.cat(self._used).to(self._device_of_flags)
            for group in self._sharers.agreeing:
                all_reduce(used, group, dist.ReduceOp.MAX).wait()
            self._used = list(used.cpu().split([len(chunk.members) for chunk in self._chunks]))
        self._unshared.clear()

    @property
    def _device_of_flags(self) -> torch.device:
        return self._sharers.device_of_flags(self._chunks[0].own.device)

    def _forget_pass(self) -> None:
        self._running, self._any, self._ending, self.begun = False, False, False, 0
        self._reduces = None
        self._departed_at = None
        for seen in (self._taken, self._completed, self._closed, self._given_up, self._came, self._left):
            seen.clear()
        for arrived in self._arrived:
            arrived.clear()


@dataclass
class _Reduction:
    """The reduction of a chunk under way.

    Args:
        steps: Its collectives that are still to come, each begun by asking for it.
        handle: The collective under way.
        single: Whether no other collective follows.
        at_first: Whether the collective under way is the first one.
    """

    steps: Iterator[Handle]
    handle: Handle
    single: bool
    at_first: bool = True


class Reductions:
    """Reductions under way, in the order in which they began.

    What follows the first collective of a reduction begins in `finish` alone: begun as soon as the first one has
    arrived, it would fall between other collectives on one rank and behind them on another.

    Args:
        limit: How many may be at their first collective, which needs a whole chunk's memory: one more waits for the
            oldest, which then goes on. So it is on a device that waits by itself, in the order of its work. None: any
            number, and what has arrived is taken in.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._under_way: list[_Reduction] = []

    @property
    def is_bounded(self) -> bool:
        """Whether one more may have to wait for the oldest."""
        return self._limit is not None

    def begin(self, steps: Iterator[Handle], *, single: bool) -> None:
        """Begins a reduction.

        Args:
            steps: Its collectives, each begun by asking for it, when the one before has arrived.
            single: Whether there is one alone.
        """
        self.make_room()
        self._under_way.append(_Reduction(steps, next(steps), single))

    def make_room(self) -> None:
        """Takes in what has arrived; or, at the limit, brings the oldest at its first collective on, and all before."""
        if self._limit is None:
            self._wait_for([each for each in self._under_way if each.single and each.handle.is_completed()])
            return
        first = [number for number, reduction in enumerate(self._under_way) if reduction.at_first]
        if len(first) == self._limit:
            self._wait_for(self._under_way[: first[0] + 1])

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


def _trainable(chunk: Chunk) -> int:
    """How many members want gradients."""
    return sum(member.parameter.requires_grad for member in chunk.members)


def _weakly(reducer: Reducer, number: int, index: int) -> Callable[[torch.Tensor], None]:
    """A hook that keeps nothing alive: the garbage collector does not see through the hooks of a tensor."""
    weak = ref(reducer)

    def hook(_: torch.Tensor) -> None:
        alive = weak()
        if alive is not None:
            alive.note_gradient(number, index)

    return hook


def _on_gradient(parameter: nn.Parameter, call: Callable[[torch.Tensor], None]) -> None:
    """Calls back for each gradient, also of a parameter that is frozen now and trained later."""
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)  # torch takes hooks for no others, but keeps them through a change
    parameter.register_post_accumulate_grad_hook(call)
    if frozen:
        parameter.requires_grad_(False)
