"""Sources of batches: this rank's shard of each global batch, from a map-style dataset or from a stream."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, get_worker_info

from .position import LoaderPosition
from .randomness import derive_seed, iterate_seeded, seed_generators
from .samplers import epoch_size, prepare_sampler, set_epoch
from .workers import WorkerSignals

Collate = Callable[[list[Any]], Any]


class BatchShard(NamedTuple):
    """This rank's shard of a global batch, loaded and collated.

    Args:
        size: Number of samples in the global batch.
        samples: The collated samples of this rank.
    """

    size: int
    samples: Any


class IndexShard(NamedTuple):
    """This rank's shard of a global batch before it is loaded.

    Args:
        size: Number of samples in the global batch.
        indices: The indices of this rank's samples.
        key: Seed of the random numbers that loading and collating draw.
    """

    size: int
    indices: list[Any]
    key: tuple[int, ...]


_Shard = TypeVar("_Shard", BatchShard, IndexShard)

ShardOf = Callable[[Sequence[Any]], tuple[int, list[Any]]]
"""Maps a global batch to the offset of this rank's first sample in it, and to this rank's samples."""


class BatchSource(Protocol):
    """A source of this rank's batches."""

    def open(self, epoch: int) -> Iterator[BatchShard]:
        """Return the batches of an epoch."""

    def seek(self, position: LoaderPosition) -> tuple[int, Iterator[BatchShard]]:
        """Return the epoch of a position, and its batches from the position on."""


class MapSource:
    """A map-style dataset: the global batches are lists of indices, and each rank loads its shard of each list."""

    def __init__(self, loader: DataLoader[Any], shard_of: ShardOf, seed: int, signals: WorkerSignals) -> None:
        self._seed = seed
        self._shards = _IndexShards(loader.batch_sampler, shard_of, seed)
        # A DataLoader draws the seeds of its workers from this generator instead of the program's.
        self._generator = torch.Generator()
        # Functions of this module with `partial`, no closures: under "spawn" workers receive them by pickle.
        self._loader = rebuild_loader(
            loader,
            signals,
            dataset=_SeededDataset(loader.dataset),
            collate_fn=partial(_collate_loaded, loader.collate_fn),
            worker_init_fn=partial(start_worker, loader.worker_init_fn),
            generator=self._generator,
            batch_sampler=self._shards,
        )

    def open(self, epoch: int) -> Iterator[BatchShard]:
        """Return the batches of an epoch."""
        self._shards.upcoming = self._shards.of_epoch(epoch)
        return self._load(epoch)

    def seek(self, position: LoaderPosition) -> tuple[int, Iterator[BatchShard]]:
        """Return the epoch of a position, and its batches from the position on. Only indices are skipped."""
        epoch, self._shards.upcoming = self._shards.seek(position.samples)
        return epoch, self._load(epoch)

    def _load(self, epoch: int) -> Iterator[BatchShard]:
        # Seeded in each epoch, as a run that resumes has not iterated the earlier epochs.
        self._generator.manual_seed(derive_seed(self._seed, epoch))
        return iterate_seeded(self._loader, (self._seed, epoch))


class _IndexShards:
    """The batch sampler of the DataLoader that this rank iterates.

    It is one object for all epochs, because a DataLoader with persistent workers keeps its batch sampler. It holds no
    reference to the loader: workers end as soon as the last reference to the loader goes.
    """

    def __init__(self, batch_sampler: Any, shard_of: ShardOf, seed: int) -> None:
        self._batch_sampler, self._shard_of, self._seed = batch_sampler, shard_of, seed
        self.upcoming: Iterator[IndexShard] = iter(())

    def __iter__(self) -> Iterator[IndexShard]:
        return self.upcoming

    def of_epoch(self, epoch: int) -> Iterator[IndexShard]:
        """Iterate over this rank's shards of an epoch."""
        generator = torch.Generator().manual_seed(derive_seed(self._seed, epoch))
        sampler = prepare_sampler(self._batch_sampler, epoch, generator)
        consumed = 0
        for batch in iterate_seeded(sampler, (self._seed, epoch)):
            first, indices = self._shard_of(batch)
            # The key holds the number of the first sample, not the rank: under another number of ranks, a shard that
            # begins at the same sample draws the same numbers.
            yield IndexShard(size=len(batch), indices=indices, key=(self._seed, epoch, consumed + first))
            consumed += len(batch)

    def seek(self, samples: int) -> tuple[int, Iterator[IndexShard]]:
        """Return the epoch of a position, and its shards from the position on."""
        # If every epoch has one size, only the batches of the last epoch are iterated. Otherwise all of them are.
        size = epoch_size(self._batch_sampler)
        epoch, samples = divmod(samples, size) if size else (0, samples)
        return _skip_samples(self.of_epoch, epoch, samples)


