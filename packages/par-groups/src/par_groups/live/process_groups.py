"""The live groups of one topology: an object that is passed around, never a module global."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..topology.topology import Axes, Axis, Topology
from .backends import backend_of
from .launch import accelerator_type, as_timedelta

Key = tuple[Axis, ...]
"""Axes in canonical form: equal keys mean equal groups, on every rank."""


@dataclass(frozen=True)
class Channels:
    """Declares private communicators over `axes`, for traffic that must not queue behind collectives."""

    axes: Axes
    count: int


class ProcessGroups:
    """The process groups of a topology, made at once and in one fixed order on every rank.

    There is a group for every axis, every named product, everything the topology declares, and what `declare` adds.
    Equal sets of ranks share one communicator; where the set is the whole world, it is the default group. A group of
    size 1 is made when it is first asked for.

    Args:
        topology: The same on every rank; the ranks compare it before anything else.
        device: Where the collectives run; default: the device the running backend needs.
        backend: Default: that of the running world.
        timeout: Of each group's collectives, in seconds or as a timedelta; default: torch's.
        declare: Further products of axes, such as `("data", "sequence")`, and `Channels(axes, count)`.

    Raises:
        RuntimeError: torch.distributed does not run.
        ValueError: The topology is not of the world's size, an unknown axis, or ranks with different topologies: then
            every rank raises, naming who differs.

    Example:
        with launch() as environment, ProcessGroups(topology) as groups:
            dist.all_reduce(gradient, group=groups["data"])
    """

    def __init__(
        self,
        topology: Topology,
        *,
        device: str | torch.device | None = None,
        backend: str | None = None,
        timeout: timedelta | float | None = None,
        declare: Iterable[Axes | Channels] = (),
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError("torch.distributed does not run; call par_groups.launch() or init_process_group() first")
        self.topology = topology
        self.global_rank = dist.get_rank()
        self.device = torch.device(device) if device is not None else default_device()
        self._backend, self._timeout = backend, as_timedelta(timeout)
        self._groups: dict[Key, dist.ProcessGroup] = {}
        self._channels: dict[Key, tuple[dist.ProcessGroup, ...]] = {}
        self._shared_world = backend is None and timeout is None
        declared = tuple(declare)
        _agree(topology, declared, self.device)
        for axes in (*topology.axes, *topology.products, *topology.declared):
            self._make(axes)
        for view in topology.views.values():
            for name in view.axes:
                self._make(name)
        for each in declared:
            self._declare(each)
        self._meet()

    # What a rank asks

    def __getitem__(self, axes: Axes) -> dist.ProcessGroup:
        """The group of this rank over `axes`; no communication.

        Raises:
            ValueError: An unknown axis, or a product that was not declared.
        """
        key = self.topology.blocks(axes)
        if not key and key not in self._groups:
            self._groups[key] = self._alone()
        if key not in self._groups:
            known = ", ".join(self.topology.axes | dict.fromkeys(self.topology.products))
            raise ValueError(
                f"there is no group over {axes!r}; there is one over each of {known}. Declare a product up front, "
                f"ProcessGroups(..., declare=[{axes!r}]), or make it on all ranks together: groups.add({axes!r})"
            )
        return self._groups[key]

    def size(self, axes: Axes) -> int:
        """The number of ranks in the group over `axes`; needs no live group."""
        return self.topology.size(axes)

    def rank(self, axes: Axes) -> int:
        """This rank's position in its group over `axes`; needs no live group."""
        return self.topology.index(axes, self.global_rank)

    def ranks(self, axes: Axes) -> tuple[int, ...]:
        """The global ranks in this rank's group over `axes`; needs no live group."""
        return self.topology.group(axes, self.global_rank)

    def channels(self, axes: Axes, count: int) -> tuple[dist.ProcessGroup, ...]:
        """The first `count` private communicators over `axes`.

        A batched send that queues ahead of an all-reduce on one rank and behind it on another deadlocks NCCL; on a
        communicator of its own it cannot.

        Raises:
            ValueError: Fewer were declared.
        """
        channels = self._channels.get(self.topology.blocks(axes), ())
        if len(channels) < count:
            raise ValueError(
                f"{len(channels)} channels over {axes!r} were declared, {count} are asked for; declare them up front: "
                f"ProcessGroups(..., declare=[Channels({axes!r}, {count})])"
            )
        return channels[:count]

    def mesh(self, axes: Axes) -> DeviceMesh:
        """A torch DeviceMesh over `axes`, one mesh dim each, made from these very groups.

        FSDP2 over tensor parallelism wants both meshes cut out of one: `mesh(("data", "tensor"))["tensor"]`.

        Args:
            axes: One name, or several; a named product is one mesh dim.
        """
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        in_order = [self.topology.leaves(name)[0] for name in names]
        if in_order != [leaf for leaf in self.topology.leaves(names) if leaf in in_order]:
            raise ValueError(f"mesh({names}): name the axes in the topology's order, slowest first")
        groups = [self[name] for name in names]
        ranks = torch.empty([self.size(name) for name in names], dtype=torch.int64, device="cpu")
        for rank in self.ranks(names):
            ranks[tuple(self.topology.index(name, rank) for name in names)] = rank
        if len(names) == 1:
            return DeviceMesh.from_group(groups[0], self.device.type, mesh_dim_names=names)
        return DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=names)

    @property
    def is_master(self) -> bool:
        """Whether this is global rank 0."""
        return self.global_rank == 0

    def rank_seed(self, axes: Axes, seed: int) -> int:
        """A seed of 63 bits that differs between ranks exactly where they differ along `axes`.

        Args:
            axes: Where randomness should differ, such as "data"; () gives one seed for all ranks.
            seed: The run's seed.
        """
        leaves = self.topology.leaves(axes)
        text = f"{seed}/{'x'.join(leaves)}/{self.rank(axes)}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1

    # What all ranks do together

    def add(self, axes: Axes | Channels) -> None:
        """Makes a group that was not declared. Every rank of the world must call it, in the same order."""
        self._declare(axes)
        self._meet()

    def destroy(self) -> None:
        """Ends every communicator made here; the default group stays. A second call does nothing."""
        live = self._live()
        self._groups.clear()
        self._channels.clear()
        for group in live:
            if group is not dist.group.WORLD and dist.is_initialized():
                dist.destroy_process_group(group)

    def __enter__(self) -> "ProcessGroups":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.destroy()

    def _live(self) -> list[dist.ProcessGroup]:
        """Every communicator, in the order in which all ranks have made theirs."""
        return [*self._groups.values(), *(group for each in self._channels.values() for group in each)]

    # Making groups

    def _meet(self) -> None:
        """Waits until every rank has connected all its groups: destroyed earlier, one would be closed half-made.

        NCCL connects a group when it is first used, and a batch of sends that only some of its ranks take part in must
        not be the first use; so each is used once here.
        """
        number = torch.zeros(1, device=self.device)
        for group in self._live() if self.device.type != "cpu" else ():
            dist.all_reduce(number, group=group)
        dist.all_reduce(number)  # over the world

    def _declare(self, each: Axes | Channels) -> None:
        if not isinstance(each, Channels):
            self._make(each)
            return
        key = self.topology.blocks(each.axes)
        made = self._channels.get(key, ())
        wanted = each.count - len(made)
        self._channels[key] = made + tuple(self._new(each.axes) if key else self._alone() for _ in range(wanted))

    def _make(self, axes: Axes) -> None:
        """Makes the group over `axes`, unless an equal one is there. Size 1 waits until it is asked for."""
        key = self.topology.blocks(axes)
        if not key or key in self._groups:
            return
        world = dist.group.WORLD
        shared = self._shared_world and self.topology.size(axes) == self.topology.world_size and world is not None
        self._groups[key] = world if shared and world is not None else self._new(axes)

    def _new(self, axes: Axes) -> dist.ProcessGroup:
        """A new communicator over this rank's group; all ranks of the world make theirs in the same call."""
        mine = self.topology.group(axes, self.global_rank)
        if dist.get_backend() == "fake":  # it meets nobody, so the other groups need not be made here
            return _checked(dist.new_group(list(mine), self._timeout, self._backend), mine)
        if self._backend is None and _can_split(self.device) and _are_names_alike(self.device):
            every = [list(group) for group in self.topology.groups(axes)]
            split = dist.split_group(split_ranks=every, timeout=self._timeout, group_desc=_label(axes))
            return _checked(split, mine)
        made = None
        for ranks in self.topology.groups(axes):
            group = dist.new_group(list(ranks), self._timeout, self._backend)
            made = group if ranks == mine else made
        return _checked(made, mine)

    def _alone(self) -> dist.ProcessGroup:
        """The group of this rank alone. Nobody else takes part, so it can be made at any time."""
        if self.topology.world_size == 1 and self._shared_world:
            return _checked(dist.group.WORLD, (self.global_rank,))
        mine = [self.global_rank]
        group = dist.new_group(mine, self._timeout, self._backend, use_local_synchronization=True)
        return _checked(group, mine)


