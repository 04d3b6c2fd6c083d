"""Which state, parameters and gradients are offloaded to which tier, decided before anything is allocated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from par_groups import state_slots

from .._tiers import Home, Offload
from ..layout.chunk import Chunk
from ..layout.packing import SliceRange
from ..layout.plan import ChunkPlan, ModelPlan
from .disk import Disk, tensors_in
from .link import PinnedSlabs
from .pieces import COPY, Slots, StateBlock, lay_out_blocks, pages, split_into_pieces, tiers_of


@dataclass(frozen=True, kw_only=True)
class ChunkTiers:
    """Tiers of one chunk's data.

    Args:
        home: Tiers of its parameters and of its reduced gradients.
        pieces: Pieces of its slices, each with the optimizer's state in one tier. None: no optimizer has the chunk.
        blocks: Places in the file of those pieces of which anything is on the disk.
    """

    home: Home
    pieces: Sequence[SliceRange] | None
    blocks: Sequence[StateBlock]

    @property
    def elements(self) -> int:
        """Number of elements of all pieces."""
        return sum(part.stop - part.start for part in self.pieces or ())


@dataclass(frozen=True, kw_only=True)
class OffloadPlan:
    """Tiers of all chunks of a module, and the file of what is on the disk.

    Args:
        chunks: Tiers of each chunk.
        shard_starts: First byte in the file of this rank's shard of each chunk's parameters. None: not in the file.
        disk: The file. None: nothing is on a disk, on any rank.
        slabs: Pinned memory for the optimizer's copies on the host tier of an accelerator. None: all is on a CPU.
        shard_slabs: Pinned memory for parameters on the host tier of an accelerator, as `slabs`.
        depth: Number of pieces in memory at a time.
        late: Whether pieces are stepped after the optimizer's own step has returned.
        in_backward: Whether pieces are stepped when their gradients are reduced, before the optimizer's own step.
    """

    chunks: Sequence[ChunkTiers]
    shard_starts: Sequence[int | None]
    disk: Disk | None
    slabs: PinnedSlabs | None
    shard_slabs: PinnedSlabs | None
    depth: int
    late: bool
    in_backward: bool = False

    @property
    def folder(self) -> str:
        """Folder of the file; "" without one."""
        return "" if self.disk is None else self.disk.folder

    @property
    def in_pieces(self) -> bool:
        """Whether any rank steps anything piece by piece."""
        return self.disk is not None or self.slabs is not None


UpdatedSlices = Sequence[Sequence[SliceRange]]
"""Slices that a rank's optimizers update, for each chunk that an optimizer has, in forward order."""

SlotsByGroup = Mapping[tuple[int, torch.dtype, bool], Slots]
"""Slots that an optimizer stores per element, by param group, dtype of the parameters, and `ChunkPlan.kept`."""


def plan_offload(model: ModelPlan, offload: Offload) -> OffloadPlan:
    """Decide the tiers of all chunks, and create the file.

    Args:
        model: Plan of the module.
        offload: Tiers.

    Raises:
        ValueError: The disk has too little free space, or the folder does not exist.
        OSError: The file cannot be created.
    """
    plans, is_on_cpu = model.chunks, model.is_on_cpu
    tiers = assign_tiers(model, updated_slices(model), slots_by_group(model), offload)
    size = max((block.stop for each in tiers for block in each.blocks), default=0)
    shard_starts: list[int | None] = []
    for plan, each in zip(plans, tiers, strict=True):
        on_disk = each.home.parameters == "disk"
        shard_starts.append(size if on_disk else None)
        size += pages(plan.layout.shard * plan.dtype_in_use.itemsize) if on_disk else 0
    copies = [
        (part.stop - part.start) * plan.dtype.itemsize
        for plan, each in zip(plans, tiers, strict=True)
        for part in each.pieces or ()
        if part.tier == "host" and (each.home.parameters == "device" or plan.dtype_in_use != plan.dtype)
    ]
    shards = [
        plan.layout.shard * plan.dtype_in_use.itemsize
        for plan, each in zip(plans, tiers, strict=True)
        if each.home.parameters == "host"
    ]
    return OffloadPlan(
        chunks=tiers,
        shard_starts=shard_starts,
        disk=Disk(offload.folder, size, offload.threads) if offload.uses_disk else None,
        slabs=None if is_on_cpu else PinnedSlabs(copies),
        shard_slabs=None if is_on_cpu else PinnedSlabs(shards),
        depth=offload.ahead,
        late=offload.is_late(is_on_cpu=is_on_cpu),
        in_backward=offload.overlap == "backward",
    )


def updated_slices(model: ModelPlan) -> UpdatedSlices:
    """Return the slices that the optimizers of a rank update."""
    return tuple(
        tuple(plan.layout.slices(*plan.updated(model.ranks[plan.share].index, model.stage)))
        for plan in reversed(model.stepped)
    )


def slots_by_group(model: ModelPlan) -> SlotsByGroup:
    """Return the slots that the optimizers store per element.

    Parameters that are used in another dtype have a master copy, which is the first slot.
    """
    return {
        (group, plan.dtype, plan.kept): ({COPY: plan.dtype} if plan.dtype_in_use != plan.dtype else {})
        | state_slots(model.groups[group].optimizer, model.groups[group].settings, plan.dtype)
        for plan in model.stepped
        for group in {member.group for member in plan.members}
    }


