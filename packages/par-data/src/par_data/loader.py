"""A dataloader of global batches, of which every data rank loads its share.

What a step trains on is a function of (seed, epoch) and of the number of samples that all ranks have consumed together;
how many ranks there are only decides who loads which part of it.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from copy import copy
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    get_worker_info,
)

from par_groups import agree

from .lanes import Lanes, Part, lanes_of, set_epoch
from .message import Reader, wire_of
from .place import placed
from .randomness import aside, seed_generators, seed_number
from .shares import share
from .workers import WorkerSignals


class GlobalDataLoader:
    """The batches of a DataLoader, shared out between data ranks.

    It is a cursor, as an open file is: `for` gives what is left of the epoch. A `for` after a `break` goes on behind
    the last batch, and one after the end of an epoch begins the next.

    - Every rank gets its contiguous share of each global batch; shares differ by one sample at most.
    - A sampler is iterated anew in each epoch, with random numbers that are a function of (seed, epoch), after its
      `set_epoch` if it has one. Generators that it holds, torch's, numpy's or `random.Random`, are replaced for that.
    - An IterableDataset is read whole by every rank, which must find the same samples in it. Each rank collates its own
      samples alone. To resume, it is read up to the position.
    - One that has `num_shards` and `shard(num_shards=, index=)`, as those of Hugging Face have, is read in lanes, of
      which a rank opens those of its own samples. An epoch ends with the first lane that cannot fill its places. To
      resume, its `skip` is called if it has one. There is one worker at most.
    - Random numbers that a dataset or a collate function draws (torch on the CPU, `random`, numpy) are a function of
      (seed, epoch, first sample of the share): the same under any number of workers, on all ranks of a tensor group,
      and after a resume. In an IterableDataset, they are one of (seed, epoch, worker). The program's own go on as if
      nothing had been drawn.

    Args:
        loader: What to load and how; its batch size is global. Workers, collation, pinning and so on are kept.
        replica: The rank in the data group.
        replicas: The size of the data group.
        seed: Seed of the order, equal on all ranks; another seed, another order.
        group: The ranks that are this one replica, such as those of a tensor group. The first of them loads, and sends
            each batch to the others, which must take it, too: iterating, like `load_state_dict`, is collective over
            the group. An error of the one that loads is raised on all. None: this rank loads for itself.
        data_group: The ranks that have the shares of a global batch, in the order of `replica`. They tell each other
            when a lane ends or cannot be read, one all-reduce of a number a batch. None: each rank reads all lanes.
        signals: Whether workers outlive the signals that this process catches. None: they do not.

    Attributes:
        device: Where its batches are brought to; the CPU, which leaves them where the loader put them, unless it is
            set.
        cut: What each batch goes through on this rank before it comes to the device, such as a function that gives the
            tokens of one sequence rank; None, which leaves it as it is, unless it is set.

    Raises:
        TypeError: The loader is not a DataLoader.
        ValueError: Batches that cannot be shared out: no batch size or one that does not divide by the replicas, a
            last batch with fewer samples than replicas, a DistributedSampler.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        replica: int,
        replicas: int,
        seed: int,
        group: dist.ProcessGroup | None = None,
        data_group: dist.ProcessGroup | None = None,
        signals: WorkerSignals | None = None,
    ) -> None:
        _check(loader, replica, replicas)
        self._plain = loader
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        self.device: torch.device | str = "cpu"
        self.cut: Callable[[Any], Any] | None = None
        self.position = Position()
        digest = getattr(loader.dataset, "digest", None)
        self.position.data = digest if isinstance(digest, str) else ""
        mine = partial(_share_of, replica=replica, replicas=replicas)
        signals = signals or WorkerSignals()
        source: _Source
        if not isinstance(loader.dataset, IterableDataset):
            source = _Sampled(loader, mine, seed, signals)
        elif (lanes := lanes_of(loader.dataset, loader.batch_size)) == 1:
            source = _Streamed(loader, mine, seed, signals)
        else:
            self.position.lanes = lanes
            source = _Sharded(loader, lanes, replica, replicas, seed, data_group, signals=signals)
        if group is not None and dist.get_world_size(group) > 1:
            source = _Received(source, Reader(group, pinned=loader.pin_memory))
        self._source: _Source | None = source
        self._batches: Iterator[_Batch] | None = None

    def __len__(self) -> int:
        """Global batches in an epoch."""
        if self.position.lanes > 1:
            raise TypeError(
                f"a stream in {self.position.lanes} lanes has no length, as an epoch ends with the first lane that "
                "ends; count the batches that come"
            )
        return len(self._plain)

    def __iter__(self) -> Iterator[Any]:
        """This rank's batches, from the position to the end of the epoch."""
        item = self._take() or self._take()  # if the last batch of an epoch has been taken, the next one begins
        epoch = self.epoch
        while item is not None:
            samples = item.samples if self.cut is None else self.cut(item.samples)
            yield placed(samples, self.device, non_blocking=self._plain.pin_memory)
            item = self._take() if self.epoch == epoch else None

    @property
    def epoch(self) -> int:
        """The epoch, from 0 on, of the batch that comes next."""
        return self.position.epoch

    @property
    def samples(self) -> int:
        """Samples that all ranks together have consumed since training began."""
        return self.position.samples

    def state_dict(self) -> dict[str, Any]:
        """The position. It holds under another number of replicas and workers."""
        return self.position.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes to a position.

        Raises:
            ValueError: There is no such position between two global batches, or it was saved of other data.
        """
        position = Position()
        position.load_state_dict(state)
        if position.lanes != self.position.lanes:
            raise ValueError(
                f"the position was saved of a stream in {position.lanes} lanes, and this one has "
                f"{self.position.lanes}; bring back the batch_size and the number of shards that it was saved with"
            )
        if position.data and self.position.data and position.data != self.position.data:
            raise ValueError(
                f"the {type(self.dataset).__name__} has other rows than those that the position was saved of; bring "
                "back the files, the tokenizer and the options of the rows, or begin a new run with the weights alone"
            )
        position.epoch, self._batches = self._opened().seek(position)
        self.position.load_state_dict({**state, "epoch": position.epoch})

    def close(self) -> None:
        """Ends the workers; a second call does nothing. There are no batches any more, but a position and a length."""
        self._source = self._batches = None

    def _opened(self) -> "_Source":
        if self._source is None:
            raise RuntimeError(
                "this data loader is closed, as is the Strategy that made it; give initialize() another one"
            )
        return self._source

    def _take(self) -> "_Batch | None":
        """The next batch; between two epochs, None once."""
        source = self._opened()
        if self._batches is None:
            self._batches = source.open(self.epoch)
        item = next(self._batches, None)
        if item is None:
            self.position.next_epoch()
            self._batches = None
        else:
            self.position.samples += item.size
        return item


class Position:
    """Where a loader stands, which stays when nobody uses the loader any more.

    Attributes:
        samples: The number of samples that all ranks together have consumed.
        epoch: The epoch of what comes next.
        begin: The number of samples of all epochs before.
        lanes: The number of lanes in which a stream is read; 1 if it is none, or is read whole.
        data: The dataset's `digest`, which is another one for other data; empty if it has none.
    """

    samples, epoch, begin, lanes, data = 0, 0, 0, 1, ""

    def next_epoch(self) -> None:
        """Goes to the next epoch."""
        self.epoch, self.begin = self.epoch + 1, self.samples

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps. Where a lane ends is not known beforehand, so there the epoch is in it."""
        state: dict[str, Any] = {"samples": self.samples, **({"data": self.data} if self.data else {})}
        return state if self.lanes == 1 else {**state, "epoch": self.epoch, "begin": self.begin, "lanes": self.lanes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave.

        Raises:
            ValueError: It is no number of samples.
        """
        samples = state["samples"]
        if not isinstance(samples, int) or samples < 0:
            raise ValueError(f"the position is {samples!r} samples; it must be a whole number of at least 0")
        self.samples, self.epoch = samples, state.get("epoch", self.epoch)
        self.begin, self.lanes = state.get("begin", 0), state.get("lanes", 1)
        self.data = state.get("data", self.data)


class _Batch(NamedTuple):
    """A share of a global batch: how many samples the whole has, and what this rank has of it."""

    size: int
    samples: Any


class _Indices(NamedTuple):
    """A share of a global batch that is yet to be loaded."""

    size: int
    mine: list[Any]
    key: tuple[int, ...]  # of its random numbers


_Counted = TypeVar("_Counted", _Batch, _Indices)

_Collate = Callable[[list[Any]], Any]

_ShareOf = Callable[[Sequence[Any]], tuple[int, list[Any]]]
"""From a global batch to the place of this rank's first sample in it, and its samples."""


class _Source(Protocol):
    """Where batches come from."""

    def open(self, epoch: int) -> Iterator[_Batch]:
        """The batches of an epoch."""

    def seek(self, position: Position) -> tuple[int, Iterator[_Batch]]:
        """The epoch of a position and its batches from there on."""


_INNER = {"sampler", "batch_sampler"}
"""Where samplers keep the one that they draw from."""


class _Sampled:
    """A map-style dataset: global batches are indices, and each rank loads what its share of them means."""

    def __init__(self, loader: DataLoader[Any], share_of: _ShareOf, seed: int, signals: WorkerSignals) -> None:
        self._seed = seed
        self._order = _Order(loader.batch_sampler, share_of, seed)
        self._generator = torch.Generator()  # of the workers' seeds
        self._loader = _rebuilt(
            loader,
            signals,
            dataset=_Seeded(loader.dataset),
            collate_fn=partial(_collate_loaded, loader.collate_fn),
            worker_init_fn=partial(_start_worker, loader.worker_init_fn),
            generator=self._generator,
            batch_sampler=self._order,
        )

    def open(self, epoch: int) -> Iterator[_Batch]:
        """The batches of an epoch."""
        self._order.left = self._order.shares(epoch)
        return self._load(epoch)

    def seek(self, position: Position) -> tuple[int, Iterator[_Batch]]:
        """The epoch of a position and its batches from there on; only indices are read up to there."""
        epoch, self._order.left = self._order.seek(position.samples)
        return epoch, self._load(epoch)

    def _load(self, epoch: int) -> Iterator[_Batch]:
        self._generator.manual_seed(seed_number(self._seed, epoch))
        return aside(self._loader, (self._seed, epoch))


class _Order:
    """The batch sampler of the loader that a rank uses: one object, for persistent workers want one for all epochs.

    It does not know the loader: workers end at once when the last that knows it lets go.
    """

    def __init__(self, batch_sampler: Any, share_of: _ShareOf, seed: int) -> None:
        self._batch_sampler, self._share_of, self._seed = batch_sampler, share_of, seed
        self.left: Iterator[_Indices] = iter(())

    def __iter__(self) -> Iterator[_Indices]:
        return self.left

    def shares(self, epoch: int) -> Iterator[_Indices]:
        """This rank's shares of the batches of an epoch."""
        sampler = _prepared(self._batch_sampler, epoch, torch.Generator().manual_seed(seed_number(self._seed, epoch)))
        place = 0
        for batch in aside(sampler, (self._seed, epoch)):
            first, mine = self._share_of(batch)
            yield _Indices(size=len(batch), mine=mine, key=(self._seed, epoch, place + first))
            place += len(batch)

    def seek(self, samples: int) -> tuple[int, Iterator[_Indices]]:
        """The epoch of a position and its shares from there on."""
        size = _epoch_size(self._batch_sampler)
        epoch, samples = divmod(samples, size) if size else (0, samples)
        return _seek(self.shares, epoch, samples)


class _Streamed:
    """An iterable dataset: each rank reads whole global batches and keeps its share of the samples."""

    def __init__(self, loader: DataLoader[Any], share_of: _ShareOf, seed: int, signals: WorkerSignals) -> None:
        self._seed = seed
        self._generator = torch.Generator()
        self._loader = _rebuilt(
            loader,
            signals,
            dataset=loader.dataset,
            collate_fn=partial(_collate_share, loader.collate_fn, share_of),
            worker_init_fn=loader.worker_init_fn,
            generator=self._generator,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
        )

    def open(self, epoch: int) -> Iterator[_Batch]:
        """The batches of an epoch."""
        set_epoch(self._loader.dataset, epoch)
        self._generator.manual_seed(seed_number(self._seed, epoch))  # alike on all ranks, which read the same
        return aside(self._loader, (self._seed, epoch))

    def seek(self, position: Position) -> tuple[int, Iterator[_Batch]]:
        """The epoch of a position and its batches from there on; samples are read up to there."""
        return _seek(self.open, 0, position.samples)


class _Sharded:
    """An iterable dataset in lanes: each rank reads those of its own samples."""

    def __init__(
        self,
        loader: DataLoader[Any],
        lanes: int,
        replica: int,
        replicas: int,
        seed: int,
        group: dist.ProcessGroup | None,
        *,
        signals: WorkerSignals,
    ) -> None:
        size = loader.batch_size or 0
        places = share(np.arange(size), replica, replicas)
        self._data = Lanes(
            loader.dataset,
            batch_size=size,
            lanes=lanes,
            first=int(places[0]),
            last=int(places[-1]) + 1,
            all_lanes=group is None,
            seed=seed,
        )
        self._seed, self._group, self._size = seed, group, size
        self._generator = torch.Generator()
        self._loader = _rebuilt(
            loader,
            signals,
            dataset=self._data,
            collate_fn=partial(_collate_part, loader.collate_fn, size),
            worker_init_fn=partial(_start_worker, loader.worker_init_fn),
            generator=self._generator,
            batch_size=None,
        )

    def open(self, epoch: int) -> Iterator[_Batch]:
        """The batches of an epoch."""
        return self._open(epoch, 0)

    def seek(self, position: Position) -> tuple[int, Iterator[_Batch]]:
        """The epoch of a position and its batches from there on; lanes skip, or are read up to there."""
        batches, inside = divmod(position.samples - position.begin, self._size)
        if inside:
            raise _lies_inside(inside, self._size)
        return position.epoch, self._open(position.epoch, batches)

    def _open(self, epoch: int, batches: int) -> Iterator[_Batch]:
        self._data.begin_at(epoch, batches)
        self._generator.manual_seed(seed_number(self._seed, epoch))
        found = aside(self._loader, (self._seed, epoch))
        group = self._group
        if group is None:
            return itertools.takewhile(lambda batch: batch is not None, found)
        return iter(lambda: _next_of_all(found, group), None)


def _next_of_all(batches: Iterator[_Batch | None], group: dist.ProcessGroup) -> _Batch | None:
    """This rank's next batch; None if a rank of the group has no more. One that cannot read raises on all."""
    problem, batch = None, None
    try:
        batch = next(batches, None)
    except Exception as error:  # of any kind: the others wait for this rank
        problem = error
    state = torch.tensor([0 if problem is not None else 1 if batch is None else 2], device=wire_of(group))
    dist.all_reduce(state, op=dist.ReduceOp.MIN, group=group)
    if not state.item():
        agree(problem, None, group)
    return batch if state.item() == 2 else None


class _Received:
    """What one rank of a group takes from a source of its own, on all of them."""

    def __init__(self, source: _Source, reader: Reader) -> None:
        self._source, self._reader = source, reader

    def open(self, epoch: int) -> Iterator[_Batch]:
        """The batches of an epoch."""
        return self._received(partial(self._source.open, epoch))

    def seek(self, position: Position) -> tuple[int, Iterator[_Batch]]:
        """The epoch of a position and its batches from there on; collective over the group."""
        batches: Iterator[_Batch] = iter(())

        def sought() -> int:
            nonlocal batches
            epoch, batches = self._source.seek(position)
            return epoch

        epoch = self._reader.read(sought)
        return epoch, self._received(lambda: batches)

    def _received(self, opened: Callable[[], Iterator[_Batch]]) -> Iterator[_Batch]:
        batches: Iterator[_Batch] | None = None

        def following() -> _Batch | None:
            nonlocal batches
            batches = opened() if batches is None else batches
            return next(batches, None)

        return iter(partial(self._reader.read, following), None)


class _Seeded(Dataset[Any]):
    """Loads the samples of a share, with random numbers of its key."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, share: _Indices) -> _Batch:
        seed_generators(share.key)
        load_all = getattr(self.dataset, "__getitems__", None)
        samples = load_all(share.mine) if load_all else [self.dataset[index] for index in share.mine]
        return _Batch(share.size, samples)


def _collate_loaded(collate: _Collate, loaded: _Batch) -> _Batch:
    return _Batch(loaded.size, collate(loaded.samples))


def _collate_share(collate: _Collate, share_of: _ShareOf, samples: list[Any]) -> _Batch:
    return _Batch(len(samples), collate(share_of(samples)[1]))


def _collate_part(collate: _Collate, size: int, part: Part | None) -> _Batch | None:
    if part is None:
        return None
    seed_generators(part.key)
    return _Batch(size, collate(part.samples))


def _start_worker(user: Callable[[int], None] | None, worker: int) -> None:
    info: Any = get_worker_info()
    object.__setattr__(info, "dataset", info.dataset.dataset)  # the user's own, which `user` may open files in
    if user is not None:
        user(worker)


class _Loader(DataLoader[Any]):
    """A DataLoader whose workers outlive the signals that this process catches."""

    def __init__(self, signals: WorkerSignals, **keywords: Any) -> None:
        super().__init__(**keywords)
        self._signals = signals

    def __iter__(self) -> Any:
        with self._signals.starting(self):
            return super().__iter__()


def _rebuilt(loader: DataLoader[Any], signals: WorkerSignals, **changed: Any) -> DataLoader[Any]:
    """A loader that loads in the same way, but always in order."""
    return _Loader(
        signals,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        multiprocessing_context=loader.multiprocessing_context,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
        **changed,
    )


def _share_of(batch: Sequence[Any], *, replica: int, replicas: int) -> tuple[int, list[Any]]:
    """The place of a rank's first sample in a global batch, and its samples."""
    if len(batch) < replicas:
        raise _too_few(len(batch), replicas)
    places = share(np.arange(len(batch)), replica, replicas)
    first, last = int(places[0]), int(places[-1])
    return first, list(batch[first : last + 1])


def _seek(batches_of: Callable[[int], Iterator[_Counted]], epoch: int, samples: int) -> tuple[int, Iterator[_Counted]]:
    """The epoch, and the batches of it, that come after some samples from the beginning of an epoch on."""
    while True:
        batches, before = batches_of(epoch), samples
        for batch in batches:
            if samples == 0:
                return epoch, itertools.chain([batch], batches)
            if batch.size > samples:
                raise _lies_inside(samples, batch.size)
            samples -= batch.size
        if samples == before:
            raise ValueError(f"the position is {samples} samples on, but epoch {epoch} has no batch; give it samples")
        epoch += 1


def _lies_inside(samples: int, size: int) -> ValueError:
    return ValueError(
        f"the position lies {samples} samples inside a global batch of {size}; it must lie between two: use the "
        "batch_size and drop_last that it was saved with"
    )


def _epoch_size(batch_sampler: Any) -> int | None:
    """The samples in each epoch, if they need no counting."""
    if type(batch_sampler) is not BatchSampler or not isinstance(batch_sampler.sampler, Sized):
        return None
    count = len(batch_sampler.sampler)
    return count - count % batch_sampler.batch_size if batch_sampler.drop_last else count


def _prepared(sampler: Any, epoch: int, generator: torch.Generator) -> Any:
    """A sampler, and those inside, ready for an epoch; the user's own stay as they are.

    Generators that it holds, under any name, begin anew: a run that resumes in this epoch has not drawn the others.
    """
    if not hasattr(sampler, "__dict__"):
        return sampler  # a list of indices
    sampler = copy(sampler)
    for name, value in vars(sampler).items():
        if name in _INNER or isinstance(value, Sampler):
            setattr(sampler, name, _prepared(value, epoch, generator))
        elif isinstance(value, list | tuple) and any(isinstance(each, Sampler) for each in value):
            setattr(sampler, name, [_prepared(each, epoch, generator) for each in value])
        elif (made := _generator_like(value, generator.initial_seed())) is not None:
            setattr(sampler, name, made)
    if hasattr(sampler, "generator"):
        sampler.generator = generator
    if hasattr(sampler, "set_epoch"):
        set_epoch(sampler, epoch)
    elif isinstance(getattr(sampler, "epoch", None), int):  # one that counts by itself
        sampler.epoch = epoch
    return sampler


def _generator_like(value: Any, seed: int) -> Any:
    """A generator of the kind of another one, with a seed; None: it is none, or none that has a seed."""
    if isinstance(value, torch.Generator):
        return torch.Generator(value.device).manual_seed(seed)
    if isinstance(value, np.random.Generator):
        return np.random.Generator(type(value.bit_generator)(seed))
    if isinstance(value, np.random.RandomState):
        return np.random.RandomState(seed % 2**32)
    return random.Random(seed) if type(value) is random.Random else None


def _check(loader: Any, replica: int, replicas: int) -> None:
    if not isinstance(loader, DataLoader):
        raise TypeError(f"the dataloader is a {type(loader).__name__}; give a torch.utils.data.DataLoader")
    if not 0 <= replica < replicas:
        raise ValueError(f"replica is {replica} of {replicas}; it must be at least 0 and less than replicas")
    if loader.batch_sampler is None:
        raise ValueError("the dataloader has batch_size=None; let it batch single samples, so that they can be shared")
    if any(isinstance(each, DistributedSampler) for each in _samplers(loader.batch_sampler)):
        raise ValueError(
            "the dataloader has a DistributedSampler, but its batches are global and shared out here; leave it out, "
            "shuffle=True instead"
        )
    size = loader.batch_size
    if size is not None and size % replicas:
        near = max(1, round(size / replicas)) * replicas
        raise ValueError(
            f"batch_size {size} does not divide by {replicas} replicas; it is the batch of all replicas together: "
            f"use {near}, or another number of replicas"
        )
    lanes = lanes_of(loader.dataset, size) if isinstance(loader.dataset, IterableDataset) else 1
    if lanes > 1 and loader.num_workers > 1:
        raise ValueError(
            f"num_workers is {loader.num_workers}, and a stream of {lanes} lanes is read by one worker of each data "
            "rank at most; use num_workers=1"
        )
    rest = (_epoch_size(loader.batch_sampler) or 0) % (size or 1)
    if 0 < rest < replicas:
        raise _too_few(rest, replicas)


def check_last_batch(loader: DataLoader[Any], least: int) -> None:
    """Checks that the last batch of an epoch has rows for all microbatches, as far as that is known beforehand.

    Else it would be refused when an epoch ends, after hours.

    Args:
        loader: The loader, whose other batches have at least as many rows.
        least: The number of rows that a batch needs.

    Raises:
        ValueError: It has fewer.
    """
    size = loader.batch_size
    rest = (_epoch_size(loader.batch_sampler) or 0) % (size or 1)
    if size is not None and 0 < rest < least <= size:
        raise ValueError(
            f"batch_size={size}: the last batch of an epoch has {rest} rows, and the microbatches of all replicas "
            f"need {least}; set drop_last=True, use another batch_size, or set fewer microbatches"
        )


def _samplers(sampler: Any) -> Iterator[Any]:
    """A sampler and those inside."""
    yield sampler
    for name in _INNER & getattr(sampler, "__dict__", {}).keys():
        yield from _samplers(getattr(sampler, name))


def _too_few(size: int, replicas: int) -> ValueError:
    return ValueError(
        f"a global batch has {size} samples, fewer than the {replicas} replicas that share it; leave the last one out "
        f"with drop_last=True, or use another batch_size"
    )
