"""What of the optimizers' state lies elsewhere than where they make it, planned before anything is changed."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from par_groups import together

from .._options import ShardOptions
from .._param_groups import ParamGroup
from .._stage import Stage
from .._tiers import Home, Offload
from ..layout.build import Plan
from ..layout.chunk import Chunk
from ..layout.packing import Range
from ..optimizer.probe import slots_of_steps
from ..placement.room import Room
from .disk import Disk, tensors_in
from .pieces import COPY, Block, blocks, cut, spread


@dataclass(frozen=True, kw_only=True)
class Away:
    """Which state of the optimizers lies elsewhere than where they make it, and where parameters and gradients lie.

    Args:
        homes: For each chunk, where its parameters and its gradients lie.
        cuts: For each chunk its pieces, each in one tier; None for a chunk that no optimizer has.
        blocks: For each chunk, where its pieces on the disk lie in the file, in their order.
        disk: The file; None where nothing lies on a disk, on any rank.
        ahead: Number of pieces that are in memory at a time.
        late: Whether what lies on the disk is stepped after the optimizer's own step.
    """

    homes: Sequence[Home]
    cuts: Sequence[Sequence[Range] | None]
    blocks: Sequence[Sequence[Block]]
    disk: Disk | None
    ahead: int
    late: bool


def plan_away(
    plans: Sequence[Plan],
    groups: Sequence[ParamGroup],
    stage: Stage,
    rank: int,
    offload: Offload,
    options: ShardOptions,
) -> Away:
    """Says what lies where, and makes the file for what lies on a disk.

    Args:
        plans: The chunks, which have no memory yet, the last that runs first.
        groups: The param groups of all optimizers.
        stage: The ZeRO stage: of what a rank keeps its share alone.
        rank: Which share is this rank's.
        offload: Which part goes where.
        options: The dtype of parameters in use: the optimizer has copies of those that are of another one.

    Raises:
        ValueError: The disk has too little room, or the folder is none.
        OSError: The file cannot be made.
    """
    stepped = [plan for plan in plans if plan.members[0].owner >= 0]
    slots = {
        (group, plan.dtype): ({COPY: plan.dtype} if plan.dtype_in_use(options) != plan.dtype else {})
        | slots_of_steps(groups[group].optimizer, groups[group].settings, plan.dtype)
        for plan in stepped
        for group in {member.group for member in plan.members}
    }
    widest = max((dtype.itemsize for found in slots.values() for dtype in found.values()), default=1)
    held = []
    for plan in reversed(stepped):  # forward
        low, high = plan.layout.share(rank) if stage.shards_state else (0, plan.layout.size)
        held.append(list(plan.layout.slices(low, high)))
    pieces = dict(zip(reversed(stepped), cut(held, offload.parts, offload.piece_bytes // widest), strict=True))
    on_disk = [
        (plan, part)
        for plan in sorted(stepped, key=lambda plan: plan.members[0].owner)  # an optimizer's pieces lie together
        for part in pieces[plan]
        if part.tier == "disk"
    ]
    in_file = blocks((part.stop - part.start, slots[part.group, plan.dtype]) for plan, part in on_disk)
    by_plan: dict[Plan, list[Block]] = {plan: [] for plan in plans}
    for (plan, _), block in zip(on_disk, in_file, strict=True):
        by_plan[plan].append(block)
    disk = None
    if offload.parts["disk"]:
        disk = Disk(offload.folder, sum(block.size for block in in_file), offload.threads)
    return Away(
        homes=homes_of(plans, offload, options),
        cuts=[pieces.get(plan) for plan in plans],
        blocks=list(by_plan.values()),
        disk=disk,
        ahead=offload.ahead,
        late=offload.overlap is True,  # "auto" is nowhere yet, as all parameters are on a CPU
    )


def homes_of(plans: Sequence[Plan], offload: Offload, options: ShardOptions) -> list[Home]:
    """Where the parameters and the gradients of each chunk lie. Those of the units that run first stay nearest.

    Args:
        plans: The chunks, the last that runs first.
        offload: Which part goes where.
        options: The dtype of parameters in use.
    """
    forward = list(reversed(plans))
    sizes = [plan.layout.size * plan.dtype_in_use(options).itemsize for plan in forward]
    parameters, gradients = (spread(sizes, parts) for parts in (offload.parameter_parts, offload.gradient_parts))
    homes = [Home(parameters=own, gradients=sums) for own, sums in zip(parameters, gradients, strict=True)]
    return homes[::-1]


@torch.no_grad()
def bring_away_(away: Away, number: int, chunk: Chunk) -> None:
    """Brings what a chunk has just been packed of to where it lies.

    Args:
        away: What lies where.
        number: The chunk's among all.
        chunk: The chunk, of which no optimizer has tensors yet.
    """
    chunk.home = away.homes[number]
    if away.disk is not None and chunk.master is not chunk.own:
        parts = [part for part in away.cuts[number] or () if part.tier == "disk"]
        places = [tensors_in(away.disk, block)[COPY] for block in away.blocks[number]]
        chunk.move_master_({part.start: place for part, place in zip(parts, places, strict=True)})


def plan_room(
    plans: Sequence[Plan],
    groups: Sequence[ParamGroup],
    options: ShardOptions,
    offload: Offload,
    sharers: Sequence[dist.ProcessGroup],
) -> Room | None:
    """What a budget leaves for units that are whole; None without one. Collective where there is one.

    Args:
        plans: The chunks, which have no memory yet.
        groups: The param groups of all optimizers.
        options: The dtypes.
        offload: The budget, and which part of the state lies elsewhere.
        sharers: The groups whose ranks go on together: first the one that shares, then others.

    Raises:
        ValueError: It leaves too little, on any rank.
    """
    if offload.budget_bytes is None:
        return None
    resident = resident_bytes(plans, groups, dist.get_rank(sharers[0]), options, offload)
    with together("shard(offload=...)", *sharers):
        return Room(offload.budget_bytes, resident, whole_bytes(plans, options), offload.policy, offload.other)


def resident_bytes(
    plans: Sequence[Plan], groups: Sequence[ParamGroup], rank: int, options: ShardOptions, offload: Offload
) -> dict[str, int]:
    """Bytes that lie on the device of a rank throughout stage 3, by what they are.

    Args:
        plans: The chunks, which have no memory yet.
        groups: The param groups of all optimizers.
        rank: Which share is this rank's.
        options: The dtypes.
        offload: Which part of the state lies elsewhere.
    """
    found = dict.fromkeys(("parameters", "gradients", "optimizer"), 0)
    slots: dict[tuple[int, torch.dtype], int] = {}
    for plan, home in zip(plans, homes_of(plans, offload, options), strict=True):
        low, high = plan.layout.share(rank)
        used = plan.dtype_in_use(options)
        if home.parameters == "device":
            found["parameters"] += (high - low) * used.itemsize
        if plan.members[0].owner < 0:
            continue
        if home.gradients == "device":
            found["gradients"] += (high - low) * (options.reduce_dtype or used).itemsize
        for part in plan.layout.slices(low, high):
            key = (part.group, plan.dtype)
            if key not in slots:
                group = groups[part.group]
                kept = slots_of_steps(group.optimizer, group.settings, plan.dtype)
                copy = plan.dtype.itemsize if used != plan.dtype else 0
                slots[key] = copy + sum(dtype.itemsize for dtype in kept.values())
            found["optimizer"] += round((part.stop - part.start) * slots[key] * offload.parts["device"])
    return found


def whole_bytes(plans: Sequence[Plan], options: ShardOptions) -> dict[int, int]:
    """Bytes of each unit that is whole, by its number."""
    found: dict[int, int] = {}
    for plan in plans:
        size = plan.layout.size * plan.dtype_in_use(options).itemsize
        found[plan.place.unit] = found.get(plan.place.unit, 0) + size
    return found
