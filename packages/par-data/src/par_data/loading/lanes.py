"""Streams with shards, read in lanes. The number of ranks decides who reads a lane, and never the order of samples.

Lane l of V reads `dataset.shard(num_shards=V, index=l)`, and fills positions l B / V to (l + 1) B / V - 1 of each
global batch of B samples. V is the largest divisor of B for which enough shards exist. So the order is a function of B,
the number of shards, the seed and the epoch. An epoch ends with the first lane that cannot fill its positions.
"""

import itertools
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from par_groups import agree

from .._torch_private import forget_worker
from .broadcast import transfer_device
from .position import LoaderPosition
from .randomness import derive_seed, iterate_seeded, seed_generators
from .samplers import set_epoch
from .sources import BatchShard, Collate, inside_batch, rebuild_loader, split_evenly, start_worker
from .workers import WorkerSignals


class LaneSamples(NamedTuple):
    """This rank's samples of a global batch, and the seed of the random numbers for collating them."""

    samples: list[Any]
    key: tuple[int, ...]


def count_lanes(dataset: Any, batch_size: int | None) -> int:
    """Return the number of lanes of a dataset; 1 if it has no shards."""
    shards = getattr(dataset, "num_shards", None) or getattr(dataset, "n_shards", None)
    if batch_size is None or not isinstance(shards, int) or not callable(getattr(dataset, "shard", None)):
        return 1
    return max(number for number in range(1, min(shards, batch_size) + 1) if batch_size % number == 0)


class LaneDataset(IterableDataset[LaneSamples | None]):
    """One rank's samples of each global batch, then None at the end of the epoch.

    Args:
        dataset: The stream with shards.
        batch_size: Number of samples in a global batch.
        lanes: Number of lanes, a divisor of `batch_size`.
        first: Offset of this rank's first sample in each global batch.
        last: Offset behind this rank's last sample.
        all_lanes: Whether to read the lanes of the other ranks, too. Without communication between ranks, only that
            shows when their lanes end.
        seed: Seed of random numbers.
    """

    def __init__(
        self, dataset: Any, *, batch_size: int, lanes: int, first: int, last: int, all_lanes: bool, seed: int
    ) -> None:
        self.dataset = dataset
        self.batch_size, self._lanes, self._seed = batch_size, lanes, seed
        self._per_lane = batch_size // lanes
        self._opened = range(lanes) if all_lanes else range(first // self._per_lane, -(-last // self._per_lane))
        self._first, self._last = first, last
        # Shared memory, because a persistent worker keeps its copy of this object for all epochs.
        self._start = torch.zeros(2, dtype=torch.int64).share_memory_()

    def start_at(self, epoch: int, batches: int) -> None:
        """Set the epoch of the next iteration, and how many of its batches to skip."""
        self._start.copy_(torch.tensor([epoch, batches]))

    def __iter__(self) -> Iterator[LaneSamples | None]:
        # A dataset that knows that it runs in a worker may read other shards, or read them in another order.
        forget_worker()
        epoch, number = self._start.tolist()
        set_epoch(self.dataset, epoch)
        opened = [iterate_seeded(self._read(lane, epoch, number), (self._seed, epoch, lane)) for lane in self._opened]
        before = self._opened.start * self._per_lane
        while True:
            pieces = [next(lane, None) for lane in opened]
            samples = [sample for piece in pieces if piece is not None for sample in piece]
            # The end travels through the DataLoader as an item, because the ranks still have to agree on it.
            if len(samples) < len(opened) * self._per_lane:
                yield None
                return
            own = samples[self._first - before : self._last - before]
            yield LaneSamples(own, (self._seed, epoch, number * self.batch_size + self._first))
            number += 1

    def _read(self, lane: int, epoch: int, batches: int) -> Iterator[list[Any]]:
        """Iterate over the samples of a lane, in lists of as many as it gives to a global batch."""
        dataset = self.dataset.shard(num_shards=self._lanes, index=lane)
        skipped = batches * self._per_lane
        # The dataset's own skip may know how many samples a file has, and need not read them.
        if skipped and hasattr(dataset, "skip"):
            dataset, skipped = dataset.skip(skipped), 0
        set_epoch(dataset, epoch)
        samples = islice(dataset, skipped, None)
        while piece := list(islice(samples, self._per_lane)):
            yield piece


class LaneSource:
    """A stream with shards: each rank reads the lanes of its own samples.

    Args:
        loader: The loader of the stream.
        lanes: Number of lanes.
        rank: Index of this data rank.
        num_replicas: Number of data ranks.
        seed: Seed of random numbers.
        data_group: The data ranks, which agree on the end of an epoch; None: this rank reads all lanes.
        signals: Whether workers ignore the stop signals.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        lanes: int,
        *,
        rank: int,
        num_replicas: int,
        seed: int,
        data_group: dist.ProcessGroup | None,
        signals: WorkerSignals,
    ) -> None:
        size = loader.batch_size or 0
        offsets = split_evenly(np.arange(size), rank, num_replicas)
        self._data = LaneDataset(
            loader.dataset,
            batch_size=size,
            lanes=lanes,
            first=int(offsets[0]),
            last=int(offsets[-1]) + 1,
            all_lanes=data_group is None,
            seed=seed,
        )
        self._seed, self._group, self._size = seed, data_group, size
        self._generator = torch.Generator()
        self._loader = rebuild_loader(
            loader,
            signals,
            dataset=self._data,
            collate_fn=partial(_collate_lanes, loader.collate_fn, size),
            worker_init_fn=partial(start_worker, loader.worker_init_fn),
            generator=self._generator,
            batch_size=None,
        )

    def open(self, epoch: int) -> Iterator[BatchShard]:
        """Return the batches of an epoch."""
        return self._open(epoch, 0)

    def seek(self, position: LoaderPosition) -> tuple[int, Iterator[BatchShard]]:
        """Return the epoch of a position, and its batches from the position on. Each lane skips its own samples."""
        batches, inside = divmod(position.samples - position.begin, self._size)
        if inside:
            raise inside_batch(inside, self._size)
        return position.epoch, self._open(position.epoch, batches)

    def _open(self, epoch: int, batches: int) -> Iterator[BatchShard]:
        self._data.start_at(epoch, batches)
        self._generator.manual_seed(derive_seed(self._seed, epoch))
        found = iterate_seeded(self._loader, (self._seed, epoch))
        group = self._group
        # Without a group this rank reads all lanes, and so sees the end of each.
        if group is None:
            return itertools.takewhile(lambda batch: batch is not None, found)
        return iter(lambda: _next_on_all(found, group), None)


def _collate_lanes(collate: Collate, size: int, own: LaneSamples | None) -> BatchShard | None:
    if own is None:
        return None
    seed_generators(own.key)
    return BatchShard(size, collate(own.samples))


def _next_on_all(batches: Iterator[BatchShard | None], group: dist.ProcessGroup) -> BatchShard | None:
    """Return this rank's next batch; None if a rank of the group has no more. An error is raised on all ranks."""
    problem, batch = None, None
    try:
        batch = next(batches, None)
    except Exception as error:
        # An error of any kind is kept: the other ranks wait for this one in the all-reduce.
        problem = error
    # One minimum over all ranks: 0 if a rank failed, 1 if a lane ended, 2 if all have a batch.
    state = torch.tensor([0 if problem is not None else 1 if batch is None else 2], device=transfer_device(group))
    dist.all_reduce(state, op=dist.ReduceOp.MIN, group=group)
    if not state.item():
        agree(problem, None, group)
    return batch if state.item() == 2 else None
