"""Data loaders of other trainers: one order on all ranks, and the same samples on all ranks of a replica.

A trainer may seed torch's generator differently on each rank, so that data ranks draw different dropout masks. A
sampler that draws from that generator would return another order on each rank. So the draws of a loader are separate:

    sampler, or a stream     draws of the order: equal on all ranks
    dataset, collator        draws of the samples: equal on the ranks of a replica, different on each data rank
"""

from collections.abc import Callable, Iterator
from copy import copy
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, get_worker_info

from .randomness import RandomStream, derive_seed, seed_generators
from .samplers import set_epoch


def synchronize_draws(loader: DataLoader[Any], states: Any, *, rank: int, num_replicas: int) -> DataLoader[Any]:
    """Return a loader with the batches of another one, whose random draws are separate from the program's.

    Args:
        loader: A loader that a trainer has prepared for this rank.
        states: The state of the generators in which the order begins, as `get_random_states` returns it, equal on all
            ranks. With one data rank, the draws of samples continue this state, too, as they do in one process.
        rank: Index of this rank among the data-parallel ranks.
        num_replicas: Number of data-parallel ranks.
    """
    order = RandomStream(states=states)
    seed = derive_seed(states[0].numpy().tobytes().hex())
    streams = isinstance(loader.dataset, IterableDataset)
    rows = order if num_replicas == 1 and not streams else RandomStream((seed, rank))
    # A copy keeps the loader's class, which may be the user's or torchdata's.
    synchronized = copy(loader)
    changed: dict[str, Any] = {}
    if streams:
        changed["dataset"] = _SampleStream(loader.dataset, order)
    else:
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        in_process = loader.num_workers == 0
        changed[name] = _DrawnOrder(
            getattr(loader, name), order, rows if in_process else None, bare=loader.generator is None
        )
    if loader.generator is None:  # torch draws the workers' seeds from it
        changed["generator"] = torch.Generator().manual_seed(seed)
    changed["collate_fn"] = _Collate(loader.collate_fn, rows, rank if streams else None)
    changed["worker_init_fn"] = _WorkerInit(loader.worker_init_fn, 0 if streams else rank)
    # Not by setattr: DataLoader forbids to set these, because an iterator that exists would not follow. None exists.
    vars(synchronized).update(changed)
    return synchronized


class _DrawnOrder(BatchSampler):
    """A sampler whose draws come from a separate stream. All attributes are those of the inner sampler.

    Args:
        sampler: The batch sampler, or a sampler of batches.
        order: The stream of the order, equal on all ranks.
        rows: The stream of the samples, entered from the indices of a batch until it is collated; None: workers load.
        bare: Whether an iterator of the original loader would have drawn a base seed before the order.
    """

    def __init__(self, sampler: Any, order: RandomStream, rows: RandomStream | None, *, bare: bool) -> None:
        own = {"inner": sampler, "order": order, "rows": rows, "bare": bare, "begun": 0, "epoch": 0}
        # `__setattr__` sets the attributes of the inner sampler, so that this object's own go around it.
        vars(self).update(own)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # pickle asks a copy before it has attributes; this must not recurse
            raise AttributeError(name)
        return getattr(vars(self)["inner"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)

    def __len__(self) -> int:
        return len(self.inner)

    def set_epoch(self, epoch: int) -> None:
        """Set the next epoch, in whose order a resumed run continues."""
        vars(self)["epoch"] = epoch
        set_epoch(self.inner, epoch)

    def __iter__(self) -> Iterator[Any]:
        # A sampler without epochs draws one epoch after the other: draw and discard those that a resume has skipped.
        for _ in range(self.epoch - self.begun if not _follows_epochs(self.inner) else 0):
            self._begin()
            for _ in self.order.iterate(self.inner):
                pass
        vars(self)["begun"] = max(self.epoch, self.begun) + 1
        self._begin()
        for batch in self.order.iterate(self.inner):
            if self.rows is not None:
                self.rows.enter()
            try:
                yield batch
            finally:
                # Collating leaves the stream. A batch that the trainer drops is not collated, so leave it here, too.
                if self.rows is not None:
                    self.rows.leave()

    def _begin(self) -> None:
        # An iterator of the original loader draws the base seed of its workers first. Without this draw, the order
        # would be another one than in one process.
        if self.bare:
            with self.order.entered():
                torch.empty((), dtype=torch.int64).random_()


def _follows_epochs(sampler: Any) -> bool:
    """Return whether a sampler, or one inside it, has `set_epoch`, so that it can start in any epoch."""
    inside = [each for each in getattr(sampler, "__dict__", {}).values() if isinstance(each, Sampler)]
    return hasattr(sampler, "set_epoch") or any(map(_follows_epochs, inside))


class _SampleStream(IterableDataset[Any]):
    """A stream that all ranks read from the beginning, with draws that are equal on all of them."""

    def __init__(self, dataset: Any, order: RandomStream) -> None:
        self.inner, self._order = dataset, order

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # pickle asks a copy before it has attributes; this must not recurse
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:  # the worker's own generators have the same seed on all ranks
            return iter(self.inner)
        return self._order.iterate(self.inner)


class _Collate:
    """A collate function that draws from the stream of the samples.

    Args:
        inner: The loader's own function.
        rows: The stream.
        rank: Index of the data rank if the dataset is a stream: then only this function draws from it. None: the
            random stream was entered when the sampler returned the indices of the batch.
    """

    def __init__(self, inner: Callable[[Any], Any], rows: RandomStream, rank: int | None) -> None:
        self.inner, self._rows, self._rank = inner, rows, rank
        self._is_in_worker = False

    def __call__(self, samples: Any) -> Any:
        worker = get_worker_info()
        if self._rank is not None:
            if worker is not None and not self._is_in_worker:  # different numbers in each worker and epoch
                self._rows, self._is_in_worker = RandomStream((worker.seed, self._rank)), True
            with self._rows.entered():
                return self.inner(samples)
        try:
            return self.inner(samples)
        finally:
            if worker is None:
                self._rows.leave()


class _WorkerInit:
    """The start of a worker: the user's own function, then generators with one seed for all ranks of a replica.

    Trainers seed workers by the global rank, so that the ranks of a replica would load different samples.
    """

    def __init__(self, inner: Callable[[int], None] | None, rank: int) -> None:
        self._inner, self._rank = inner, rank

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        if self._inner is not None:
            self._inner(worker)
        assert info is not None  # noqa: S101 - only workers call this
        seed_generators((info.seed, self._rank))
