"""Process groups of one topology, held by an object that callers pass on, never by a module global."""

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._torch_private import can_split, groups_by_name, number_of_groups, timeout_of
from ..topology.channels import Channels
from ..topology.topology import Axes, Axis, Topology
from .among import group_among
from .backends import backend_of
from .launch import accelerator_type, as_timedelta, check_nccl
from .versions import clash, versions

Key = tuple[Axis, ...]
"""Axes in canonical form: equal keys mean equal groups, on every rank."""


class ProcessGroups:
    """Process groups of a topology, made at once and in one fixed order on every rank.

    Every axis, named product and declared product has a group. Equal sets of ranks share one communicator; the set of
    all ranks uses the default group. A group of size 1 is made on first use.

    Args:
        topology: Axes and their sizes. The ranks first check that all of them have the same topology.
        device: Device of the collectives. Default: the device that the running backend needs.
        backend: Backend of the new groups. Default: the backend of the running world.
        timeout: Timeout of a collective of these groups, in seconds or as a timedelta. Default: the running world's
            timeout, as passed to `launch`.
        declare: Further groups: products of axes, such as `("data", "sequence")`, and `Channels(axes, count)`.

    Raises:
        RuntimeError: torch.distributed does not run.
        ValueError: The topology has another size than the world, an axis is unknown, or the ranks have different
            topologies or different versions of these packages. Every rank raises this error, and the message lists the
            values by rank. Or the running world has no backend for tensors on the device.

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
        if backend is not None:
            check_nccl(backend, self.device, self.global_rank)
        if backend_of(None, self.device.type) is None:
            raise ValueError(
                f"the device of rank {self.global_rank} is {str(self.device)!r}, but torch.distributed runs on "
                f"{str(dist.get_backend_config())!r}, which has no backend for it; start it with 'gloo', or pass "
                "another device"
            )
        self._backend = backend
        self._timeout = as_timedelta(timeout) or timeout_of(_world(), self.device)
        self._groups: dict[Key, dist.ProcessGroup] = {}
        self._channels: dict[Key, tuple[dist.ProcessGroup, ...]] = {}
        self._names: dict[Key, str] = {}  # the first name that each was asked for by
        # With an own backend or timeout, even the group of all ranks needs a communicator of its own.
        self._shared_world = backend is None and timeout is None
        declared = tuple(declare)
        _check_topologies(topology, declared, self.device)
        # Making a group is collective over the world. The ranks have just compared their topologies, so they all make
        # the same groups in this order.
        for axes in (*topology.axes, *topology.products, *topology.declared):
            self._make(axes)
        for view in topology.views.values():
            for name in view.axes:
                self._make(name)
        for wanted in (*topology.channels, *declared):
            self._declare(wanted)
        self._meet()

    # What a rank asks

    def __getitem__(self, axes: Axes) -> dist.ProcessGroup:
        """Return the group of this rank over `axes`. No communication.

        Raises:
            ValueError: An axis is unknown, or the product of axes was not declared.
        """
        key = self.topology.blocks(axes)
        if not key and key not in self._groups:
            self._names.setdefault(key, "alone")
            self._groups[key] = self._alone()
        if key not in self._groups:
            known = ", ".join(self.topology.axes | dict.fromkeys(self.topology.products))
            raise ValueError(
                f"there is no group over {axes!r}; there is one over each of {known}. Declare a product up front, "
                f"ProcessGroups(..., declare=[{axes!r}]), or make it on all ranks together: groups.add({axes!r})"
            )
        return self._groups[key]

    def size(self, axes: Axes) -> int:
        """Return the number of ranks in the group over `axes`; needs no live group."""
        return self.topology.size(axes)

    def rank(self, axes: Axes) -> int:
        """Return this rank's position in its group over `axes`; needs no live group."""
        return self.topology.index(axes, self.global_rank)

    def ranks(self, axes: Axes) -> tuple[int, ...]:
        """Return the global ranks in this rank's group over `axes`; needs no live group."""
        return self.topology.group(axes, self.global_rank)

    def channels(self, axes: Axes, count: int) -> tuple[dist.ProcessGroup, ...]:
        """Return private communicators over `axes`.

        NCCL deadlocks if a batched send is queued before an all-reduce on one rank and after it on another. A private
        communicator for the sends prevents this.

        Args:
            axes: Axes of the communicators.
            count: Number of communicators; every call returns the same ones.

        Raises:
            ValueError: Fewer communicators were declared.
        """
        channels = self._channels.get(self.topology.blocks(axes), ())
        if len(channels) < count:
            raise ValueError(
                f"{len(channels)} channels over {axes!r} were declared, {count} are asked for; declare them up front: "
                f"ProcessGroups(..., declare=[Channels({axes!r}, {count})])"
            )
        return channels[:count]

    def mesh(self, axes: Axes) -> DeviceMesh:
        """Return a torch DeviceMesh that uses these groups, with a mesh dim for each of `axes`.

        FSDP2 over tensor parallelism needs both meshes as slices of one mesh: `mesh(("data", "tensor"))["tensor"]`.

        Args:
            axes: One name, or several, slowest first; a named product is one mesh dim.
        """
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        # A DeviceMesh numbers its ranks row by row, so its dims must have the order of the topology.
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

    def named(self) -> dict[str, dist.ProcessGroup]:
        """Return this rank's present communicators of several ranks, by name. No communication.

        The name lists the axes, such as "tensor" or "dataxsequence". Products with the same ranks share one
        communicator, under the name of the first. Channels have numbers, and the default group is "world".
        """
        named = {self._names[key]: group for key, group in self._groups.items()}
        for key, channels in self._channels.items():
            named |= {f"channel {number} of {self._names[key]}": group for number, group in enumerate(channels)}
        several = {label: group for label, group in named.items() if dist.get_world_size(group) > 1}
        world = _world()
        return several if world in several.values() or self.topology.world_size == 1 else {"world": world, **several}

    @property
    def is_master(self) -> bool:
        """Whether this is global rank 0."""
        return self.global_rank == 0

    def rank_seed(self, axes: Axes, seed: int) -> int:
        """Return a 63-bit seed: equal on ranks with the same coordinates on `axes`, different on all other ranks.

        Args:
            axes: Axes along which randomness differs, such as "data"; with (), all ranks have the same seed.
            seed: Seed of the run.
        """
        leaves = self.topology.leaves(axes)
        text = f"{seed}/{'x'.join(leaves)}/{self.rank(axes)}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1

    # What all ranks do together

    def add(self, axes: Axes | Channels) -> None:
        """Make a group that was not declared. Collective: every rank of the world must call it, in the same order.

        Args:
            axes: Product of axes, or `Channels(axes, count)`.
        """
        self._declare(axes)
        self._meet()

    def destroy(self) -> None:
        """Destroy every communicator made here; the default group stays. A second call does nothing."""
        # The tables are emptied first, so that a second call finds nothing, even if destroying a group raises.
        live = self._live()
        self._groups.clear()
        self._channels.clear()
        # The world of these groups may have ended, and another one may run in this process by now.
        known = set(groups_by_name().values()) - {dist.group.WORLD}
        for group in live:
            if group in known:
                dist.destroy_process_group(group)

    def __enter__(self) -> "ProcessGroups":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.destroy()

    def _live(self) -> list[dist.ProcessGroup]:
        """Return every communicator, in the order in which all ranks have made them."""
        return [*self._groups.values(), *itertools.chain.from_iterable(self._channels.values())]

    # Making groups

    def _meet(self) -> None:
        """Wait until every rank has connected all its groups, so that no rank can destroy a half-connected group.

        NCCL connects a group on first use. That use must not be a batch of sends in which only some of the ranks take
        part. This method therefore uses every group once. Gloo connects a group when it is made.
        """
        number = torch.zeros(1, device=self.device)
        for group in self._live():
            if backend_of(group, self.device.type) != "gloo":
                dist.all_reduce(number, group=group)
        dist.all_reduce(number)  # over the world

    def _declare(self, wanted: Axes | Channels) -> None:
        """Make a group, or the missing channels."""
        if not isinstance(wanted, Channels):
            self._make(wanted)
            return
        key = self.topology.blocks(wanted.axes)
        self._names.setdefault(key, _label(wanted.axes))
        there = self._channels.get(key, ())
        missing = range(wanted.count - len(there))
        self._channels[key] = there + tuple(self._new(wanted.axes) if key else self._alone() for _ in missing)

    def _make(self, axes: Axes) -> None:
        """Make the group over `axes`, unless an equal group exists. A group of size 1 is made on first use."""
        key = self.topology.blocks(axes)
        if not key or key in self._groups:
            return
        self._names.setdefault(key, _label(axes))
        is_world = self.topology.size(axes) == self.topology.world_size
        self._groups[key] = _world() if is_world and self._shared_world else self._new(axes)

    def _new(self, axes: Axes) -> dist.ProcessGroup:
        """Make a communicator over this rank's group. All ranks of the world must make their communicators together."""
        mine = self.topology.group(axes, self.global_rank)
        if dist.get_backend() == "fake":  # it meets nobody, so the other groups need not be made here
            return _checked(dist.new_group(list(mine), self._timeout, self._backend), mine)
        if self._backend is None and _is_splittable(self.device):
            all_groups = [list(ranks) for ranks in self.topology.groups(axes)]
            return _checked(
                dist.split_group(split_ranks=all_groups, timeout=self._timeout, group_desc=_label(axes)), mine
            )
        # `new_group` is a collective of the world, so every rank makes the groups of all ranks, and keeps its own.
        made = None
        for ranks in self.topology.groups(axes):
            group = dist.new_group(list(ranks), self._timeout, self._backend)
            made = group if ranks == mine else made
        return _checked(made, mine)

    def _alone(self) -> dist.ProcessGroup:
        """Return a group of only this rank. No other rank takes part, so that it can be made at any time."""
        if self.topology.world_size == 1 and self._shared_world:
            return _world()
        mine = [self.global_rank]
        return _checked(group_among(mine, self._timeout, self._backend), mine)


