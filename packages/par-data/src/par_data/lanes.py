"""A stream that says how it is sharded, read in lanes: which ranks read which of them decides on no order.

Lane l of V reads `dataset.shard(num_shards=V, index=l)`, and gives places l B / V .. (l + 1) B / V - 1 of each global
batch of B samples. V is the largest divisor of B that there are shards for, so the order is a function of B, the number
of shards, the seed and the epoch. An epoch ends with the first lane that cannot fill its places.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset

from ._torch_private import forget_worker
from .randomness import aside


class Part(NamedTuple):
    """Samples of a global batch, and the key of the random numbers by which they are collated."""

    samples: list[Any]
    key: tuple[int, ...]


def lanes_of(dataset: Any, batch_size: int | None) -> int:
    """The number of lanes of a dataset; 1 if it says nothing of shards."""
    shards = getattr(dataset, "num_shards", None) or getattr(dataset, "n_shards", None)
    if batch_size is None or not isinstance(shards, int) or not callable(getattr(dataset, "shard", None)):
        return 1
    return max(number for number in range(1, min(shards, batch_size) + 1) if batch_size % number == 0)


class Lanes(IterableDataset[Part | None]):
    """One rank's samples of each global batch, and None where the epoch ends.

    Args:
        dataset: What is sharded.
        batch_size: The number of samples in a global batch.
        lanes: The number of lanes, which divides it.
        first: The place of this rank's first sample in each global batch.
        last: The place behind its last one.
        all_lanes: Whether the lanes of other ranks are read, too, because nobody else says when they end.
        seed: Seed of random numbers.
    """

    def __init__(
        self, dataset: Any, *, batch_size: int, lanes: int, first: int, last: int, all_lanes: bool, seed: int
    ) -> None:
        self.dataset = dataset
        self.batch_size, self._lanes, self._seed = batch_size, lanes, seed
        self._each = batch_size // lanes
        self._opened = range(lanes) if all_lanes else range(first // self._each, -(-last // self._each))
        self._first, self._last = first, last
        self._at = torch.zeros(2, dtype=torch.int64).share_memory_()  # also for a worker that stays

    def begin_at(self, epoch: int, batches: int) -> None:
        """Sets where the next iteration begins: behind some batches of an epoch."""
        self._at.copy_(torch.tensor([epoch, batches]))

    def __iter__(self) -> Iterator[Part | None]:
        forget_worker()  # with whose number datasets read other shards, or in another order
        epoch, number = self._at.tolist()
        set_epoch(self.dataset, epoch)
        opened = [aside(self._read(lane, epoch, number), (self._seed, epoch, lane)) for lane in self._opened]
        before = self._opened.start * self._each
        while True:
            pieces = [next(lane, None) for lane in opened]
            samples = [sample for piece in pieces if piece is not None for sample in piece]
            if len(samples) < len(opened) * self._each:
                yield None
                return
            mine = samples[self._first - before : self._last - before]
            yield Part(mine, (self._seed, epoch, number * self.batch_size + self._first))
            number += 1

    def _read(self, lane: int, epoch: int, batches: int) -> Iterator[list[Any]]:
        """The samples of a lane, as many at a time as it gives to a global batch."""
        dataset = self.dataset.shard(num_shards=self._lanes, index=lane)
        skipped = batches * self._each
        if skipped and hasattr(dataset, "skip"):
            dataset, skipped = dataset.skip(skipped), 0
        set_epoch(dataset, epoch)
        samples = islice(dataset, skipped, None)
        while piece := list(islice(samples, self._each)):
            yield piece


def set_epoch(target: Any, epoch: int) -> None:
    """Tells a sampler or a dataset the epoch, if it wants to know."""
    if hasattr(target, "set_epoch"):
        target.set_epoch(epoch)
