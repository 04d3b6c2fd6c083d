"""What of the optimizers' state lies elsewhere than where they make it, planned before anything is changed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from par_groups import together

from .._param_groups import ParamGroup
from .._policies import ShardOptions
from .._stage import ZeroStage
from .._tiers import Home, Offload
from ..layout.build import ChunkPlan
from ..layout.chunk import Chunk
from ..layout.packing import SliceRange
from ..optimizer.probe import state_slots
from ..placement.room import Room
from .disk import Disk, tensors_in
from .pieces import COPY, Slots, StateBlock, blocks, cut, pages, spread


@dataclass(frozen=True, kw_only=True)
class OffloadPlan:
    """Which state of the optimizers lies elsewhere than where they make it, and where parameters and gradients lie.

    Args:
        homes: For each chunk, where its parameters and its gradients lie.
        cuts: For each chunk its pieces, each in one tier; None for a chunk that no optimizer has.
        blocks: For each chunk, what its pieces of which anything is on the disk have in the file, in their order.
        shares: For each chunk, the first byte in the file of this rank's share of its parameters; None: it lies
            elsewhere.
        disk: The file; None where nothing lies on a disk, on any rank.
        ahead: Number of pieces that are in memory at a time.
        late: Whether that of which anything is on the disk is stepped after the optimizer's own step.
    """

    homes: Sequence[Home]
    cuts: Sequence[Sequence[SliceRange] | None]
    blocks: Sequence[Sequence[StateBlock]]
    shares: Sequence[int | None]
    disk: Disk | None
    ahead: int
    late: bool


def plan_away(
    plans: Sequence[ChunkPlan],
    groups: Sequence[ParamGroup],
    stage: ZeroStage,
    ranks: Sequence[int],
    offload: Offload,
    options: ShardOptions,
) -> OffloadPlan:
    """Says what lies where, and makes the file for what lies on a disk.

    Args:
        plans: The chunks, which have no memory yet, the last that runs first.
        groups: The param groups of all optimizers.
        stage: The ZeRO stage: of what a rank keeps its share alone.
        ranks: For each of those who share, which part is this rank's.
        offload: Which part goes where.
        options: The dtype of parameters in use: the optimizer has copies of those that are of another one.

    Raises:
        ValueError: The disk has too little room, or the folder is none.
        OSError: The file cannot be made.
    """
    laid = lay_out(plans, held_of(plans, stage, ranks), slots_by_group(plans, groups, options), offload, options)
    size = max((block.stop for found in laid.blocks.values() for block in found), default=0)
    shares: dict[ChunkPlan, int] = {}
    for plan in plans:
        if laid.homes[plan].parameters == "disk":
            shares[plan] = size
            size += pages(plan.layout.shard * plan.dtype_in_use(options).itemsize)
    return OffloadPlan(
        homes=list(laid.homes.values()),
        cuts=[laid.pieces.get(plan) for plan in plans],
        blocks=list(laid.blocks.values()),
        shares=[shares.get(plan) for plan in plans],
        disk=Disk(offload.folder, size, offload.threads) if offload.uses_disk else None,
        ahead=offload.ahead,
        late=offload.overlap is True,  # "auto" is nowhere yet, as all parameters are on a CPU
    )


@dataclass(frozen=True, kw_only=True)
class TierLayout:
    """What lies where of chunks, before there is a file.

    Args:
        homes: Where each chunk's parameters and gradients lie.
        pieces: The pieces of each chunk that an optimizer has, each in one tier.
        blocks: What the pieces of each chunk of which anything is on the disk have in the file, in their order.
    """

    homes: Mapping[ChunkPlan, Home]
    pieces: Mapping[ChunkPlan, Sequence[SliceRange]]
    blocks: Mapping[ChunkPlan, Sequence[StateBlock]]


Held = Sequence[Sequence[SliceRange]]
"""What a rank's optimizers hold of each chunk that is stepped, the first that runs first."""


