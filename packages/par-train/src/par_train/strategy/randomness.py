"""The random numbers of a run: a function of seed, step and replica, so that a resumed run draws the same ones."""

import json
import random
import zlib
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from par_data import RandomStream, get_random_states, hash_order
from par_groups import ProcessGroups, agree

from .axes import data_axes


class StepRandomness:
    """The seeds of torch's generators: one for each step, replica and pipeline stage.

    Args:
        seed: The seed of the strategy.
        groups: The groups of ranks along each axis.
        device: The device of this rank, whose generator is seeded as well as the CPU's.
    """

    def __init__(self, seed: int, groups: ProcessGroups, device: torch.device) -> None:
        axes = data_axes(groups.topology)
        self._seed, self._device = seed, device
        # Tensor ranks of a stage have one seed: what they drop must be identical. Replicas and stages have their own.
        self._rank_seed = groups.rank_seed((*groups.topology.leaves(axes), "pipeline"), seed)
        self._replica = groups.rank(axes)
        self._step = 0
        self._last_seed: int | None = None  # the seed that this object has given torch's generator
        self._program_state = get_random_states()[0]  # torch's generator as the program left it
        self._loaders = 0  # data loaders of other trainers that were given a state
        self._batch_draws, self._drawn_step = RandomStream(), -1

    @property
    def step(self) -> int:
        """The number of optimizer steps; setting it seeds torch's generators for the next step."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        seed = (self._rank_seed + 0x9E3779B97F4A7C15 * step) % 2**63
        if self.is_seeded_by_program:
            self._program_state = torch.get_rng_state()
        self._last_seed = seed
        # Not torch.manual_seed, which also visits the generators of all device types that torch knows.
        torch.default_generator.manual_seed(seed)
        if self._device.type != "cpu":
            torch.get_device_module(self._device).manual_seed(seed)

    @property
    def is_seeded_by_program(self) -> bool:
        """Whether the program has seeded torch's generator since this object did."""
        return torch.initial_seed() != self._last_seed

    def draws_of_batches(self) -> RandomStream:
        """Return the random stream for reading the batches of this step, identical on all stages of a replica."""
        if self._drawn_step != self._step:
            self._batch_draws = RandomStream((self._seed, self._step, self._replica))
            self._drawn_step = self._step
        return self._batch_draws

    def loader_states(self, sampler: Any = None, *, leave_out: Collection[str] = ()) -> Any:
        """Return generator states for a data loader of another trainer, identical on all ranks. Collective.

        They are the states of rank 0's program, which may have seeded its generators; torch's is the state before this
        object seeded it. Each call returns other states.

        Args:
            sampler: A sampler that must draw one order on all ranks; None if there is none.
            leave_out: Names of the sampler's attributes that its trainer makes identical.

        Raises:
            ValueError: The sampler's generators or indices differ between ranks; on every rank.
        """
        torchs, *others = get_random_states()
        states = (torchs if self.is_seeded_by_program else self._program_state, *others)
        order = "" if sampler is None else hash_order(sampler, leave_out=leave_out)
        found = agree(None, (states if dist.get_rank() == 0 else None, order), None)
        differing = [rank for rank, (_, other) in found.items() if other != found[0][1]]
        if differing:
            name = type(getattr(sampler, "sampler", sampler)).__name__
            raise ValueError(
                f"sampler={name}: ranks {differing} would draw another order than rank 0, because its generators or "
                "indices differ; set them to one seed on all ranks, or pass shuffle=True instead"
            )
        draws = RandomStream(states=found[0][0])
        draws.skip(self._loaders)
        self._loaders += 1
        return draws.states


def gather_states(replica: int) -> dict[str, Any]:
    """Return the states of the generators of `random` and numpy on all ranks, for a checkpoint. Collective.

    The states of torch's generators are not included, because `StepRandomness` seeds these generators after each step.

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


def restore_states(saved: Mapping[str, Any], replica: int) -> None:
    """Restore the generators of `random` and numpy from what `gather_states` returned.

    A rank restores its own state. If it belongs to another replica now, it restores the state of that replica's first
    rank at the time: the ranks of a replica must draw identical numbers, and do so under every topology.

    Args:
        saved: The value that `gather_states` returned.
        replica: The index of this rank's replica now.

    Raises:
        ValueError: numpy's bit generator is of another kind than the saved one.
    """
    ranks, replicas, rank = saved["ranks"], saved["replicas"], dist.get_rank()
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
