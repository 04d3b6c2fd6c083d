"""The reduction of gradients, chunk by chunk, while backward continues.

In backward, the gradient of a parameter arrives. When all gradients of its chunk have arrived, the rank begins:

- a reduce-scatter of the chunk over the group;
- with hybrid sharding, an all-reduce of the shard over the replicas;
- at stage 0, an all-gather of the chunk over the group.

When backward ends, the rank finishes the remaining collectives. The ranks also all-reduce four int32 numbers. One of
them is whether any rank had gradients of all parameters, and two compare the steps that the ranks have taken. If no
rank had all gradients, the ranks all-reduce in the step which parameters had a gradient on any rank. The optimizer then
updates each of its flat slices in one fused call. Stages 1 and 2 all-gather the updated parameters. Stage 3 gathers a
unit's parameters before its forward and backward.

All ranks begin reductions in one order, on one communicator. No rank waits for another rank during backward, unless
`Overlap(inflight=...)` bounds the reductions: if backward itself communicates over another communicator, the other rank
may need this rank first.

- At stages 0 to 2 the order is the one in which the lowest rank's chunks were complete in an earlier pass. The next
  chunk is reduced when all of its gradients have arrived that will arrive. Autograd itself reports which ones will.
- At stage 3, and if backward itself communicates, a chunk must also be due: `reduce` is an entry of a program, which
  all ranks follow. They therefore begin reductions at the same positions between gathers and exchanges, whichever
  parameters each rank uses.
- A gradient may still arrive after the reduction of its chunk has begun, such as from a reentrant checkpoint, which
  autograd does not announce. At stage 3 the ranks then reduce the chunk once more when backward has ended.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from par_groups import agree

from .._collectives import Flags, largest_of, same_ranks
from .._torch_private import call_at_end_of_backward, current_pass
from ..layout.buffers import Buffers
from ..layout.chunk import Chunk
from ..layout.gradients import ChunkGradients
from ..layout.meter import BUFFERS, Meter
from ..layout.sharers import Sharers
from .backward import BackwardHooks, BackwardPass, ExpectedGradients, call_on_gradient
from .in_flight import ReductionBuffers, Reductions, empty_reduction, is_one_all_reduce, reduction
from .order import ReductionOrder
from .refusals import refuse_another, refuse_arriving, refuse_closed, refuse_given_up, refuse_gradient, refuse_steps
from .usage import GradientUsage

_LATE = 2
"""Number that a rank with late gradients adds to its flag of a requested order."""


class Reducer:
    """The object that reduces the gradients of chunks during backward.

    Args:
        chunks: Trained chunks, in the order in which their gradients are expected in the first pass.
        sharers: Ranks that shard the chunks.
        inflight: Maximum number of chunks whose reductions are in flight in backward. None (default): two on a GPU, and
            any number on a CPU, or if not all ranks shard all chunks, because backward itself then communicates.
        meter: Meter that counts the bytes of the lent buffers. Default: none.
        programmed: Whether a chunk is reduced only after a program has made it due, see `reduce`. Default: False.

    Attributes:
        hooks: Functions that are called when backward begins and ends.
        expected: Gradients that a pass is expected to bring.
        gradients: Gradients of the chunks, by number.
        buffers: Buffers that reductions use one after the other.
        usage: Parameters that have gradients for the optimizer.
        meter: Meter that records actions and counts bytes.
        order: Order in which reductions begin, and the chunks that are due.
        arriving: Numbers of the chunks whose parameters are in flight after a step, and were not read yet.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        sharers: Sharers,
        inflight: int | None = None,
        meter: Meter | None = None,
        *,
        programmed: bool = False,
    ) -> None:
        self._chunks, self._sharers, self.meter = chunks, sharers, meter or Meter()
        self.gradients = [ChunkGradients(chunk) for chunk in chunks]
        self.deferring = 0  # number of open `no_sync` contexts, which may be nested
        self._pass = BackwardPass([set() for _ in chunks])
        self.expected = ExpectedGradients(chunks)
        self._programmed = programmed
        # At stage 3 the order is the program's. Replicas of a shard may follow other programs, so they learn an order.
        self.order = ReductionOrder(len(chunks), follows_program=programmed and not sharers.beside_gathering)
        self.arriving: set[int] = set()
        self.hooks = BackwardHooks()
        self.usage = GradientUsage(self.gradients, sharers)
        single = all(chunk.groups.replicas is None and chunk.stage.shards_state for chunk in chunks)
        on_cpu = all(chunk.device.type == "cpu" for chunk in chunks)
        # The host launches work far ahead of a GPU, so it never finds a collective complete. The GPU waits instead.
        # Otherwise all gradients would be in memory, and the collectives after a reduce-scatter would begin last.
        lends = any(chunk.stage.shards_gradients for chunk in chunks)
        if inflight is None and not on_cpu and (lends or not single) and len(sharers.each) == 1:
            inflight = 2
        self._reductions = Reductions(inflight)
        self.buffers = ReductionBuffers(Buffers(self.meter), Buffers(self.meter), inflight or 2)
        # Reductions of zeros that this rank begins for other ranks when it departs from the program. None waits for
        # room: another rank may need the next one before it begins an earlier one.
        self._empty = Reductions(None)
        self._resets: list[dist.ProcessGroup] | None = None
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

    @property
    def begun(self) -> int:
        """Number of reductions with this rank's gradients that have begun in this pass."""
        return len(self._pass.begun)

    @property
    def has_departed(self) -> bool:
        """Whether this rank begins reductions of zeros for other ranks in this pass."""
        return self._pass.empty is not None

    @property
    def inflight(self) -> int | None:
        """Largest number of chunks whose reductions are in flight in backward; None: any number."""
        return self._reductions.limit

    @property
    def is_bounded(self) -> bool:
        """Whether backward may have to wait for a reduction before the next one begins."""
        return self._reductions.limit is not None

    @property
    def failed(self) -> bool:
        """Whether a pass has begun and failed: it has not ended, and no backward is in progress."""
        return self._pass.is_running and current_pass() == -1

    def begin_all(self, groups: Iterable[dist.ProcessGroup]) -> None:
        """Begin the reductions that other ranks have begun, and wait for all of them, because the pass has failed.

        Args:
            groups: Process groups over which the ranks exchange how many reductions each of them has begun. No other
                collective may be in flight on them.
        """
        current = self._pass
        (begun,) = largest_of([len(current.begun) + (current.empty or 0)], groups, self.usage.device)
        self._begin_first(begun)
        self._reductions.abandon()
        self._empty.finish()
        # A later call, such as in `reset`, must not begin them again.
        current.begun.update(self.order.numbers[:begun])
        current.empty = None

    def begin_failed(self, until: int | None) -> None:
        """Begin reductions in a pass that has failed on this rank, because other ranks may wait for them.

        Args:
            until: Number of the last chunk to begin, in the order of the pass. None: all chunks.
        """
        # Without a bound, no rank waits for a reduction in backward.
        if self.is_bounded:
            order = self.order.numbers
            self._begin_first(len(order) if until is None else order.index(until) + 1)

    def _begin_first(self, count: int) -> None:
        """Begin reductions with the gradients that have arrived, until that many of the pass have begun."""
        # If this rank has not begun its backward, the stand-ins are still in place of gradients.
        self.usage.stand_ins.take(None)
        for number in self.order.numbers[self.begun + (self._pass.empty or 0) : count]:
            self.gradients[number].take(self.buffers.gradients)
            self._begin(self._chunks[number])

    def begin_empty(self, until: int | None) -> None:
        """Begin reductions of zeros, because this rank has departed from the program that other ranks still follow.

        Another rank that bounds its reductions waits in backward for the reductions of this rank. This rank reaches the
        comparison with the other ranks only after all reductions, so it must begin its part of them first.

        Args:
            until: Number of the last chunk to begin, in the order of the pass. None: all chunks.
        """
        current, order = self._pass, self.order.numbers
        current.empty = current.empty or 0
        count = len(order) if until is None else order.index(until) + 1
        while len(current.begun) + current.empty < count:
            gradients = self.gradients[order[len(current.begun) + current.empty]]
            self._empty.begin(empty_reduction(gradients), single=True)
            current.empty += 1

    def rejoin(self) -> None:
        """Drop the reductions of zeros, because all ranks have departed. Their gradients are reduced later."""
        self._empty.finish()
        self._pass.empty = None
        self.hold()

    def hold(self) -> None:
        """Reduce no further chunk until it is due again, because this rank leaves the program."""
        self.order.hold(self._pass.begun)

    def has_all_gradients(self, chunk: Chunk) -> bool:
        """Return whether all gradients of a chunk have arrived in this pass. An untrained chunk expects no gradients.

        Args:
            chunk: Chunk.
        """
        return chunk.number < 0 or len(self._pass.arrived[chunk.number]) >= self.expected.counts[chunk.number]

    def reduce(self, *numbers: int) -> None:
        """Reduce chunks: each begins when all before it have begun, and all gradients have arrived that will arrive.

        Args:
            numbers: Numbers of the chunks. For chunks that are due already, nothing changes.
        """
        self.order.due |= dict.fromkeys(numbers)
        self.begin()

    def count_ready(self) -> int:
        """Return how many chunks, from the first in the order of the pass, have all gradients that will arrive."""
        current, expected = self._pass, self.expected
        if self.deferring or not current.is_running or not expected.brings_any(current):
            return 0
        waiting = (expected.awaits(current, number, asks=True, if_unknown=True) for number in self.order.numbers)
        found = (place for place, waits in enumerate(waiting) if waits)
        return next(found, len(self.order.numbers))

    def reduce_rest(self) -> None:
        """Reduce all chunks, because backward has ended."""
        if not self.deferring and self._pass.is_ending:
            self.reduce(*self.order.numbers)

    def begin(self) -> None:
        """Begin the reductions of all chunks that are next in the order and ready."""
        current, order, limit = self._pass, self.order.numbers, self._reductions.limit
        if self.deferring or not current.is_running:
            return
        due = self.order.count_due() if self._programmed else len(order)
        if len(current.begun) >= due or not (current.has_gradients or self.expected.brings_any(current)):
            return
        # A rank that begins a chunk at the limit waits for an earlier chunk. Ranks that wait for a gradient of that
        # earlier chunk would never begin it, because they may need the waiting rank first. It begins without them here.
        forced = due - limit if self._programmed and limit is not None else 0
        while len(current.begun) < due:
            number = order[len(current.begun)]
            if number not in current.completed and not current.is_ending and len(current.begun) >= forced:
                # Without a program, a chunk that holds back no complete chunk can wait. In the first pass the order is
                # a guess, and gradients may still turn out to arrive from nested passes.
                asks = self._programmed or (
                    len(current.taken) > len(current.begun) and self.order.learned.is_agreed and current_pass() != -1
                )
                if self.expected.awaits(current, number, asks=asks, if_unknown=not self._programmed):
                    break
            if number not in current.taken:
                self._take(self._chunks[number])
            self._begin(self._chunks[number])

    def reset(self) -> None:
        """Forget a pass that has failed, and its gradients. Collective over all ranks that shard chunks."""
        self.begin_failed(None)
        self._sharers.calls.await_reset()
        # No other communicator is certain to be free: some ranks may have begun collectives that others have not.
        if self._resets is None:
            self._resets = [same_ranks(group, "resets") for group in self._sharers.agreeing]
        self.begin_all(self._resets)
        self.usage.forget(self._chunks)
        self._forget_pass()
        self.order.follow(())

    def start(self, *_: torch.Tensor, arrived: torch.Tensor | None = None) -> None:
        """Begin a backward pass, unless a pass is in progress. Passes within it, of checkpointing, belong to it.

        Args:
            arrived: Parameter whose gradient has reported the pass. None (default): another event has reported it.
        """
        if not self._pass.is_running:
            self._pass.is_running, self._pass.number = True, current_pass()
            self.expected.begin_pass()
            call_at_end_of_backward(self._end)
            for call in () if self.deferring else self.hooks.at_start:
                call()
            self.usage.begin_pass(arrived)

    def note_gradient(self, number: int, index: int, parameter: torch.Tensor) -> None:
        """Record that autograd has set the gradient of a member of a chunk.

        Args:
            number: Number of the chunk.
            index: Index of the member.
            parameter: Parameter of the member.
        """
        # This runs once for each parameter and pass: whatever only an error or a complete chunk needs is read later.
        current, gradient = self._pass, parameter.grad
        if gradient is not None and (gradient.layout is not torch.strided or gradient.requires_grad):
            refuse_gradient(self._name(number, index), gradient)
        if number in self.arriving:
            refuse_arriving(self._name(number, index))
        if not current.is_running:
            self.start(arrived=parameter)
        current.has_gradients = True
        if current_pass() != current.number:
            self.expected.from_nested_passes = True
        arrived = current.arrived[number]
        if number in current.begun:
            if self.hooks.compare is None:
                if index in arrived:
                    refuse_another(self._name(number, index))
                (refuse_closed if self._programmed else refuse_given_up)(self._name(number, index))
            current.late.add(number)
            self.usage.add(number, [int(place == index) for place in range(len(self._chunks[number].members))])
            return
        arrived.add(index)
        # True again for later gradients: checkpointing may run a pass within the pass, with another gradient.
        if len(arrived) >= self.expected.counts[number]:
            chunk = self._chunks[number]
            current.completed.add(number)
            if not self._programmed:
                self.order.learned.observed.append(number)
            # With a bound the buffer of an earlier reduction is reused, and only a program may wait for that one.
            if not (self._programmed and self.is_bounded):
                self._take(chunk)
            if not self._programmed:
                self.begin()
            elif not self.deferring and self.order.may_begin_early(number):
                self.reduce(number)

    def _name(self, number: int, index: int) -> str:
        """Return the name of a member of a chunk, for an error."""
        return self._chunks[number].members[index].names[0]

    def _take(self, chunk: Chunk) -> None:
        """Take the gradients of a chunk, and wait before for a reduction whose buffer it can borrow."""
        current, begun = self._pass, len(self._pass.begun)
        order = self.order.numbers
        is_next = begun < len(order) and chunk.number == order[begun]
        # A finished reduction returns its buffer, which this chunk can borrow.
        if is_next and not self.deferring and (self.is_bounded or chunk.stage.shards_gradients):
            self._reductions.make_room()
        self.usage.add(chunk.number, self.gradients[chunk.number].take(self.buffers.gradients))
        current.taken.add(chunk.number)

    def _begin(self, chunk: Chunk) -> None:
        """Begin the reduction of the next chunk."""
        if self.hooks.compare is None and not self._pass.begun:
            self._sharers.calls.note("reduces gradients in backward")
        self._pass.begun.add(chunk.number)
        gradients = self.gradients[chunk.number]
        one = chunk.stage.shards_state or is_one_all_reduce(gradients)
        self._reductions.begin(reduction(gradients, self.buffers), single=one and chunk.groups.replicas is None)

    def _end(self) -> None:
        """End a backward pass."""
        current = self._pass
        reduced = current.has_gradients and not self.deferring
        if reduced:
            self.expected.end_pass(current.completed)
            current.is_ending = True
            self.hooks.before_last()
            if self._programmed:
                self.order.learned.observed = list(self.order.due)
            source = self.order.source
            self._finish(requests_order=source is not None and source.end_pass())
        else:
            for number in self.order.numbers:
                if current.arrived[number] and number not in current.taken:
                    self._take(self._chunks[number])
        self.meter.note("release")
        if self.buffers.end_pass():
            for gradients in self.gradients:
                gradients.forget_buffer()
        # After `end_pass` of the buffers, so that the optimizer's gradients can use the memory that it has freed.
        for number in range(len(self._chunks)) if reduced else ():
            self.usage.bind(number)
        self._forget_pass()
        if reduced:
            self.order.follow(())
        for call in self.hooks.at_end:
            call(reduced=reduced)

    def _finish(self, *, requests_order: bool) -> None:
        """Compare the ranks, begin the last reductions, and wait for all of them.

        The ranks also exchange the flags that later steps need. The next pass reads these, which have arrived by then.
        The step reads them earlier only on ranks that lack a gradient of some member.

        Args:
            requests_order: Whether this rank requests that the ranks learn an order.
        """
        current, sharers = self._pass, self._sharers
        if self.hooks.compare is None:
            self.reduce_rest()
        # Chunks that follow no program are taken below, and their gradients count already.
        for number in self.order.numbers if len(current.taken) < len(self._chunks) else ():
            if number not in current.taken:
                arrived = current.arrived[number]
                self.usage.add(number, [int(i in arrived) for i in range(len(self._chunks[number].members))])
        had_all, late, groups = self.usage.has_all, bool(current.late), sharers.agreeing
        # Only ranks that each step alone, at stage 0, reach this pass after different numbers of steps. The largest
        # number and the largest negative one show it.
        steps, sharers.calls.unreduced_steps = sharers.calls.unreduced_steps, 0
        mine: list[int] = [had_all, requests_order, steps, -steps]
        if self.hooks.compare is not None:
            # First, because ranks that differ raise.
            groups = sharers.beside_gathering
            # Only replicas learn an order at stage 3: without them it is the program's.
            had_on_any, late, *requested = self.hooks.compare([had_all, late, *[requests_order] * bool(groups)])
            # Replicas, which the comparison has not reached, receive both flags in one number.
            mine[:2] = had_on_any, any(requested) + _LATE * (late and bool(groups))
        self.reduce_rest()
        flags = Flags(mine, groups, self.usage.device)
        # The usage of the previous pass must be exchanged before this pass replaces its flags.
        self.usage.share()
        self._reductions.finish()
        if self.hooks.compare is None:
            sharers.calls.agree()  # each reduction has needed all ranks
        flags.pass_on()
        # The host waits for the flag of replicas. Without replicas, the comparison has combined it.
        if late or (groups and self.hooks.compare is not None and flags.read()[1] >= _LATE):
            self._reduce_late()
        before = self.usage.end_pass(flags, had_all=had_all)
        if before is None:
            return
        # The flag is equal on all ranks, so all ranks join the all-reduce of `learn`, or no rank does.
        source = self.order.source
        if source is not None:
            _, is_requested, most, least = before.read()
            if most != -least:
                refuse_steps(agree(None, before.sent[2], *sharers.agreeing))
            if is_requested:
                source.learn(sharers.agreeing, self.usage.device)
            source.is_agreed = True

    def _reduce_late(self) -> None:
        """Reduce the chunks once more of which any rank has received gradients after their reduction had begun."""
        of_ranks = agree(None, self._pass.late, *self._sharers.agreeing).values()
        for number in sorted(set().union(*of_ranks)):
            # As after another backward: the optimizer has the first sum, to which the reduction adds the second.
            self.gradients[number].bind()
            self._take(self._chunks[number])
            self._begin(self._chunks[number])
        self._reductions.finish()

    def _forget_pass(self) -> None:
        self._pass = BackwardPass([set() for _ in self._chunks])
        self.order.learned.observed.clear()
