"""Data loaders of other trainers, whose samplers draw alike on all ranks, and whose batches are alike in a replica.

A strategy seeds torch's generator by the place of a rank, so that data ranks drop other activations, and stages too. A
sampler that draws from it would have another order on each rank. So what a loader draws is kept apart from it:

    sampler, or a stream     draws of the order: equal on all ranks
    dataset, collator        draws of the rows: equal on the ranks of a replica, others on each data rank
"""

import hashlib
import random
from collections.abc import Callable, Collection, Iterator
from copy import copy
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, get_worker_info

from .lanes import set_epoch
from .randomness import Draws, seed_generators, seed_number


def draw_alike(loader: DataLoader[Any], states: Any, *, replica: int, replicas: int) -> DataLoader[Any]:
    """A loader that gives the batches of another one, with draws of its own.

    Args:
        loader: A loader that is prepared to be iterated on this rank.
        states: The state of generators that the order begins with, equal on all ranks. With one replica, rows continue
            it too, as they do in the trainer's own run on one process.
        replica: The index of this rank's replica.
        replicas: The number of replicas.
    """
    order = Draws(states=states)
    seed = seed_number(states[0].numpy().tobytes().hex())
    streams = isinstance(loader.dataset, IterableDataset)
    rows = order if replicas == 1 and not streams else Draws((seed, replica))
    alike = copy(loader)  # of the loader's own class, which may be the user's
    changed: dict[str, Any] = {}
    if streams:
        changed["dataset"] = _SampleStream(loader.dataset, order)
    else:
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        at_once = loader.num_workers == 0
        changed[name] = _DrawnOrder(
            getattr(loader, name), order, rows if at_once else None, bare=loader.generator is None
        )
    if loader.generator is None:  # of the workers' seeds
        changed["generator"] = torch.Generator().manual_seed(seed)
    changed["collate_fn"] = _Collate(loader.collate_fn, rows, replica if streams else None)
    changed["worker_init_fn"] = _WorkerInit(loader.worker_init_fn, 0 if streams else replica)
    vars(alike).update(changed)  # DataLoader refuses to have these set, as its iterators would not follow
    return alike


def order_of(sampler: Any, *, leave_out: Collection[str] = ()) -> str:
    """What an order is drawn from besides the program's generators: generators, indices and numbers of samplers.

    Args:
        sampler: The sampler of a loader, before trainers share it out over ranks.
        leave_out: Names of attributes that need not be equal.

    Returns:
        A digest. It is the same on ranks whose samplers will give one order.
    """
    digest = hashlib.blake2b(digest_size=16)
    _add_order(digest, sampler, leave_out)
    return digest.hexdigest()


def _add_order(digest: Any, value: Any, leave_out: Collection[str] = ()) -> None:
    if isinstance(value, torch.Generator):
        digest.update(value.get_state().numpy().data)
    elif isinstance(value, np.random.Generator):
        digest.update(repr(value.bit_generator.state).encode())
    elif isinstance(value, np.random.RandomState):
        digest.update(repr(value.get_state(legacy=False)).encode())
    elif isinstance(value, random.Random):
        digest.update(repr(value.getstate()).encode())
    elif isinstance(value, torch.Tensor | np.ndarray):
        digest.update(np.ascontiguousarray(value).data)
    elif isinstance(value, int | range):
        digest.update(repr(value).encode())
    elif isinstance(value, Sampler):
        for name, inside in sorted(vars(value).items()):
            if name not in leave_out and "rank" not in name:
                _add_order(digest, inside, leave_out)
    elif isinstance(value, list | tuple):
        if value and all(type(each) is int for each in value):
            digest.update(np.asarray(value).data)
            return
        for inside in value:
            if isinstance(inside, Sampler):
                _add_order(digest, inside, leave_out)


class _DrawnOrder(BatchSampler):
    """A batch sampler that draws the order; all else is the sampler's own, and is set there.

    Args:
        sampler: The batch sampler, or a sampler of batches.
        order: Draws that are equal on all ranks.
        rows: Draws that are entered until the batch is collated, in this process; None: workers load.
        bare: Whether an iterator of the loader would have drawn a seed for its workers before.
    """

    def __init__(self, sampler: Any, order: Draws, rows: Draws | None, *, bare: bool) -> None:
        own = {"inner": sampler, "order": order, "rows": rows, "bare": bare, "begun": 0, "epoch": 0}
        vars(self).update(own)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # of a copy that is not filled yet
            raise AttributeError(name)
        return getattr(vars(self)["inner"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.inner, name, value)

    def __len__(self) -> int:
        return len(self.inner)

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch that begins next, by which a run that resumes gets the order of that epoch."""
        vars(self)["epoch"] = epoch
        set_epoch(self.inner, epoch)

    def __iter__(self) -> Iterator[Any]:
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
            finally:  # if nobody has collated it
                if self.rows is not None:
                    self.rows.leave()

    def _begin(self) -> None:
        if self.bare:
            with self.order.entered():
                torch.empty((), dtype=torch.int64).random_()


def _follows_epochs(sampler: Any) -> bool:
    """Whether a sampler or one inside is set to an epoch, so that it needs no earlier ones to be drawn."""
    inside = [each for each in getattr(sampler, "__dict__", {}).values() if isinstance(each, Sampler)]
    return hasattr(sampler, "set_epoch") or any(map(_follows_epochs, inside))


class _SampleStream(IterableDataset[Any]):
    """A dataset without indices, which all ranks read whole, with draws that are equal on all of them."""

    def __init__(self, dataset: Any, order: Draws) -> None:
        self.inner, self._order = dataset, order

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # of a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:  # whose own generators were seeded alike
            return iter(self.inner)
        return self._order.iterate(self.inner)


class _Collate:
    """A collate function with the draws of the rows.

    Args:
        inner: The loader's own.
        rows: The draws.
        replica: Of a stream: the replica, whose ranks draw alike, for this function alone. None: the draws were entered
            when the indices of the batch were given.
    """

    def __init__(self, inner: Callable[[Any], Any], rows: Draws, replica: int | None) -> None:
        self.inner, self._rows, self._replica = inner, rows, replica
        self._is_in_worker = False

    def __call__(self, samples: Any) -> Any:
        worker = get_worker_info()
        if self._replica is not None:
            if worker is not None and not self._is_in_worker:  # other numbers in each worker and epoch
                self._rows, self._is_in_worker = Draws((worker.seed, self._replica)), True
            with self._rows.entered():
                return self.inner(samples)
        try:
            return self.inner(samples)
        finally:
            if worker is None:
                self._rows.leave()


class _WorkerInit:
    """What a worker begins with: the user's own function, and then generators that are seeded alike in a replica.

    Trainers seed workers by the rank, and ranks of a replica would load other rows.
    """

    def __init__(self, inner: Callable[[int], None] | None, replica: int) -> None:
        self._inner, self._replica = inner, replica

    def __call__(self, worker: int) -> None:
        info = get_worker_info()
        if self._inner is not None:
            self._inner(worker)
        assert info is not None  # noqa: S101 - only workers call this
        seed_generators((info.seed, self._replica))
