"""The random numbers of a run: a function of seed, step and replica, so that a resumed run draws the same ones."""

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist

from par_groups import Axes, ProcessGroups, agree

from .randomness import RandomStream, get_random_states
from .samplers import check_order, hash_order


class StepRandomness:
    """The seeds of torch's generators: one for each step, replica and pipeline stage.

    Args:
        seed: The seed of the run.
        groups: The groups of ranks along each axis.
        data_axes: The axes whose ranks read different samples.
        device: The device of this rank, whose generator is seeded as well as the CPU's.
    """

    def __init__(self, seed: int, groups: ProcessGroups, data_axes: Axes, device: torch.device) -> None:
        self._seed, self._device = seed, device
        # Tensor ranks of a stage have one seed: what they drop must be identical. Replicas and stages have their own.
        self._rank_seed = groups.rank_seed((*groups.topology.leaves(data_axes), "pipeline"), seed)
        self._replica = groups.rank(data_axes)
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
        # `loader_states` returns the program's own state, which the seed below overwrites.
        if self.is_seeded_by_program:
            self._program_state = torch.get_rng_state()
        self._last_seed = seed
        self._seed_generators(seed)

    def _seed_generators(self, seed: int) -> None:
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
        check_order({rank: digest for rank, (_, digest) in found.items()}, sampler)
        draws = RandomStream(states=found[0][0])
        draws.skip(self._loaders)
        self._loaders += 1
        return draws.states