def assign_tiers(model: ModelPlan, updated: UpdatedSlices, slots: SlotsByGroup, offload: Offload) -> list[ChunkTiers]:
    """Return the tiers of each chunk. Pure arithmetic.

    Args:
        model: Plan of the module.
        updated: Slices that a rank's optimizers update.
        slots: Slots that the optimizers store per element.
        offload: Tiers.
    """
    plans, stepped, is_on_cpu = model.chunks, model.stepped, model.is_on_cpu
    homes = dict(zip(plans, homes_of(plans, offload), strict=True))
    # `Offload.piece` bounds each slot of a piece, so the widest dtype decides how many elements a piece has.
    widest = max(
        *(dtype.itemsize for found in slots.values() for dtype in found.values()),
        *(plan.dtype.itemsize for plan in stepped if homes[plan].is_on_disk),
        *(1, 1),
    )
    on_disk = [homes[plan].is_on_disk for plan in reversed(stepped)]
    split = split_into_pieces(
        updated,
        offload.fractions["optimizer"],
        offload.piece_bytes // widest,
        on_disk,
        in_pieces=("disk",) if is_on_cpu else ("host", "disk"),
    )
    pieces = dict(zip(reversed(stepped), split, strict=True))
    in_file = [
        (plan, part)
        for plan in sorted(stepped, key=lambda plan: plan.owner)  # one run of the file per optimizer
        for part in pieces[plan]
        if part.in_pieces
    ]
    blocks: dict[ChunkPlan, list[StateBlock]] = {plan: [] for plan in plans}
    laid_out = lay_out_blocks(
        (
            part.stop - part.start,
            # On the host of an accelerator, the optimizer steps a copy of the device's parameters, in any dtype.
            ({} if is_on_cpu or homes[plan].parameters == "host" else {COPY: plan.dtype})
            | dict(slots[part.group, plan.dtype, plan.kept])
            if part.tier == "disk"
            else {},
            plan.dtype if homes[plan].gradients == "disk" else None,
        )
        for plan, part in in_file
    )
    for (plan, _), block in zip(in_file, laid_out, strict=True):
        blocks[plan].append(block)
    return [ChunkTiers(home=homes[plan], pieces=pieces.get(plan), blocks=blocks[plan]) for plan in plans]


def homes_of(plans: Sequence[ChunkPlan], offload: Offload) -> list[Home]:
    """Return the tiers of each chunk's parameters and gradients, the same on all ranks.

    Args:
        plans: The chunks, in backward order. Chunks that run first in forward stay nearest to the device.
        offload: Tiers.
    """
    sizes = [plan.most_kept * plan.dtype_in_use.itemsize for plan in reversed(plans)]
    parameters, gradients = (tiers_of(sizes, offload.fractions[name]) for name in ("parameters", "gradients"))
    homes = [Home(parameters=own, gradients=sums) for own, sums in zip(parameters, gradients, strict=True)]
    return homes[::-1]


@torch.no_grad()
def offload_chunk_(plan: OffloadPlan | None, number: int, chunk: Chunk) -> None:
    """Move master copies and parameters of a chunk that has just been packed to their tiers.

    Args:
        plan: Tiers of all chunks. None: nothing is offloaded.
        number: Index of the chunk among all chunks.
        chunk: The chunk, whose optimizer has no tensors yet.
    """
    if plan is None:
        return
    tiers = plan.chunks[number]
    chunk.home = tiers.home
    parts = [part for part in tiers.pieces or () if part.in_pieces]
    places: dict[int, torch.Tensor] = {}
    # If the shard is on the host, too, and in the same dtype, the optimizer steps the shard itself.
    is_copied = tiers.home.parameters == "device" or chunk.master is not chunk.own
    for part, block in zip(parts, tiers.blocks, strict=True):
        if plan.slabs is not None and part.tier == "host" and is_copied:
            places[part.start] = plan.slabs.take(chunk.master.dtype, part.stop - part.start)
        elif plan.disk is not None and block.copy_size:
            places[part.start] = tensors_in(plan.disk, block)[COPY]
    if places:
        chunk.move_master_(places)
    start, (low, high) = plan.shard_starts[number], chunk.share
    shard: torch.Tensor | None = None
    if plan.disk is not None and start is not None:
        shard = plan.disk.tensor(start, chunk.own.dtype, high - low)
    elif plan.shard_slabs is not None and tiers.home.parameters == "host":
        shard = plan.shard_slabs.take(chunk.own.dtype, high - low)
    if shard is not None:
        shard.copy_(chunk.own)
        # Checkpoints recognize parameters by their storage, so a piece has the same one. It has a version of its own,
        # by which a write to one piece leaves prefetched data of the other pieces valid.
        stepped = {
            part.start: shard.new_empty(0).set_(
                shard.untyped_storage(),
                shard.storage_offset() + part.start - low,
                (part.stop - part.start,),  # type: ignore[call-overload]
            )
            for part in parts
        }
        chunk.take_own_(shard, stepped)


def unit_bytes(plans: Sequence[ChunkPlan]) -> dict[int, int]:
    """Return the bytes of each gathered unit, by its number, on the rank that has most of it."""
    found: dict[int, int] = {}
    for plan in plans:
        size = plan.most * plan.dtype_in_use.itemsize
        found[plan.place.unit] = found.get(plan.place.unit, 0) + size
    return found