def held_of(plans: Sequence[ChunkPlan], stage: ZeroStage, ranks: Sequence[int]) -> Held:
    """What a rank's optimizers hold.

    Args:
        plans: The chunks, the last that runs first.
        stage: The ZeRO stage: of what a rank keeps its share alone.
        ranks: For each of those who share, which part is this rank's.
    """
    held = []
    for plan in reversed(_stepped(plans)):
        low, high = plan.layout.share(ranks[plan.share]) if stage.shards_state else (0, plan.layout.size)
        held.append(tuple(plan.layout.slices(low, high)))
    return tuple(held)


def slots_by_group(
    plans: Sequence[ChunkPlan], groups: Sequence[ParamGroup], options: ShardOptions
) -> dict[tuple[int, torch.dtype], Slots]:
    """What an optimizer keeps for each element, by param group and dtype of the parameters.

    Args:
        plans: The chunks.
        groups: The param groups of all optimizers.
        options: The dtype of parameters in use: the optimizer has copies of those that are of another one.
    """
    return {
        (group, plan.dtype): ({COPY: plan.dtype} if plan.dtype_in_use(options) != plan.dtype else {})
        | state_slots(groups[group].optimizer, groups[group].settings, plan.dtype)
        for plan in _stepped(plans)
        for group in {member.group for member in plan.members}
    }