def default_device() -> torch.device:
    """The device that the running world's collectives take: the accelerator if its backend runs, else the CPU."""
    accelerator = accelerator_type()
    if accelerator is not None and backend_of(None, accelerator) is not None:
        return torch.device(accelerator, torch.accelerator.current_device_index())
    return torch.device("cpu")


def _agree(topology: Topology, declared: Sequence[Axes | Channels], device: torch.device) -> None:
    """Raises on every rank unless all of them are about to make the same groups."""
    problem = _problem(topology, declared)
    text = problem or f"{topology.to_json()} {declared!r}"
    digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1
    if not _is_same_everywhere(digest, device):
        every: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(every, text)
        raise ValueError(_disagreement(every))
    if problem is not None:
        raise ValueError(problem)


def _problem(topology: Topology, declared: Sequence[Axes | Channels]) -> str | None:
    """What is wrong on this rank alone, or None; said only once all ranks have heard of it."""
    world = dist.get_world_size()
    if topology.world_size != world:
        return f"{topology} is of {topology.world_size} ranks, but {world} run; change a size, or start as many ranks"
    try:
        for each in declared:
            topology.blocks(each.axes if isinstance(each, Channels) else each)
    except ValueError as error:
        return f"declare: {error}"
    return None


def _disagreement(every: Sequence[str | None]) -> str:
    """Who has which topology, the first ranks of each."""
    holders: dict[str | None, list[int]] = {}
    for rank, text in enumerate(every):
        holders.setdefault(text, []).append(rank)
    parts = [f"ranks {ranks[:4]}{'...' if len(ranks) > 4 else ''}: {text}" for text, ranks in holders.items()]
    return "the ranks have different topologies; give all of them the same. " + "; ".join(parts)


def _can_split(device: torch.device) -> bool:
    """Whether one call can split the world into all groups of an axis (NCCL), instead of one call a group."""
    world = dist.group.WORLD
    if world is None or device.type == "cpu" or world.bound_device_id is None:
        return False
    return bool(world._get_backend(device).supports_splitting)


def _are_names_alike(device: torch.device) -> bool:
    """Whether every rank has as many groups, which is what a split group's name is made of; ranks meet by the name."""
    return _is_same_everywhere(len(dist.distributed_c10d._world.pg_names), device)


def _is_same_everywhere(number: int, device: torch.device) -> bool:
    """Whether all ranks of the world have the same whole number; all-reduce of two."""
    both = torch.tensor([number, -number], device=device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX)  # the highest and the (negated) lowest
    return bool(both[0] == -both[1])


def _checked(group: object, ranks: Sequence[int]) -> dist.ProcessGroup:
    if not isinstance(group, dist.ProcessGroup):
        raise RuntimeError(
            f"torch.distributed made no group of ranks {tuple(ranks)}, although this rank is one of them"
        )
    return group


def _label(axes: Axes) -> str:
    return axes if isinstance(axes, str) else "x".join(axes)