def _label(axes: Axes) -> str:
    """Return the name of a group over these axes."""
    return axes if isinstance(axes, str) else "x".join(axes)


def default_device() -> torch.device:
    """Return the device of the running world's collectives: the accelerator if its backend runs, else the CPU."""
    accelerator = accelerator_type()
    if accelerator is not None and backend_of(None, accelerator) is not None:
        return torch.device(accelerator, torch.accelerator.current_device_index())
    return torch.device("cpu")


def _check_topologies(topology: Topology, declared: Sequence[Axes | Channels], device: torch.device) -> None:
    """Raise an error on every rank unless all ranks make the same groups, with packages of the same versions.

    Communication: one all-reduce of two numbers. If the ranks differ, an all-gather of small objects also collects the
    values of all ranks for the message.
    """
    problem = _problem(topology, declared)
    text, own = problem or f"{topology.to_json()} {declared!r}", versions()
    # A hash of 63 bits fits into one number of a tensor, so that the usual case costs a single small all-reduce.
    digest = int.from_bytes(hashlib.sha256(repr((text, own)).encode()).digest()[:8]) >> 1
    if not _is_same_everywhere(digest, device):
        said = [(text, own)] * dist.get_world_size()
        dist.all_gather_object(said, (text, own))
        # Versions come first: different versions may write equal topologies as different texts.
        different = clash([theirs for _, theirs in said])
        if different is not None:
            raise ValueError(different)
        holders: dict[str, list[int]] = {}
        for rank, (theirs, _) in enumerate(said):
            holders.setdefault(theirs, []).append(rank)
        parts = [f"ranks {ranks[:4]}{'...' if len(ranks) > 4 else ''}: {theirs}" for theirs, ranks in holders.items()]
        if len(parts) > 1:
            raise ValueError("the ranks have different topologies; give all of them the same. " + "; ".join(parts))
    # Here all ranks have the same problem, or else their digests would have differed above.
    if problem is not None:
        raise ValueError(problem)


