"""Sizes of the chunks that `shard` would make of a module, which memory plans count before it makes them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.optim import Optimizer

from .._param_groups import in_a_row, param_groups
from .._policies import ShardOptions
from .._stage import STAGES
from .build import members_of, plan_chunks
from .plan import ChunkPlan
from .records import record_of
from .units import choose_units


@dataclass(frozen=True, kw_only=True)
class ChunkSize:
    """Size of a chunk, whose parameters are reduced together, and at stage 3 gathered together with their unit.

    Args:
        elements: Number of elements, padding included.
        unit: Number of the FSDP unit of the chunk. 0 is the root's own, and below stage 3 the only one.
        trained: Whether an optimizer has its parameters, so that gradients are reduced.
        groups: Numbers of the param groups of its parameters, among those of all optimizers. The optimizer gets one
            tensor for each, unless the group is split into pieces.
        share: Index of its data-parallel group: 0 for `group` of `shard`, then `expert_groups`.
    """

    elements: int
    unit: int
    trained: bool
    groups: tuple[int, ...]
    share: int = 0


def chunk_sizes(
    module: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    *,
    stage: int,
    ranks: int,
    options: ShardOptions | None = None,
    expert_groups: Sequence[tuple[Sequence[nn.Parameter], int]] = (),
) -> list[ChunkSize]:
    """Return the chunks that `shard` would make of a module, without changing it or communicating.

    Parameters that are assembled over tensor-parallel ranks are packed like all parameters.

    Args:
        module: Module, which may be on the meta device.
        optimizer: Optimizers, as for `shard`.
        stage: Stage of `shard`, 0 to 3.
        ranks: Number of ranks that shard the parameters.
        options: Options of `shard`; None: the defaults.
        expert_groups: Parameters and number of ranks of each of the `expert_groups` of `shard`.

    Returns:
        The sizes of the chunks. The chunk that the forward needs last is the first.
    """
    plans, _ = plan_module(
        module, optimizer, stage=stage, ranks=ranks, options=options or ShardOptions(), expert_groups=expert_groups
    )
    return [
        ChunkSize(
            elements=plan.layout.size,
            unit=plan.place.unit,
            trained=plan.trained,
            groups=tuple(sorted({member.group for member in plan.members if member.group >= 0})),
            share=plan.share,
        )
        for plan in plans
    ]


def plan_module(
    module: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    *,
    stage: int,
    ranks: int,
    options: ShardOptions,
    expert_groups: Sequence[tuple[Sequence[nn.Parameter], int]],
) -> tuple[list[ChunkPlan], list[list[nn.Module]]]:
    """Return the chunks that `shard` would make of a module, and the modules of its units. See `chunk_sizes`."""
    cuts = STAGES[stage]
    groups = param_groups(in_a_row(optimizer), options.update)
    units = [[module]]
    if cuts.shards_parameters:
        units = choose_units(module, options.units, options.overlap.bucket_of(ranks))
    # There are no process groups yet, so the caller lists the parameters of each group.
    share_of = {parameter: number for number, (shared, _) in enumerate(expert_groups, 1) for parameter in shared}
    found = members_of(module, groups, cuts, units, param_dtype=options.precision.param_dtype)
    members = [replace(member, share=share_of.get(member.parameter, 0)) for member in found]
    records = {member.parameter: record_of(member.parameter, tuple(range(ranks))) for member in members}
    counts = [ranks, *(number for _, number in expert_groups)]
    return plan_chunks(members, records, cuts, counts, options), units
