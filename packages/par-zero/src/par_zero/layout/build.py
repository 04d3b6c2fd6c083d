"""Chunks out of a module's parameters."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from par_groups import Sharding

from .._options import ShardOptions
from .._param_groups import ParamGroup
from .._stage import Stage
from .chunk import Chunk, Member
from .packing import Item, pack, pack_atomic
from .units import Place


def members_of(module: nn.Module, groups: Sequence[ParamGroup], stage: Stage) -> list[Member]:
    """The parameters that are packed.

    They are those of the optimizers; without one, those that want gradients; where parameters are sharded, all.

    Args:
        module: The module.
        groups: The param groups of all its optimizers.
        stage: The ZeRO stage.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    numbers = {parameter: number for number, group in enumerate(groups) for parameter in group.settings["params"]}
    members = []
    for parameter, all_names in names.items():
        number = numbers.get(parameter, -1)
        if number >= 0:
            owner, atomic = groups[number].owner, groups[number].atomic
        elif stage.shards_parameters or (not groups and parameter.requires_grad):
            owner, atomic = -1, False
        else:
            continue
        members.append(
            Member(
                parameter=parameter,
                names=tuple(all_names),
                group=number,
                owner=owner,
                atomic=atomic,
                shape=parameter.shape,
            )
        )
    return members


def make_chunks(
    members: Sequence[Member],
    place_of: Mapping[nn.Parameter, Place],
    records: Mapping[nn.Parameter, Sharding],
    stage: Stage,
    group: dist.ProcessGroup,
    options: ShardOptions,
) -> list[Chunk]:
    """Packs parameters into chunks, the last first: their gradients come first.

    A chunk holds parameters of one place, dtype and device that are trained, by one optimizer, or that are not. What
    ranks of other axes hold alike lies apart from what each of them holds for itself, so that it is cut alike there.

    Args:
        members: The parameters.
        place_of: Where each parameter belongs; at stage 3 a unit's parameters of one kind are one chunk.
        records: The parameters' records, before they are cut.
        stage: The ZeRO stage: of what a rank keeps its share alone.
        group: The ranks that share.
        options: The size of a chunk, and dtypes.
    """
    kinds: dict[tuple[object, ...], list[Member]] = {}
    for member in reversed(members):
        parameter = member.parameter
        trained = member.group >= 0 or parameter.requires_grad
        copies = frozenset(rank for box in records[parameter].boxes for rank in box.copies)
        stepped = (trained, member.owner, member.atomic)
        kind = (place_of[parameter], parameter.dtype, parameter.device, *stepped, copies)
        kinds.setdefault(kind, []).append(member)
    chunks = [
        _make(part[::-1], place_of[part[0].parameter].items, stage, group, options)
        for kind in kinds.values()
        for part in ([kind] if stage.shards_parameters else _buckets(kind, options.bucket))
    ]
    first = {member.parameter: position for position, member in enumerate(members)}
    # A chunk is complete when the first of its parameters has its gradient, and chunks are reduced in one order.
    return sorted(chunks, key=lambda chunk: -min(first[member.parameter] for member in chunk.members))


def _buckets(members: Iterable[Member], limit: int) -> Iterator[list[Member]]:
    """Neighbours together, until they have that many bytes."""
    current: list[Member] = []
    size = 0
    for member in members:
        current.append(member)
        size += member.shape.numel() * member.parameter.element_size()
        if size >= limit:
            yield current
            current, size = [], 0
    if current:
        yield current


def _make(
    members: Sequence[Member], items: tuple[int, ...], stage: Stage, group: dist.ProcessGroup, options: ShardOptions
) -> Chunk:
    layout = (pack_atomic if members[0].atomic else pack)(
        [Item(numel=member.shape.numel(), group=member.group) for member in members], dist.get_world_size(group)
    )
    first = members[0].parameter
    packed = torch.zeros(layout.size, dtype=first.dtype, device=first.device)
    with torch.no_grad():
        for member, (start, stop) in zip(members, layout.slots, strict=True):
            packed[start:stop].view(member.shape).copy_(member.parameter)
    real = first.is_floating_point()  # complex ones keep their dtype, and their gradients too
    dtype = options.param_dtype if options.param_dtype is not None and real else first.dtype
    return Chunk(
        members,
        layout,
        dist.get_rank(group),
        stage=stage,
        packed=packed,
        dtype=dtype,
        reduce_dtype=options.reduce_dtype if options.reduce_dtype is not None and real else dtype,
        items=items,
    )
