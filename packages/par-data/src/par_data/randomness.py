"""Random numbers of one's own, beside those of the program: torch's on the CPU, `random` and numpy's."""

import hashlib
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator

_T = TypeVar("_T")


class Draws:
    """Random numbers of their own: while they are entered, the program's generators continue a state of theirs.

    Args:
        key: What they are a function of.
        states: A state to continue instead, as `random_states` returns it.

    Attributes:
        is_entered: Whether the program's generators continue them now.
    """

    def __init__(self, key: tuple[int, ...] = (), *, states: Any = None) -> None:
        self._key, self._own = key, states
        self._outer: Any = None
        self.is_entered = False

    def enter(self) -> None:
        """Exchanges the state of the program's generators for these draws'."""
        self._outer, self.is_entered = random_states(), True
        if self._own is not None:
            _set_random_states(self._own)
            return
        set_bit_generator(np.random.MT19937())  # numpy's state takes long to copy; its holder is swapped
        seed_generators(self._key)

    def leave(self) -> None:
        """Puts the program's own state back; does nothing outside of these draws."""
        if self.is_entered:
            self._own, self.is_entered = random_states(), False
            _set_random_states(self._outer)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """A context inside of which the program's generators continue these draws."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def skip(self, count: int) -> None:
        """Draws some numbers from each generator, so that what follows is another sequence."""
        with self.entered():
            for _ in range(count):
                torch.empty((), dtype=torch.int64).random_()
                random.random()
                np.random.random()

    @property
    def states(self) -> Any:
        """The state that they continue, as `random_states` returns it; None: none was entered."""
        return self._own

    def iterate(self, items: Iterable[_T]) -> Iterator[_T]:
        """Iterates with these draws; what comes between two items draws the program's own."""
        iterator = None
        while True:
            with self.entered():
                iterator = iter(items) if iterator is None else iterator
                item = next(iterator, _END)
            if item is _END:
                return
            yield item  # type: ignore[misc]  # an item of `items`


_END = object()


def aside(items: Iterable[_T], key: tuple[int, ...]) -> Iterator[_T]:
    """Iterates with random numbers of its own, a function of the key; the program's go on as if nothing had been."""
    return Draws(key).iterate(items)


def random_states() -> tuple[torch.Tensor, Any, Any]:
    """The state of torch's generator on the CPU, that of `random`, and the holder of numpy's."""
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
