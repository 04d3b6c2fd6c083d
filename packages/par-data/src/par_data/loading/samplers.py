"""Samplers of torch and of users: a copy for one epoch, with random generators that depend only on seed and epoch."""

import random
from collections.abc import Iterator, Sized
from copy import copy
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, Sampler

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
