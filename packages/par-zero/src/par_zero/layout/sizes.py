"""The plan of a module that `shard` would make, which planners count before there are process groups."""

from collections.abc import Sequence
from dataclasses import replace

from torch import nn
from torch.optim import Optimizer

from .._param_groups import in_a_row, param_groups
from .._policies import ShardOptions
from .._stage import STAGES
from .build import members_of, plan_chunks
from .plan import ModelPlan, unpacked_bytes
from .records import record_of
from .sharers import PlannedRanks
from .units import choose_units, register_units


def plan_module(
    module: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    *,
    stage: int,
    ranks: int,
    options: ShardOptions,
    expert_groups: Sequence[tuple[Sequence[nn.Parameter], int]] = (),
    gloo: bool = False,
) -> ModelPlan:
    """Return the plan of a module. The arguments are those of `predict_step`.

    The chunk that the forward needs last is the first. Parameters that are assembled over tensor-parallel ranks are
    packed like all parameters.
    """
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
    plans = plan_chunks(members, records, cuts, counts, options)
    return ModelPlan(
        chunks=plans,
        units=register_units(module, units, {plan.place.unit for plan in plans}) if cuts.shards_parameters else (),
        groups=groups,
        stage=cuts,
        options=options,
        ranks=[PlannedRanks(count=count, receives=gloo) for count in counts],
        unpacked=unpacked_bytes(module, plans),
    )
