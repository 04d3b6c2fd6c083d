"""Reductions in flight: their collectives, how many may be, when each continues, and the memory that they share."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .._collectives import Handle, all_gather, reduce_scatter, scaled_sum
from ..layout.buffers import Buffers
from ..layout.gradients import ChunkGradients


@dataclass
class ReductionBuffers:
    """Memory that reductions need one after the other.

    Args:
        gradients: Buffers for the gradients of a chunk.
        received: Buffers for what a reduce-scatter receives.
        kept: Number of free buffers of each that are kept between two passes.
    """

    gradients: Buffers
    received: Buffers
    kept: int

    def end_pass(self) -> bool:
        """Free the memory of buffers beyond `kept`. Return whether buffers of gradients were among them."""
        self.received.keep(self.kept)
        return self.gradients.keep(self.kept)


@dataclass
class EmptyReductions:
    """Reductions of zeros, which a rank that departs from the agreed order begins for the other ranks.

    Args:
        handles: The reductions in flight.
    """

    handles: list[Handle] = field(default_factory=list)

    def begin(self, gradients: ChunkGradients) -> None:
        """Begin to reduce zeros in place of the gradients of a chunk. A reduce-scatter."""
        flat, shard = gradients.zeros()
        groups = gradients.chunk.groups
        handle = reduce_scatter(flat, shard, groups.shards, scale=groups.scale, buffers=Buffers())
        # Only the completed ones: another rank may need the next reduction before it begins an earlier one.
        for completed in [each for each in self.handles if each.is_completed()]:
            completed.wait()
            self.handles.remove(completed)
        self.handles.append(handle)

    def wait(self) -> None:
        """Wait for all of them."""
        for handle in self.handles:
            handle.wait()
        self.handles.clear()


@dataclass
class _Reduction:
    """The reduction of a chunk in flight.

    Args:
        steps: Its collectives that are still to come. Each begins when it is taken from the iterator.
        handle: The collective in flight.
        single: Whether no other collective follows.
        at_first: Whether the collective in flight is the first one.
    """

    steps: Iterator[Handle]
    handle: Handle
    single: bool
    at_first: bool = True


class Reductions:
    """Reductions in flight, in the order in which they began.

    The collectives that follow the first one of a reduction begin in `finish` only. If one began as soon as the first
    one has completed, it would be between other collectives on one rank and behind them on another.

    Args:
        limit: Number of reductions that may be at their first collective, which needs memory for the whole chunk. One
            more waits for the oldest, which then continues. A device that waits in the order of its work does the
            same. None: any number, and completed ones are taken in.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._in_flight: list[_Reduction] = []

    @property
    def is_bounded(self) -> bool:
        """Whether one more may have to wait for the oldest."""
        return self._limit is not None

    def begin(self, steps: Iterator[Handle], *, single: bool) -> None:
        """Begin a reduction.

        Args:
            steps: Its collectives. Each begins when it is taken from the iterator, after the one before has completed.
            single: Whether there is only one.
        """
        self.make_room()
        self._in_flight.append(_Reduction(steps, next(steps), single))

    def make_room(self) -> None:
        """Take in completed reductions; at the limit, continue the oldest one at its first collective, and older ones.

        Without a limit only single collectives are taken in, because others begin their next one then, see above.
        """
        if self._limit is None:
            self._wait_for([each for each in self._in_flight if each.single and each.handle.is_completed()])
            return
        first = [number for number, reduction in enumerate(self._in_flight) if reduction.at_first]
        if len(first) == self._limit:
            self._wait_for(self._in_flight[: first[0] + 1])

    def finish(self) -> None:
        """Wait for all reductions, which continue round-robin."""
        while self._in_flight:
            self._wait_for(list(self._in_flight))

    def abandon(self) -> None:
        """Wait for the collectives in flight, as they write into buffers that are used again, and begin no others."""
        for reduction in self._in_flight:
            reduction.handle.wait()
        self._in_flight.clear()

    def _wait_for(self, reductions: Sequence[_Reduction]) -> None:
        """Wait for the collectives of some reductions, the oldest first, and begin the next one of each at once."""
        for reduction in reductions:
            reduction.handle.wait()
            following = next(reduction.steps, None)
            if following is None:
                self._in_flight.remove(reduction)
            else:
                reduction.handle, reduction.at_first = following, False


def is_one_all_reduce(gradients: ChunkGradients) -> bool:
    """Return whether one all-reduce reduces a chunk: its sum has the same bits as one in the order of the ranks."""
    chunk = gradients.chunk
    return not chunk.stage.shards_state and chunk.groups.is_pair and not gradients.has_earlier


def reduction(gradients: ChunkGradients, buffers: ReductionBuffers) -> Iterator[Handle]:
    """Yield the collectives of one chunk. Each begins when it is asked for, after the one before has completed."""
    chunk, groups, whole = gradients.chunk, gradients.chunk.groups, gradients.buffer
    if whole is None:
        raise RuntimeError(f"chunk {chunk.number} is reduced before its gradients were taken; a bug of par-zero")
    shard = gradients.place_of_sum(whole)
    if is_one_all_reduce(gradients):
        chunk.meter.note("reduce", chunk.name)
        yield scaled_sum(whole, groups.shards, scale=groups.scale)
        gradients.take_sum(shard, buffers.gradients)
        chunk.meter.note("sum", chunk.name)
        return
    chunk.meter.note("scatter", chunk.name)
    yield reduce_scatter(whole, shard, groups.shards, scale=groups.scale, buffers=buffers.received)
    gradients.take_sum(shard, buffers.gradients)  # the next chunk may have its buffer
    chunk.meter.note("sum", chunk.name)
    if groups.replicas is not None:
        yield scaled_sum(shard, groups.replicas, scale=groups.scale_of_replicas)
    gradients.add_earlier_(shard)
    gradients.offload()
    if not chunk.stage.shards_state:
        yield all_gather(whole, shard, groups.shards)
