"""Samplers of torch and of users: a copy for one epoch, with random generators that depend only on seed and epoch."""

import hashlib
import random
from collections.abc import Collection, Iterator, Mapping, Sized
from copy import copy
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, ConcatDataset, Dataset, Sampler, Subset

_INNER = {"sampler", "batch_sampler"}
"""Attributes in which samplers keep the sampler that they draw from."""


def prepare_sampler(sampler: Any, epoch: int, generator: torch.Generator) -> Any:
    """Return a copy of a sampler, and of its inner samplers, for one epoch; the user's objects do not change.

    Args:
        sampler: A sampler or batch sampler, or any iterable of indices.
        epoch: The epoch, passed to `set_epoch` where the sampler has it.
        generator: Replaces the sampler's own generator. Generators under other names are replaced by new ones with
            the same seed.
    """
    if not hasattr(sampler, "__dict__"):
        return sampler  # a list of indices
    sampler = copy(sampler)
    for name, value in vars(sampler).items():
        if name in _INNER or isinstance(value, Sampler):
            setattr(sampler, name, prepare_sampler(value, epoch, generator))
        elif isinstance(value, list | tuple) and any(isinstance(each, Sampler) for each in value):
            setattr(sampler, name, [prepare_sampler(each, epoch, generator) for each in value])
        # A run that resumes in this epoch has not drawn the earlier ones, so every generator restarts from the seed.
        elif (made := _reseeded(value, generator.initial_seed())) is not None:
            setattr(sampler, name, made)
    if hasattr(sampler, "generator"):
        sampler.generator = generator
    if hasattr(sampler, "set_epoch"):
        set_epoch(sampler, epoch)
    elif isinstance(getattr(sampler, "epoch", None), int):  # a sampler that counts its epochs itself
        sampler.epoch = epoch
    return sampler


def _reseeded(value: Any, seed: int) -> Any:
    """Return a new generator of the same kind with a seed; None if the value is not a generator."""
    if isinstance(value, torch.Generator):
        return torch.Generator(value.device).manual_seed(seed)
    if isinstance(value, np.random.Generator):
        return np.random.Generator(type(value.bit_generator)(seed))
    if isinstance(value, np.random.RandomState):
        return np.random.RandomState(seed % 2**32)
    # A subclass, such as random.SystemRandom, may have no seed.
    return random.Random(seed) if type(value) is random.Random else None


def nested_samplers(sampler: Any) -> Iterator[Any]:
    """Iterate over a sampler and the samplers that it draws from."""
    yield sampler
    for name in _INNER & getattr(sampler, "__dict__", {}).keys():
        yield from nested_samplers(getattr(sampler, name))


def epoch_size(batch_sampler: Any) -> int | None:
    """Return the number of samples in each epoch; None if only iterating can tell."""
    if type(batch_sampler) is not BatchSampler or not isinstance(batch_sampler.sampler, Sized):
        return None
    count = len(batch_sampler.sampler)
    return count - count % batch_sampler.batch_size if batch_sampler.drop_last else count


def set_epoch(target: Any, epoch: int) -> None:
    """Call `set_epoch` on a sampler or dataset that has it."""
    if hasattr(target, "set_epoch"):
        target.set_epoch(epoch)


def hash_order(sampler: Any, *, leave_out: Collection[str] = ()) -> str:
    """Return a digest of everything that decides a sampler's order, except the program's generators.

    Args:
        sampler: The sampler of a loader, before a trainer shards it, or the dataset. The digest of a dataset covers its
            length and the indices of a `Subset`.
        leave_out: Names of attributes that may differ between ranks.

    Returns:
        A digest. Ranks with equal digests draw one order, if their generators have one state.
    """
    digest = hashlib.blake2b(digest_size=16)
    _add_order(digest, sampler, leave_out)
    return digest.hexdigest()


def check_order(digests: Mapping[int, str], sampler: Any) -> None:
    """Raise if ranks would read other rows than rank 0. No communication: the caller has gathered the digests.

    Args:
        digests: Results of `hash_order`, by rank, starting with rank 0.
        sampler: The sampler of this rank, which the error names.

    Raises:
        ValueError: The digests differ; on every rank.
    """
    first = next(iter(digests.values()), "")
    differing = [rank for rank, digest in digests.items() if digest != first]
    if differing:
        name = type(getattr(sampler, "sampler", sampler)).__name__
        raise ValueError(
            f"sampler={name}: ranks {differing} would draw another order than rank 0, because its generators or "
            "indices, or those of a Subset, differ; draw them from one seed on all ranks, such as "
            "random_split(..., generator=torch.Generator().manual_seed(0)), or pass shuffle=True instead"
        )


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
            # The rank of a sampler that shards differs between ranks by design.
            if name not in leave_out and "rank" not in name:
                _add_order(digest, inside, leave_out)
    elif isinstance(value, Dataset):
        _add_rows(digest, value)
    elif isinstance(value, list | tuple):
        if value and all(type(each) is int for each in value):
            digest.update(np.asarray(value).data)
            return
        for inside in value:
            if isinstance(inside, Sampler):
                _add_order(digest, inside, leave_out)


def _add_rows(digest: Any, dataset: Any) -> None:
    """Add what decides which rows a dataset has, as far as it is known."""
    if isinstance(dataset, Subset):
        # Each rank that splits a dataset with random numbers of its own has other rows under the same indices.
        _add_order(digest, dataset.indices)
        _add_rows(digest, dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for part in dataset.datasets:
            _add_rows(digest, part)
    elif isinstance(dataset, Sized):
        _add_order(digest, len(dataset))