def _problem(topology: Topology, declared: Sequence[Axes | Channels]) -> str | None:
    """Return an error message for this rank's arguments, or None. The caller raises it after all ranks received it."""
    running = dist.get_world_size()
    if topology.world_size != running:
        size = topology.world_size
        return f"{topology} is of {size} ranks, but {running} run; change a size, or start as many ranks"
    try:
        for wanted in declared:
            topology.blocks(wanted.axes if isinstance(wanted, Channels) else wanted)
    except ValueError as error:
        return f"declare: {error}"
    return None


def _is_splittable(device: torch.device) -> bool:
    """Return whether one call can split the world into all groups of an axis (NCCL), instead of one call per group."""
    world = _world()
    if device.type == "cpu" or world.bound_device_id is None or not can_split(world, device):
        return False
    # torch derives a split group's rendezvous key from the number of groups, so it must be equal on every rank.
    return _is_same_everywhere(number_of_groups(), device)


def _is_same_everywhere(number: int, device: torch.device) -> bool:
    """Return whether all ranks of the world have the same number. Communication: one all-reduce of two numbers."""
    highest_and_negated_lowest = torch.tensor([number, -number], device=device)
    dist.all_reduce(highest_and_negated_lowest, op=dist.ReduceOp.MAX)
    return bool(highest_and_negated_lowest[0] == -highest_and_negated_lowest[1])


def _world() -> dist.ProcessGroup:
    """Return the default group, which exists as long as any group exists."""
    return _checked(dist.group.WORLD, range(dist.get_world_size()))


def _checked(group: object, ranks: Sequence[int]) -> dist.ProcessGroup:
    if not isinstance(group, dist.ProcessGroup):
        raise RuntimeError(
            f"torch.distributed made no group of ranks {tuple(ranks)}, although this rank is one of them"
        )
    return group
