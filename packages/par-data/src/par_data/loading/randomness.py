"""Random streams that are separate from the program's: torch's generator on the CPU, `random` and NumPy's."""

import hashlib
import json
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from par_groups import agree

_T = TypeVar("_T")


class RandomStream:
    """A separate state of all random generators, from which they draw between `enter` and `leave`.

    Args:
        key: Seed of the stream; equal keys give equal numbers.
        states: Result of `get_random_states` from which the stream continues, instead of a key.

    Attributes:
        is_entered: Whether the program's generators draw from this stream now.
    """

    def __init__(self, key: tuple[int, ...] = (), *, states: Any = None) -> None:
        self._key, self._own = key, states
        self._outer: Any = None
        self.is_entered = False

    def enter(self) -> None:
        """Exchange the state of the program's generators for the state of this stream."""
        self._outer, self.is_entered = get_random_states(), True
        if self._own is not None:
            _set_random_states(self._own)
            return
        # Copying NumPy's state takes long, so the object that holds the state is exchanged instead.
        set_bit_generator(np.random.MT19937())
        seed_generators(self._key)

    def leave(self) -> None:
        """Restore the program's own state; do nothing if this stream is not entered."""
        if self.is_entered:
            self._own, self.is_entered = get_random_states(), False
            _set_random_states(self._outer)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Enter this stream for the body of a `with` statement."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def skip(self, count: int) -> None:
        """Draw and discard some numbers from each generator, so that a different sequence follows."""
        with self.entered():
            for _ in range(count):
                torch.empty((), dtype=torch.int64).random_()
                random.random()
                np.random.random()

    @property
    def states(self) -> Any:
        """The current state of this stream, as `get_random_states` returns it; None before the first `enter`."""
        return self._own

    def iterate(self, items: Iterable[_T]) -> Iterator[_T]:
        """Iterate with this stream; code between two items draws from the program's own state."""
        iterator = None
        while True:
            with self.entered():
                iterator = iter(items) if iterator is None else iterator
                item = next(iterator, _END)
            if item is _END:
                return
            yield item  # type: ignore[misc]  # an item of `items`


_END = object()


def iterate_seeded(items: Iterable[_T], key: tuple[int, ...]) -> Iterator[_T]:
    """Iterate with a new random stream; the program's generators continue as if nothing had been drawn."""
    return RandomStream(key).iterate(items)


def get_random_states() -> tuple[torch.Tensor, Any, Any]:
    """Return the state of torch's CPU generator, the state of `random`, and the object that holds NumPy's state."""
    return torch.get_rng_state(), random.getstate(), get_bit_generator()


def _set_random_states(states: tuple[torch.Tensor, Any, Any]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    set_bit_generator(states[2])


def seed_generators(key: tuple[int, ...]) -> None:
    """Seed the generators of this process on the CPU."""
    number = derive_seed(*key)
    # torch.manual_seed would also reseed the generators of GPUs, which the program uses for dropout.
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)


def derive_seed(*key: int | str) -> int:
    """Hash a key to a seed of 63 bits, so that similar keys give unrelated seeds."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest()) >> 1


def gather_random_states(replica: int) -> dict[str, Any]:
    """Return the states of the generators of `random` and numpy on all ranks, for a checkpoint. Collective.

    The states of torch's generators are not included: seed these for each step, since dropout must not depend on the
    number of ranks.

    Args:
        replica: The index of this rank's replica.

    Returns:
        "states": the distinct states, as compressed JSON; "ranks": the index of each rank's state; "replicas": the
        replica of each rank.
    """
    both = random.getstate(), np.random.get_state(legacy=False)
    packed = zlib.compress(json.dumps(both, default=np.ndarray.tolist).encode())
    said = agree(None, (packed, replica), None).values()
    numbers: dict[bytes, int] = {}
    ranks = [numbers.setdefault(packed, len(numbers)) for packed, _ in said]
    states = [torch.frombuffer(bytearray(packed), dtype=torch.uint8) for packed in numbers]
    return {"states": states, "ranks": ranks, "replicas": [replica for _, replica in said]}


def restore_random_states(saved: Mapping[str, Any], replica: int) -> None:
    """Restore the generators of `random` and numpy from what `gather_random_states` returned.

    A rank restores its own state. If it belongs to another replica now, it restores the state of that replica's first
    rank at the time: the ranks of a replica must draw identical numbers, and do so under every topology.

    Args:
        saved: The value that `gather_random_states` returned.
        replica: The index of this rank's replica now.

    Raises:
        ValueError: numpy's bit generator is of another kind than the saved one.
    """
    ranks, replicas, rank = saved["ranks"], saved["replicas"], dist.get_rank()
    # With more replicas than before, the further ones begin again with the first replica's state.
    if rank >= len(ranks) or replicas[rank] != replica:
        rank = replicas.index(replica % (max(replicas) + 1))
    packed = saved["states"][ranks[rank]].numpy().tobytes()
    (version, words, gauss), state = json.loads(zlib.decompress(packed))
    kind = np.random.get_state(legacy=False)["bit_generator"]
    if kind != state["bit_generator"]:
        raise ValueError(
            f"numpy's bit generator is {kind}, and the checkpoint holds a state of {state['bit_generator']}; call "
            "numpy.random.set_bit_generator before you resume"
        )
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(state)