def lay_out(
    plans: Sequence[ChunkPlan],
    held: Held,
    slots: Mapping[tuple[int, torch.dtype], Slots],
    offload: Offload,
    options: ShardOptions,
) -> TierLayout:
    """Says what lies where. Pure arithmetic.

    Args:
        plans: The chunks, the last that runs first.
        held: What a rank's optimizers hold of them.
        slots: What an optimizer keeps for each element, by param group and dtype.
        offload: Which part goes where.
        options: The dtype of parameters in use.
    """
    stepped = _stepped(plans)
    homes = dict(zip(plans, homes_of(plans, offload, options), strict=True))
    widest = max(
        *(dtype.itemsize for found in slots.values() for dtype in found.values()),
        *(plan.dtype.itemsize for plan in stepped if homes[plan].is_on_disk),
        *(1, 1),
    )
    of_units = [homes[plan].is_on_disk for plan in reversed(stepped)]
    cuts = cut(held, offload.parts, offload.piece_bytes // widest, of_units)
    pieces = dict(zip(reversed(stepped), cuts, strict=True))
    in_pieces = [
        (plan, part)
        for plan in sorted(stepped, key=lambda plan: plan.members[0].owner)  # an optimizer's pieces lie together
        for part in pieces[plan]
        if part.in_pieces
    ]
    in_file = blocks(
        (
            part.stop - part.start,
            slots[part.group, plan.dtype] if part.tier == "disk" else {},
            plan.dtype if homes[plan].gradients == "disk" else None,
        )
        for plan, part in in_pieces
    )
    by_plan: dict[ChunkPlan, list[StateBlock]] = {plan: [] for plan in plans}
    for (plan, _), block in zip(in_pieces, in_file, strict=True):
        by_plan[plan].append(block)
    return TierLayout(homes=homes, pieces=pieces, blocks=by_plan)


def _stepped(plans: Sequence[ChunkPlan]) -> list[ChunkPlan]:
    """The chunks that an optimizer has, in their order."""
    return [plan for plan in plans if plan.members[0].owner >= 0]


def homes_of(plans: Sequence[ChunkPlan], offload: Offload, options: ShardOptions) -> list[Home]:
    """Where the parameters and the gradients of each chunk lie, alike on all ranks. What runs first stays nearest.

    Args:
        plans: The chunks, the last that runs first.
        offload: Which part goes where.
        options: The dtype of parameters in use.
    """
    forward = list(reversed(plans))
    sizes = [plan.most_kept * plan.dtype_in_use(options).itemsize for plan in forward]
    parameters, gradients = (spread(sizes, parts) for parts in (offload.parameter_parts, offload.gradient_parts))
    homes = [Home(parameters=own, gradients=sums) for own, sums in zip(parameters, gradients, strict=True)]
    return homes[::-1]


@torch.no_grad()
def bring_away_(away: OffloadPlan | None, number: int, chunk: Chunk) -> None:
    """Brings what a chunk has just been packed of to where it lies.

    Args:
        away: What lies where; None: nothing lies elsewhere.
        number: The chunk's among all.
        chunk: The chunk, of which no optimizer has tensors yet.
    """
    if away is None:
        return
    chunk.home = away.homes[number]
    if away.disk is None:
        return
    parts = [part for part in away.cuts[number] or () if part.in_pieces]
    if chunk.master is not chunk.own:
        places = [tensors_in(away.disk, block) for block in away.blocks[number]]
        chunk.move_master_({part.start: each[COPY] for part, each in zip(parts, places, strict=True) if COPY in each})
    start, (low, high) = away.shares[number], chunk.share
    if start is not None:
        dtype = chunk.own.dtype
        place = away.disk.tensor(start, dtype, high - low)
        place.copy_(chunk.own)
        # In the same storage, by which checkpoints know parameters again, but with versions of their own.
        stepped = {
            part.start: place.new_empty(0).set_(
                place.untyped_storage(),
                part.start - low,
                (part.stop - part.start,),  # type: ignore[call-overload]
            )
            for part in parts
        }
        chunk.take_own_(place, stepped)


def plan_room(
    plans: Sequence[ChunkPlan],
    groups: Sequence[ParamGroup],
    options: ShardOptions,
    offload: Offload,
    ranks: Sequence[int],
    sharers: Sequence[dist.ProcessGroup],
) -> Room | None:
    """What a budget leaves for units that are whole; None without one. Collective where there is one.

    Args:
        plans: The chunks, which have no memory yet.
        groups: The param groups of all optimizers.
        options: The dtypes.
        offload: The budget, and which part of the state lies elsewhere.
        ranks: For each of those who share, which part is this rank's.
        sharers: The groups whose ranks go on together.

    Raises:
        ValueError: It leaves too little, on any rank.
    """
    if "device" not in offload.budgets:
        return None
    resident = resident_bytes(plans, groups, ranks, options, offload)
    with together("shard(offload=...)", *sharers):
        return Room(offload.budgets["device"], resident, whole_bytes(plans, options), offload.policy, offload.other)


def resident_bytes(
    plans: Sequence[ChunkPlan],
    groups: Sequence[ParamGroup],
    ranks: Sequence[int],
    options: ShardOptions,
    offload: Offload,
) -> dict[str, int]:
    """Bytes that lie on the device of a rank throughout stage 3, by what they are.

    Args:
        plans: The chunks, which have no memory yet.
        groups: The param groups of all optimizers.
        ranks: For each of those who share, which part is this rank's.
        options: The dtypes.
        offload: Which part of the state lies elsewhere.
    """
    found = dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
    slots: dict[tuple[int, torch.dtype], int] = {}
    for plan, home in zip(plans, homes_of(plans, offload, options), strict=True):
        low, high = plan.layout.share(ranks[plan.share])
        used = plan.dtype_in_use(options)
        if home.parameters == "device":
            found["parameters"] += (high - low) * used.itemsize
        if plan.members[0].owner < 0:
            continue
        if home.gradients == "device":
            found["gradients"] += (high - low) * (options.precision.reduce_dtype or used).itemsize
        for part in plan.layout.slices(low, high):
            key = (part.group, plan.dtype)
            if key not in slots:
                group = groups[part.group]
                kept = state_slots(group.optimizer, group.settings, plan.dtype)
                copy = plan.dtype.itemsize if used != plan.dtype else 0
                slots[key] = copy + sum(dtype.itemsize for dtype in kept.values())
            found["optimizer"] += round((part.stop - part.start) * slots[key] * offload.parts["device"])
    return found


def whole_bytes(plans: Sequence[ChunkPlan], options: ShardOptions) -> dict[int, int]:
    """Bytes of each unit that is whole, by its number, of the rank that has most of it."""
    found: dict[int, int] = {}
    for plan in plans:
        size = plan.most * plan.dtype_in_use(options).itemsize
        found[plan.place.unit] = found.get(plan.place.unit, 0) + size
    return found
