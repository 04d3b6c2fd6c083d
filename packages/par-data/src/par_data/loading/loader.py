"""A data loader of global batches, of which each data-parallel rank loads its shard.

A step's batch is a function of (seed, epoch) and of the number of samples that all ranks have consumed together. The
number of ranks decides only who loads which part of it.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from .broadcast import Broadcaster, BroadcastSource
from .device import move_to_device
from .lanes import LaneSource, count_lanes
from .position import LoaderPosition
from .samplers import epoch_size, hash_order, nested_samplers, prepare_sampler
from .sources import BatchShard, BatchSource, MapSource, StreamSource, shard_batch, too_few_samples
from .workers import WorkerSignals


class ShardedDataLoader:
    """One data-parallel rank's shards of the batches of a DataLoader.

    The loader is a cursor, like an open file: a `for` loop returns the rest of the epoch. A loop after a `break`
    continues behind the last batch, and a loop after the end of an epoch begins the next epoch.

    - Every rank gets a contiguous shard of each global batch. Shard sizes differ by at most one sample.
    - A sampler is iterated again in each epoch. Its random numbers are a function of (seed, epoch), and its `set_epoch`
      is called if it has one. Generators that it holds (of torch, NumPy or `random.Random`) are replaced in a copy.
    - Random numbers that a dataset or a collate function draws (torch on the CPU, `random`, NumPy) are a function of
      (seed, epoch, first sample of the shard). They do not depend on the number of workers, on the rank within a
      tensor-parallel group, or on a restart. The program's own generators are not affected.
    - An IterableDataset is read by every rank from the beginning, so all ranks must read the same samples. Each rank
      collates its own samples only. To resume, the loader reads up to the position. Random numbers are a function of
      (seed, epoch, worker).
    - An IterableDataset with `num_shards` and `shard(num_shards=, index=)`, such as those of Hugging Face, is read in
      lanes: a rank opens only the shards of its own samples. An epoch ends with the first lane that ends. To resume,
      `skip` is called if the dataset has it. At most one worker is possible.

    Args:
        loader: The DataLoader whose options are used. Its batch size is global: the batch of all ranks together.
        rank: Index of this rank among the data-parallel ranks, as for a DistributedSampler.
        num_replicas: Number of data-parallel ranks.
        seed: Seed of the order, equal on all ranks.
        replica_group: The ranks that need the same batches, such as a tensor-parallel group. The first of them loads
            and broadcasts each batch to the other ranks. Then iterating and `load_state_dict` are collective over the
            group, and an error of the first rank is raised on all of them. None: this rank loads for itself.
        data_group: The data-parallel ranks, in the order of `rank`. They agree on the end of a lane with one all-reduce
            of one integer per batch. None: each rank reads all lanes.
        worker_signals: The signals that workers ignore while this process handles them. None: workers ignore none.
        uneven: Whether ranks may get different numbers of samples, which differ by at most one. The loop must then
            weigh each rank's loss by its samples.

    Attributes:
        device: The device of the batches, "cpu" unless it is set.
        transform: A function that is applied to each batch of this rank before the batch moves to the device, such as
            one that selects the tokens of a context-parallel rank. None unless it is set.

    Raises:
        TypeError: `loader` is not a DataLoader.
        ValueError: The batches cannot be sharded: no batch size, a batch size that the ranks do not divide, a last
            batch with fewer samples than ranks, or a DistributedSampler.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        rank: int,
        num_replicas: int,
        seed: int,
        replica_group: dist.ProcessGroup | None = None,
        data_group: dist.ProcessGroup | None = None,
        worker_signals: WorkerSignals | None = None,
        uneven: bool = False,
    ) -> None:
        _check(loader, rank, num_replicas, uneven=uneven)
        self._plain = loader
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        self.device: torch.device | str = "cpu"
        self.transform: Callable[[Any], Any] | None = None
        self.position = LoaderPosition()
        digest = getattr(loader.dataset, "digest", None)
        self.position.data = digest if isinstance(digest, str) else ""
        shard_of = partial(shard_batch, rank=rank, num_replicas=num_replicas)
        signals = worker_signals or WorkerSignals()
        source: BatchSource
        if not isinstance(loader.dataset, IterableDataset):
            source = MapSource(loader, shard_of, seed, signals)
        elif (lanes := count_lanes(loader.dataset, loader.batch_size)) == 1:
            source = StreamSource(loader, shard_of, seed, signals)
        else:
            # A lane has shards of its own, so that no rank reads samples of others only to drop them.
            self.position.lanes = lanes
            source = LaneSource(
                loader,
                lanes,
                rank=rank,
                num_replicas=num_replicas,
                seed=seed,
                data_group=data_group,
                signals=signals,
            )
        # Tensor and pipeline ranks of a replica get one rank's batches: two readers of a stream would drift apart.
        if replica_group is not None and dist.get_world_size(replica_group) > 1:
            source = BroadcastSource(source, Broadcaster(replica_group, pinned=loader.pin_memory))
        self._source: BatchSource | None = source
        self._batches: Iterator[BatchShard] | None = None

    def __len__(self) -> int:
        """Return the number of global batches in an epoch."""
        if self.position.lanes > 1:
            raise TypeError(
                f"a stream in {self.position.lanes} lanes has no length, because an epoch ends with the first lane "
                "that ends; count the batches that arrive"
            )
        return len(self._plain)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over this rank's batches, from the position to the end of the epoch."""
        # The first call returns None once if the last batch of an epoch was taken: then the next epoch begins.
        item = self._take() or self._take()
        epoch = self.epoch
        while item is not None:
            # Before the move, so that samples which the transform drops are not copied to the device.
            samples = item.samples if self.transform is None else self.transform(item.samples)
            yield move_to_device(samples, self.device, non_blocking=self._plain.pin_memory)
            item = self._take() if self.epoch == epoch else None

    def hash_order(self) -> str:
        """Return a digest of what decides the rows of a batch, which must be equal on all ranks: see `hash_order`.

        Generators of the samplers are not part of it, because each epoch gives them new seeds.
        """
        if isinstance(self.dataset, IterableDataset):
            return ""
        sampler = self._plain.sampler if self._plain.batch_sampler is None else self._plain.batch_sampler
        prepared = prepare_sampler(sampler, 0, torch.Generator().manual_seed(0))
        return hash_order(prepared) + hash_order(self.dataset)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self.position.epoch

    @property
    def samples(self) -> int:
        """The number of samples that all ranks together have consumed since training began."""
        return self.position.samples

    def state_dict(self) -> dict[str, Any]:
        """Return the position, which is valid for any number of ranks and workers."""
        return self.position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Move to a position.

        Raises:
            ValueError: The position is not between two global batches, or was saved with other data.
        """
        position = LoaderPosition()
        position.load_state_dict(state)
        if position.lanes != self.position.lanes:
            raise ValueError(
                f"the position was saved with {position.lanes} lanes, and this stream has {self.position.lanes}: lanes "
                "decide the order; use the batch_size and the number of shards of the saved run"
            )
        if position.data and self.position.data and position.data != self.position.data:
            raise ValueError(
                f"the {type(self.dataset).__name__} has other samples than the dataset of the saved position; restore "
                "its files, tokenizer and options, or start a new run from the weights"
            )
        # The own position changes last: if seeking raises, the loader stays where it was.
        position.epoch, self._batches = self._open_source().seek(position)
        self.position.load_state_dict({**state, "epoch": position.epoch})

    def close(self) -> None:
        """End the workers. Afterwards there are no batches, but the position and the length remain."""
        self._source = self._batches = None

    def _open_source(self) -> BatchSource:
        if self._source is None:
            raise RuntimeError("this ShardedDataLoader is closed; create another one")
        return self._source

    def _take(self) -> BatchShard | None:
        """Return the next batch; None once between two epochs."""
        source = self._open_source()
        if self._batches is None:
            self._batches = source.open(self.epoch)
        item = next(self._batches, None)
        if item is None:
            self.position.next_epoch()
            self._batches = None
        else:
            # Counted when the program gets a batch, not when a worker has read it ahead.
            self.position.samples += item.size
        return item


def _check(loader: Any, rank: int, num_replicas: int, *, uneven: bool) -> None:
    if not isinstance(loader, DataLoader):
        raise TypeError(f"loader is a {type(loader).__name__}: it must be a torch.utils.data.DataLoader; pass one")
    if not 0 <= rank < num_replicas:
        raise ValueError(f"rank={rank}, num_replicas={num_replicas}: rank must be in 0 .. num_replicas - 1; set both")
    if loader.batch_sampler is None:
        raise ValueError("batch_size=None: a batch of the dataset's own cannot be sharded; set a batch_size")
    if any(isinstance(each, DistributedSampler) for each in nested_samplers(loader.batch_sampler)):
        raise ValueError(
            "the DataLoader has a DistributedSampler: it would shard each shard again; remove it, and set shuffle=True"
        )
    size = loader.batch_size
    if size is not None and size % num_replicas and not uneven:
        near = max(1, round(size / num_replicas)) * num_replicas
        raise ValueError(
            f"batch_size={size}: it is the batch of all ranks, and num_replicas={num_replicas} must divide it; use "
            f"batch_size={near}, or another number of ranks; or pass uneven=True and weigh losses by their samples"
        )
    if size is not None and size < num_replicas:
        raise too_few_samples(size, num_replicas)
    lanes = count_lanes(loader.dataset, size) if isinstance(loader.dataset, IterableDataset) else 1
    if lanes > 1 and loader.num_workers > 1:
        raise ValueError(
            f"num_workers={loader.num_workers}: at most one worker per rank can read a stream of {lanes} lanes; set "
            "num_workers=1"
        )
    # Known in advance for torch's own samplers: an error now, and not at the end of the first epoch.
    rest = (epoch_size(loader.batch_sampler) or 0) % (size or 1)
    if 0 < rest < num_replicas:
        raise too_few_samples(rest, num_replicas)


def check_last_batch(loader: DataLoader[Any], least: int) -> None:
    """Check that the last batch of an epoch is large enough, if its size is known in advance.

    Otherwise the error would come at the end of an epoch, hours later.

    Args:
        loader: The loader, with a global batch size.
        least: The number of samples that a batch needs, such as one per microbatch of each rank.

    Raises:
        ValueError: The last batch has fewer samples.
    """
    size = loader.batch_size
    rest = (epoch_size(loader.batch_sampler) or 0) % (size or 1)
    if size is not None and 0 < rest < least <= size:
        raise ValueError(
            f"batch_size={size}: the last batch of an epoch has {rest} samples, and the microbatches of all ranks need "
            f"{least}; set drop_last=True, use another batch_size, or use fewer microbatches"
        )
