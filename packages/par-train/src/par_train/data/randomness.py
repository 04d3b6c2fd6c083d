"""Random numbers of one's own, beside those of the program: torch's on the CPU, `random` and numpy's."""

import hashlib
import random
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

_T = TypeVar("_T")


def aside(items: Iterable[_T], key: tuple[int, ...]) -> Iterator[_T]:
    """Iterates with random numbers of its own, a function of the key; the program's go on as if nothing had been."""
    iterator, own = None, None
    while True:
        outer = _random_states()
        if own is None:
            set_bit_generator(np.random.MT19937())  # numpy's state takes long to copy; its holder is swapped
            seed_generators(key)
        else:
            _set_random_states(own)
        try:
            iterator = iter(items) if iterator is None else iterator
            item = next(iterator)
        except StopIteration:
            return
        finally:
            own = _random_states()
            _set_random_states(outer)
        yield item


def _random_states() -> tuple[torch.Tensor, Any, Any]:
    return torch.get_rng_state(), random.getstate(), get_bit_generator()


def _set_random_states(states: tuple[torch.Tensor, Any, Any]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    set_bit_generator(states[2])


def seed_generators(key: tuple[int, ...]) -> None:
    """Seeds this process's generators on the CPU; `torch.manual_seed` would touch those of GPUs, too."""
    number = seed_number(*key)
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)


def seed_number(*key: int | str) -> int:
    """A seed of 63 bits; keys that are near each other give numbers that are not."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest()) >> 1
