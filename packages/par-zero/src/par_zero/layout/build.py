"""Chunks out of a module's parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from par_groups import Sharding

from .chunk import Chunk, Member, grouped
from .packing import Item, pack, pack_whole
from .units import Place


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How chunks are made.

    Args:
        stage: 0 to 3.
        rank: Whose share this rank keeps.
        ranks: The number of shares.
        bucket: Bytes of a chunk, about.
        param_dtype: Of the parameters in use; None leaves each its own.
        reduce_dtype: Of sums of gradients; None: the parameters'.
        atomic: Whether no parameter is cut.
    """

    stage: int
    rank: int
    ranks: int
    bucket: int
    param_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    atomic: bool


def members_of(module: nn.Module, optimizer: Optimizer | None, stage: int) -> list[Member]:
    """The parameters that are packed: those of the optimizer, or that want gradients; at stage 3 frozen ones too."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    groups = {
        parameter: number
        for number, group in enumerate(() if optimizer is None else optimizer.param_groups)
        for parameter in group["params"]
    }
    return [
        Member(parameter=parameter, names=tuple(each), group=groups.get(parameter, -1), shape=parameter.shape)
        for parameter, each in names.items()
        if parameter in groups or stage == 3 or (optimizer is None and parameter.requires_grad)
    ]


def make_chunks(
    members: Sequence[Member],
    place_of: Mapping[nn.Parameter, Place],
    records: Mapping[nn.Parameter, Sharding],
    plan: Plan,
) -> list[Chunk]:
    """Packs parameters, the last first: their gradients come first.

    A chunk holds parameters of one place, dtype and device that are trained, or that are not. What ranks of other axes
    hold alike lies apart from what they hold each for itself, so that it is cut alike there.
    """
    kinds: dict[tuple[object, ...], list[Member]] = {}
    for member in reversed(members):
        parameter = member.parameter
        trained = member.group >= 0 or parameter.requires_grad
        copies = frozenset(rank for box in records[parameter].boxes for rank in box.copies)
        kinds.setdefault((place_of[parameter], parameter.dtype, parameter.device, trained, copies), []).append(member)
    chunks: list[Chunk] = []
    for kind in kinds.values():
        for part in [kind] if plan.stage == 3 else grouped(kind, plan.bucket):
            chunks.append(_make(part[::-1], plan))
            chunks[-1].items = place_of[part[0].parameter].items
    first = {member.parameter: position for position, member in enumerate(members)}
    # A chunk is complete when the first of its parameters has its gradient, and chunks are reduced in one order.
    return sorted(chunks, key=lambda chunk: -min(first[member.parameter] for member in chunk.members))


def _make(members: Sequence[Member], plan: Plan) -> Chunk:
    items = [Item(numel=member.shape.numel(), group=member.group) for member in members]
    layout = (pack_whole if plan.atomic else pack)(items, plan.ranks)
    first = members[0].parameter
    original = torch.zeros(layout.size, dtype=first.dtype, device=first.device)
    with torch.no_grad():
        for member, (start, stop) in zip(members, layout.slots, strict=True):
            original[start:stop].view(member.shape).copy_(member.parameter)
    low, high = layout.share(plan.rank)
    real = first.is_floating_point()  # complex ones keep their dtype, and their gradients too
    dtype = plan.param_dtype if plan.param_dtype is not None and real else first.dtype
    reduce_dtype = plan.reduce_dtype if plan.reduce_dtype is not None and real else dtype
    flat = original if dtype == first.dtype else original.to(dtype)
    share = flat[low:high].clone() if plan.stage == 3 else flat[low:high]
    chunk = Chunk(members, layout, plan.rank, flat=flat, share=share, reduce_dtype=reduce_dtype)
    if dtype != first.dtype:
        chunk.master = original.clone() if plan.stage == 0 else original[low:high].clone()
    elif plan.stage == 0:
        chunk.master = flat
    return chunk
