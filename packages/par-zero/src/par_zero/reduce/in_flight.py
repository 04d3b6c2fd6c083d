"""Reductions in flight: their collectives, their maximum number, the moment when each continues, and shared memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from par_groups import attributes

from .._collectives import Handle, all_gather, reduce_scatter, scaled_sum
from ..layout.buffers import Buffers
from ..layout.gradients import ChunkGradients


@dataclass
class ReductionBuffers:
    """Buffers that reductions use one after the other.

    Args:
        gradients: Buffers for the gradients of a chunk.
        received: Receive buffers of reduce-scatters.
        kept: Number of free buffers of each kind that stay allocated between two passes.
    """

    gradients: Buffers
    received: Buffers
    kept: int

    def end_pass(self) -> bool:
        """Free all but `kept` free buffers of each kind. Return whether gradient buffers were freed."""
        self.received.keep(self.kept)
        return self.gradients.keep(self.kept)


@dataclass
class _Reduction:
    """The reduction of a chunk in flight.

    Args:
        steps: Iterator over the remaining collectives. Each collective begins when it is taken from the iterator.
        handle: Handle of the collective in flight.
        single: Whether no other collective follows.
        at_first: Whether the collective in flight is the first one.
    """

    steps: Iterator[Handle]
    handle: Handle
    single: bool
    at_first: bool = True


class Reductions:
    """Reductions in flight, in the order in which they began.

    Without a limit, the collectives that follow the first collective of a reduction begin only in `finish`. If they
    began as soon as the first collective has completed, their order among other collectives would differ between ranks.

    Args:
        limit: Maximum number of reductions that are at their first collective, which needs memory for the full chunk.
            One more reduction waits for the oldest one, which then continues. None: any number.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self._in_flight: list[_Reduction] = []

    def begin(self, steps: Iterator[Handle], *, single: bool) -> None:
        """Begin a reduction.

        Args:
            steps: Iterator over the collectives. Each collective begins when it is taken from the iterator, after the
                previous collective has completed.
            single: Whether the reduction has only one collective.
        """
        self.make_room()
        self._in_flight.append(_Reduction(steps, next(steps), single))

    def make_room(self) -> None:
        """Finish completed reductions. At the limit, continue the oldest reductions until one more may begin."""
        # Only single collectives: a longer reduction would begin its next collective, in an order of this rank only.
        if self.limit is None:
            self._wait_for([each for each in self._in_flight if each.single and each.handle.is_completed()])
            return
        first = [place for place, reduction in enumerate(self._in_flight) if reduction.at_first]
        if len(first) >= self.limit:
            self._wait_for(self._in_flight[: first[0] + 1])

    def finish(self) -> None:
        """Wait for all reductions, which continue round-robin."""
        while self._in_flight:
            self._wait_for(list(self._in_flight))

    def abandon(self) -> None:
        """Wait for all reductions, although their results are dropped. They write into buffers that are used again."""
        for reduction in self._in_flight:
            reduction.handle.wait()
            # Other ranks may have begun the collectives that follow, and no rank may leave one out.
            for handle in () if reduction.single else reduction.steps:
                handle.wait()
        self._in_flight.clear()

    def _wait_for(self, reductions: Sequence[_Reduction]) -> None:
        """Wait for the collective in flight of each reduction, the oldest first, and begin its next collective."""
        for reduction in reductions:
            reduction.handle.wait()
            following = next(reduction.steps, None)
            if following is None:
                self._in_flight.remove(reduction)
            else:
                reduction.handle, reduction.at_first = following, False


def is_one_all_reduce(gradients: ChunkGradients) -> bool:
    """Return whether one all-reduce reduces a chunk.

    Between two ranks, the sum of an all-reduce has the same bits as a sum in the order of the ranks.

    Args:
        gradients: Gradients of the chunk.
    """
    chunk = gradients.chunk
    return not chunk.stage.shards_state and chunk.groups.is_pair and not gradients.has_earlier


def reduction(gradients: ChunkGradients, buffers: ReductionBuffers) -> Iterator[Handle]:
    """Yield the handles of a chunk's collectives. The caller waits for a handle before it takes the next one.

    Args:
        gradients: Gradients of the chunk, which are in its buffer.
        buffers: Buffers of reductions.
    """
    chunk, groups, whole = gradients.chunk, gradients.chunk.groups, gradients.buffer
    if whole is None:
        raise RuntimeError(f"chunk {chunk.number} is reduced before its gradients were taken; a bug of par-zero")
    shard = gradients.place_of_sum(whole)
    if is_one_all_reduce(gradients):
        chunk.meter.note("reduce", chunk.name)
        yield scaled_sum(whole, groups.shards, scale=groups.scale)
        gradients.take_sum(shard, buffers.gradients)
        chunk.meter.note("sum", chunk.name)
        gradients.offload()
        return
    chunk.meter.note("scatter", chunk.name)
    yield reduce_scatter(whole, shard, groups.shards, scale=groups.scale, buffers=buffers.received)
    gradients.take_sum(shard, buffers.gradients)  # returns the buffer, so that the next chunk can use it
    chunk.meter.note("sum", chunk.name)
    # Hybrid sharding: replicas of the same shard sum only this shard, which is smaller than the chunk.
    if groups.replicas is not None:
        yield scaled_sum(shard, groups.replicas, scale=groups.scale_of_replicas)
    gradients.add_earlier_(shard)
    # At stage 0 the optimizer of every rank updates the complete chunk.
    if not chunk.stage.shards_state:
        yield all_gather(whole, shard, groups.shards)
    gradients.offload()


def empty_reduction(gradients: ChunkGradients) -> Iterator[Handle]:
    """Yield the handle of a reduce-scatter of zeros in place of a chunk's gradients, which remain unchanged.

    Args:
        gradients: Gradients of the chunk.
    """
    chunk = gradients.chunk
    low, high = chunk.share
    flat = torch.zeros(chunk.layout.size, dtype=chunk.plan.reduce_dtype, device=chunk.device)
    # The result is not used, but other ranks' reductions need a receiver on this rank.
    shard = flat.new_empty(high - low)
    for tensor in (flat, shard):
        attributes.LABEL.set(tensor, chunk.label)
    yield reduce_scatter(flat, shard, chunk.groups.shards, scale=chunk.groups.scale, buffers=Buffers())
