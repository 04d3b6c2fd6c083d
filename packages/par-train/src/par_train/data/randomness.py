"""Random numbers of one's own, beside those of the program: torch's on the CPU, `random` and numpy's."""

import hashlib
import json
import random
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.random.mtrand import get_bit_generator, set_bit_generator

from par_groups import agree

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


def gather_states(replica: int) -> dict[str, Any]:
    """Where the program's generators of `random` and numpy are, on all ranks, for a checkpoint. Collective.

    torch's are not among them: `Strategy` sets these after each step.

    Args:
        replica: The replica that this rank belongs to.

    Returns:
        "states": the different states, as compressed JSON; "ranks": which of them each rank has; "replicas": the
        replica of each rank.
    """
    both = random.getstate(), np.random.get_state(legacy=False)
    packed = zlib.compress(json.dumps(both, default=np.ndarray.tolist).encode())
    said = agree(None, (packed, replica), None).values()
    numbers: dict[bytes, int] = {}
    ranks = [numbers.setdefault(packed, len(numbers)) for packed, _ in said]
    states = [torch.frombuffer(bytearray(packed), dtype=torch.uint8) for packed in numbers]
    return {"states": states, "ranks": ranks, "replicas": [replica for _, replica in said]}


def restore_states(saved: Mapping[str, Any], replica: int) -> None:
    """Sets the program's generators of `random` and numpy to where they were when `gather_states` was called.

    A rank gets its own state back. If it belongs to another replica now, it gets that of the first rank which belonged
    to that replica: ranks of one replica, which must draw alike, do so under every topology.

    Args:
        saved: What `gather_states` returned.
        replica: The replica that this rank belongs to now.

    Raises:
        ValueError: numpy's generator is of another kind than the saved one.
    """
    ranks, replicas, rank = saved["ranks"], saved["replicas"], dist.get_rank()
    if rank >= len(ranks) or replicas[rank] != replica:
        rank = replicas.index(replica % (max(replicas) + 1))
    packed = saved["states"][ranks[rank]].numpy().tobytes()
    (version, words, gauss), state = json.loads(zlib.decompress(packed))
    kind = np.random.get_state(legacy=False)["bit_generator"]
    if kind != state["bit_generator"]:
        raise ValueError(
            f"numpy's bit generator is {kind}, and the checkpoint has the state of {state['bit_generator']}; use "
            "numpy.random.set_bit_generator before you resume"
        )
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(state)