class StreamSource:
    """An iterable dataset without shards: each rank reads every global batch and keeps its own samples."""

    def __init__(self, loader: DataLoader[Any], shard_of: ShardOf, seed: int, signals: WorkerSignals) -> None:
        self._seed = seed
        self._generator = torch.Generator()
        self._loader = rebuild_loader(
            loader,
            signals,
            dataset=loader.dataset,
            collate_fn=partial(_collate_shard, loader.collate_fn, shard_of),
            worker_init_fn=loader.worker_init_fn,
            generator=self._generator,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
        )

    def open(self, epoch: int) -> Iterator[BatchShard]:
        """Return the batches of an epoch."""
        set_epoch(self._loader.dataset, epoch)
        # The same seed on every rank: all ranks must read the same samples to keep different ones.
        self._generator.manual_seed(derive_seed(self._seed, epoch))
        return iterate_seeded(self._loader, (self._seed, epoch))

    def seek(self, position: LoaderPosition) -> tuple[int, Iterator[BatchShard]]:
        """Return the epoch of a position, and its batches from the position on. All earlier samples are read."""
        return _skip_samples(self.open, 0, position.samples)


class _SeededDataset(Dataset[Any]):
    """Dataset indexed by an `IndexShard`: seeds the generators with the shard's key, then loads the samples."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, shard: IndexShard) -> BatchShard:
        seed_generators(shard.key)
        load_all = getattr(self.dataset, "__getitems__", None)
        samples = load_all(shard.indices) if load_all else [self.dataset[index] for index in shard.indices]
        return BatchShard(shard.size, samples)


def _collate_loaded(collate: Collate, loaded: BatchShard) -> BatchShard:
    return BatchShard(loaded.size, collate(loaded.samples))


def _collate_shard(collate: Collate, shard_of: ShardOf, samples: list[Any]) -> BatchShard:
    return BatchShard(len(samples), collate(shard_of(samples)[1]))


def start_worker(user: Callable[[int], None] | None, worker: int) -> None:
    """Initialize a worker: show it the user's own dataset, then call the user's function."""
    info: Any = get_worker_info()
    # The user's function may open files in get_worker_info().dataset, as torch documents; ours wraps that dataset.
    object.__setattr__(info, "dataset", info.dataset.dataset)
    if user is not None:
        user(worker)


class _WorkerLoader(DataLoader[Any]):
    """A DataLoader whose workers ignore the stop signals while this process handles them."""

    def __init__(self, signals: WorkerSignals, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._signals = signals

    def __iter__(self) -> Any:
        with self._signals.starting(self):
            return super().__iter__()


def rebuild_loader(loader: DataLoader[Any], signals: WorkerSignals, **changed: Any) -> DataLoader[Any]:
    """Return a DataLoader with the options of another one, except `in_order`, which would change the order."""
    return _WorkerLoader(
        signals,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        **changed,
    )


def split_evenly(items: NDArray[np.int64], index: int, parts: int) -> NDArray[np.int64]:
    """Return one of several contiguous parts, whose sizes differ by at most 1.

    Args:
        items: Integers, int64 [n].
        index: Index of the part.
        parts: Number of parts.
    """
    return items[index * len(items) // parts : (index + 1) * len(items) // parts]


def shard_batch(batch: Sequence[Any], *, rank: int, num_replicas: int) -> tuple[int, list[Any]]:
    """Return the offset of a rank's first sample in a global batch, and the rank's samples.

    Raises:
        ValueError: The batch has fewer samples than there are ranks.
    """
    if len(batch) < num_replicas:
        raise too_few_samples(len(batch), num_replicas)
    offsets = split_evenly(np.arange(len(batch)), rank, num_replicas)
    first, last = int(offsets[0]), int(offsets[-1])
    return first, list(batch[first : last + 1])


def _skip_samples(
    open_epoch: Callable[[int], Iterator[_Shard]], epoch: int, samples: int
) -> tuple[int, Iterator[_Shard]]:
    """Return the epoch and the batches that follow after some samples, counted from the beginning of an epoch."""
    while True:
        batches, before = open_epoch(epoch), samples
        for batch in batches:
            if samples == 0:
                return epoch, itertools.chain([batch], batches)
            if batch.size > samples:
                raise inside_batch(samples, batch.size)
            samples -= batch.size
        # An epoch without batches never reaches the position: raise instead of searching for ever.
        if samples == before:
            raise ValueError(
                f"the position is {samples} samples further on, but epoch {epoch} has no batch; pass a dataset with "
                "samples"
            )
        epoch += 1


def inside_batch(samples: int, size: int) -> ValueError:
    """Return the error for a position that is not between two global batches."""
    return ValueError(
        f"the position is {samples} samples inside a global batch of {size}: it must be between two batches; use the "
        "batch_size and drop_last of the saved run"
    )


def too_few_samples(size: int, num_replicas: int) -> ValueError:
    """Return the error for a global batch that does not reach for all ranks."""
    return ValueError(
        f"a global batch has {size} samples, fewer than num_replicas={num_replicas}: each rank needs one; set "
        "drop_last=True, or use another batch_size"
    )
