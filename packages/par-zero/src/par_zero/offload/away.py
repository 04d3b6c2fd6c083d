"""What of the optimizers' state lies elsewhere than where they make it, planned before anything is changed."""

from collections.abc import Sequence
from dataclasses import dataclass

from .._param_groups import ParamGroup
from .._stage import Stage
from .._tiers import Offload
from ..layout.build import Plan
from ..layout.packing import Range
from ..optimizer.probe import slots_of_steps
from .disk import Disk
from .pieces import Block, blocks, cut


@dataclass(frozen=True, kw_only=True)
class Away:
    """Which state of the optimizers lies elsewhere than where they make it.

    Args:
        cuts: For each chunk its pieces, each in one tier; None for a chunk that no optimizer has.
        blocks: Where the pieces on the disk lie in its file, optimizer by optimizer, chunk by chunk.
        disk: The file; None where nothing lies on a disk, on any rank.
        ahead: Number of pieces that are in memory at a time.
    """

    cuts: Sequence[Sequence[Range] | None]
    blocks: Sequence[Block]
    disk: Disk | None
    ahead: int


def plan_away(plans: Sequence[Plan], groups: Sequence[ParamGroup], stage: Stage, rank: int, offload: Offload) -> Away:
    """Says what lies where, and makes the file for what lies on a disk.

    Args:
        plans: The chunks, which have no memory yet, the last that runs first.
        groups: The param groups of all optimizers.
        stage: The ZeRO stage: of what a rank keeps its share alone.
        rank: Which share is this rank's.
        offload: Which part goes where.

    Raises:
        ValueError: The disk has too little room, or the folder is none.
        OSError: The file cannot be made.
    """
    stepped = [plan for plan in plans if plan.members[0].owner >= 0]
    slots = {
        (group, plan.members[0].parameter.dtype): slots_of_steps(
            groups[group].optimizer, groups[group].settings, plan.members[0].parameter.dtype
        )
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
        (part.stop - part.start, slots[part.group, plan.members[0].parameter.dtype])
        for owner in sorted({plan.members[0].owner for plan in stepped})
        for plan in stepped
        if plan.members[0].owner == owner
        for part in pieces[plan]
        if part.tier == "disk"
    ]
    in_file = blocks(on_disk)
    disk = None
    if offload.parts["disk"]:
        disk = Disk(offload.folder, sum(block.size for block in in_file), offload.threads)
    return Away(cuts=[pieces.get(plan) for plan in plans], blocks=in_file, disk=disk, ahead=offload.ahead)
