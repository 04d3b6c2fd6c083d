"""`shard`: one call makes an ordinary module and its optimizer data-parallel, without duplicates."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from par_groups import on_written

from ._check import ENGINE, check, check_alike, check_groups, described
from ._engine import Zero
from ._gather import Unit
from ._options import ShardOptions
from ._reduce import Groups
from .layout.build import Plan, make_chunks, members_of
from .layout.records import SameShare, record_, record_of
from .layout.units import Place, called, choose_units, places


def shard(
    module: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    stage: int,
    group: dist.ProcessGroup,
    replicas: dist.ProcessGroup | None = None,
    **keywords: Any,
) -> tuple[nn.Module, Optimizer | None]:
    """Makes a module and its optimizer data-parallel over a group, in place. Collective.

    They stay an ordinary nn.Module and torch.optim.Optimizer: `loss.backward(); optimizer.step()`. Rank 0's parameters
    are everybody's, buffers stay each rank's own. The optimizer comes to hold flat slices; its group dicts stay the
    objects that they were.

    Args:
        module: On its device. Of a ModuleList or ModuleDict the items are called, in any order, such as an actor and a
            critic that share an optimizer; `no_sync`, `summon` and `reset` of an item are those of all.
        optimizer: Made from the module's parameters, all that want gradients, before any step; None if the module is
            only run.
        stage: What is not kept twice: 0 nothing (what DistributedDataParallel does), 1 the optimizer's state,
            2 gradients too, 3 parameters too.
        group: The ranks with different data that share the work.
        replicas: For hybrid sharding: the ranks that keep the same share.
        keywords: Fields of `ShardOptions`.

    Returns:
        The module and the optimizer.

    Raises:
        ValueError, TypeError: What cannot be sharded, and what differs between the ranks; on every rank.
    """
    problem, members, options = None, [], ShardOptions()
    modules: list[list[nn.Module]] = [[module]]
    place_of: dict[nn.Parameter, Place] = {}
    try:
        options = ShardOptions(**keywords)
        check(module, optimizer, stage, options)
        check_groups(group, replicas)
        if stage == 3:
            modules = choose_units(module, options.units, options.bucket)
        place_of = places(module, modules)
        members = members_of(module, optimizer, stage)
        if not members:
            raise ValueError("the module has no parameters to shard; give one that has, or leave it alone")
    except Exception as error:  # of any type, such as of the caller's function for units: the others wait for this rank
        problem = error
    ranks = check_alike(problem, described(members, place_of, stage, options), group, replicas)
    _same_everywhere_([member.parameter for member in members], group, replicas)
    records = {member.parameter: record_of(member.parameter, ranks) for member in members}
    chunks = make_chunks(members, place_of, records, _plan(stage, group, options))
    for chunk in chunks:
        for member, view in zip(chunk.members, chunk.views(chunk.flat), strict=True):
            member.parameter.data = view
    units = [
        Unit(number, each, [chunk for chunk in chunks if place_of[chunk.members[0].parameter].unit == number])
        for number, each in enumerate(modules)
    ]
    groups = Groups(shards=group, replicas=replicas, mean=options.reduce == "mean")
    zero = Zero(module, optimizer, chunks, stage, groups, units)
    record_(chunks, records, stage, SameShare(group, replicas))
    on_written([member.parameter for member in members], zero.refresh)
    for each in (module, *called(module)):
        each.__dict__[ENGINE] = zero
    return module, optimizer


def engine_of(module: nn.Module) -> Zero:
    """The engine of a sharded module.

    Raises:
        ValueError: It is not sharded.
    """
    zero = module.__dict__.get(ENGINE)
    if not isinstance(zero, Zero):
        raise ValueError(f"this {type(module).__name__} is not sharded; give what was given to shard()")
    return zero


def no_sync(module: nn.Module) -> AbstractContextManager[None]:
    """Backward passes inside add up gradients on each rank; the first one outside reduces them all together.

    At stages 2 and 3 this takes a whole gradient's memory, as at stage 1.
    """
    return engine_of(module).no_sync()


def summon(module: nn.Module) -> AbstractContextManager[None]:
    """Whole parameters inside, at stage 3 too; what is written to them is kept. Collective."""
    return engine_of(module).summon()


def reset(module: nn.Module) -> None:
    """After an exception in forward or backward: drops half-made gradients, so that the next step is right."""
    engine_of(module).reset()


def _plan(stage: int, group: dist.ProcessGroup, options: ShardOptions) -> Plan:
    return Plan(
        stage=stage,
        rank=dist.get_rank(group),
        ranks=dist.get_world_size(group),
        bucket=options.bucket,
        param_dtype=options.param_dtype,
        reduce_dtype=options.reduce_dtype,
        atomic=options.atomic,
    )


def _same_everywhere_(
    parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, replicas: dist.ProcessGroup | None
) -> None:
    """The first rank's values on all. A broadcast for each parameter."""
    for parameter in parameters:
        data = parameter.detach().contiguous()
        for each in (group, replicas):
            if each is not None and dist.get_world_size(each) > 1:
                dist.broadcast(data, group=each, group_src=0)
        if data.data_ptr() != parameter.data_ptr():
            parameter.detach().copy_(data)
