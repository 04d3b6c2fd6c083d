"""Checks before anything is changed, of what one rank can see: its module, optimizers, options and groups."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from par_groups import Collective, UpdateScope, backend_of, check_collectives, has_stepped, original_name

from .._param_groups import ParamGroup
from .._policies import ParameterInit, ShardOptions
from .._stage import STAGES
from .._tiers import Offload
from ..layout.fill import device_of
from ..layout.sharers import DataParallelGroup
from ..layout.units import tensors_of
from ..offload.disk import check_room
from ..optimizer.check import check_way_of_working
from ..placement.policies import POLICIES

ENGINE = "par_zero"
"""Name of the attribute of a sharded module that holds its engine."""

_PACKED = "par_zero_packed"
"""Name of a sharded parameter's attribute with its `id`: a copy has the attribute, too, but another `id`."""


def check_module(module: nn.Module, stage: int) -> None:
    """Check that a module can be sharded, and the number of the ZeRO stage.

    Raises:
        ValueError, TypeError: The module cannot be sharded, or there is no such stage.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}; give an nn.Module")
    if type(stage) is not int or stage not in range(len(STAGES)):
        raise ValueError(f"stage is {stage!r}; it can be 0, 1, 2 or 3")
    remedy = "shard a module once, as a whole, or parts of it that have no parameter in common, and not the whole"
    if any(ENGINE in part.__dict__ for part in module.modules()):
        raise ValueError(f"the {type(module).__name__}, or a part of it, is sharded already; {remedy}")
    for name, parameter in module.named_parameters():
        if parameter.__dict__.get(_PACKED) == id(parameter):
            raise ValueError(f"{name!r} is sharded already, as a parameter of another module; {remedy}")
        has_gradient = parameter.is_floating_point() or parameter.is_complex()
        # Quantized weights below adapters are integers. Stages 0 to 2 leave frozen parameters alone.
        if not has_gradient and (stage == 3 or parameter.requires_grad):
            raise ValueError(
                f"{name!r} has dtype {parameter.dtype}, which has no gradients, and stage {stage} shards it; make it a "
                "buffer, use stage 0, 1 or 2 if it is frozen, or load it with bnb_4bit_quant_storage=torch.bfloat16"
            )
        if hasattr(parameter, "placements"):
            raise ValueError(
                f"{name!r} is a DTensor; shard plain parameters, with a par_groups.Sharding if they are cut"
            )
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise ValueError(
                f"{name!r} has sparse=True: its gradients are sparse, and chunks are dense; set sparse=False"
            )


def check_optimizers(
    module: nn.Module,
    groups: Sequence[ParamGroup],
    stage: int,
    tensor: dist.ProcessGroup | None,
    shares: Sequence[DataParallelGroup],
) -> None:
    """Check the optimizers of a module, as far as this rank can see.

    Args:
        module: Module.
        groups: Param groups of all its optimizers.
        stage: Number of the ZeRO stage.
        tensor: Ranks that hold the other shards of parameters which must be full, or None.
        shares: Data-parallel groups.

    Raises:
        ValueError: An optimizer cannot step what a rank has of the module.
    """
    names = {parameter: name for name, parameter in module.named_parameters()}
    by_optimizer: dict[int, list[ParamGroup]] = {}
    for group in groups:
        by_optimizer.setdefault(group.owner, []).append(group)
    for own in by_optimizer.values():
        _check_state(own[0].optimizer, names)
        _check_parameters(own, names)
    if groups:
        _check_each_has_one(groups, names)
    shards = max(dist.get_world_size(share.group) for share in shares)
    replicas = max(len(share.replica_ranks) for share in shares)
    for own in by_optimizer.values():
        # This check may run trial steps of the optimizer, so it comes after the checks that only read attributes.
        check_way_of_working(own, names, stage, tensor, shards=shards, replicas=replicas)


def mark_packed(parameters: Iterable[nn.Parameter]) -> None:
    """Mark parameters as sharded, so that `shard` rejects them as part of the module or of a larger one."""
    for parameter in parameters:
        setattr(parameter, _PACKED, id(parameter))


def _check_state(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> None:
    """Check that no state was made from parameters on the meta device, which have no values."""
    for parameter, name in names.items():
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                raise ValueError(
                    f"the {type(optimizer).__name__} has made the state {key!r} of {name!r} on the meta device, where "
                    "it has no values; make the optimizer when the parameters are real, or take one that makes its "
                    "state in its first step, such as AdamW"
                )


def check_offload(
    offload: Offload,
    module: nn.Module,
    groups: Sequence[ParamGroup],
    stage: int,
    device: torch.device | None,
) -> None:
    """Check a budget and the offloaded tiers, which need parameters on a CPU and elementwise optimizers.

    Args:
        offload: Tiers of optimizer state, parameters and gradients.
        module: Module.
        groups: Param groups of all optimizers.
        stage: Number of the ZeRO stage.
        device: Device to which parameters move; None: they stay on their device.

    Raises:
        ValueError: The module or the stage does not support a tier or the budget.
    """
    places = {device or parameter.device for parameter in module.parameters()}
    away = [place for place in places if place.type not in ("cpu", "meta")]
    if offload.overlap is True and stage < 3 and not away:
        raise ValueError(
            "offload has overlap=True, which needs stage 3, where a unit can wait for its step before it is gathered; "
            f"this is stage {stage}; leave overlap out"
        )
    if offload.overlap == "backward" and (not away or offload.uses_disk or "optimizer" not in offload.offloaded):
        raise ValueError(
            f"overlap='backward', optimizer={offload.optimizer!r}: a thread steps pieces during backward only on the "
            "host of an accelerator, without a disk; pass optimizer='host' or a part of it, or remove overlap"
        )
    if "device" in offload.budgets and not offload.auto and not STAGES[stage].shards_parameters:
        raise ValueError(
            f"budget={offload.budget!r} needs stage 3, where units are gathered before they run; this is stage "
            f"{stage}: pass stage=3, let optimizer be 'auto', or leave budget out"
        )
    # The lookup raises an error if no package provides the policy.
    _ = POLICIES[offload.policy]
    for name in ("parameters", "gradients"):
        if name in (*offload.offloaded, *offload.auto) and not STAGES[stage].shards_parameters:
            raise ValueError(
                f"{name}={getattr(offload, name)!r} needs stage 3, where units are gathered before they run; this is "
                f"stage {stage}"
            )
    for place in away:
        _check_link(offload, module, groups, place)
    if offload.uses_disk:
        check_room(offload.folder, 0)
    if "optimizer" in offload.offloaded and not groups:
        raise ValueError(
            f"offload has optimizer {offload.optimizer!r}, but there is no optimizer; give the one that steps the "
            "module, or leave offload out"
        )
    for group in groups:
        if group.atomic and (offload.uses_disk or "optimizer" in (*offload.offloaded, *offload.auto)):
            fix = {
                UpdateScope.ELEMENT: ", or remove atomic",
                UpdateScope.UNKNOWN: ", or pass update=dict(elementwise=True) if it updates each element separately",
            }
            raise ValueError(
                f"{group.place}: their optimizer needs full tensors, and offload would split them into pieces; remove "
                f"offload{fix.get(group.scope, '')}"
            )


def _check_link(offload: Offload, module: nn.Module, groups: Sequence[ParamGroup], device: torch.device) -> None:
    """Check that the tiers are supported for parameters on an accelerator.

    Raises:
        ValueError: A tier is not supported.
    """
    if "gradients" in (*offload.offloaded, *offload.auto):
        raise ValueError(
            f"gradients={offload.gradients!r}: the parameters are on {str(device)!r}, from where gradients follow the "
            f"optimizer; remove gradients, and pass optimizer={'auto' if offload.auto else 'host'!r}"
        )
    if offload.parameters == "auto":
        if not offload.budgets.get("host"):
            raise ValueError(
                f"parameters='auto', budget={offload.budget!r}: the parameters are on {str(device)!r}, which can fetch "
                "them from its host and not from a disk; pass bytes of the host in budget, or remove parameters"
            )
    elif offload.furthest.fractions["parameters"]["disk"]:
        raise ValueError(
            f"parameters={offload.parameters!r}: the parameters are on {str(device)!r}, which can fetch them from its "
            "host and not from a disk; pass parameters='host'"
        )
    if "parameters" in offload.offloaded:
        # Fractions of several tiers whose sum is 1 may leave a rounding error on the device.
        if groups and offload.furthest.fractions["optimizer"]["device"] > 1e-9:
            raise ValueError(
                f"parameters={offload.parameters!r}, optimizer={offload.optimizer!r}: parameters on the host of "
                f"{str(device)!r} are stepped there; pass optimizer='host', or remove parameters"
            )
        for name, parameter in module.named_parameters():
            if type(parameter) is not nn.Parameter:
                raise ValueError(
                    f"parameters={offload.parameters!r}: {original_name(name)!r} is a {type(parameter).__name__}, and "
                    "only a plain torch.nn.Parameter can leave its device; remove parameters"
                )
    if not offload.offloaded:
        return
    for group in groups:
        if group.settings.get("capturable"):
            raise ValueError(
                f"{group.place} has capturable=True, which needs state on an accelerator, and offload steps it on the "
                "host; set capturable=False, or remove offload"
            )
    try:
        torch.empty(1, pin_memory=True)
    except RuntimeError as error:
        raise ValueError(
            f"offload={offload.offloaded}: the host has no pinned memory for {str(device)!r} ({error}), so each "
            "copy would block the step; remove offload"
        ) from error


def check_backends(groups: Sequence[dist.ProcessGroup], device: torch.device, stage: int) -> None:
    """Check that groups support the collectives of `shard`, unless their backend is known. Collective over each group.

    Args:
        groups: Groups of the ranks that shard, and of their replicas.
        device: Device of the chunks.
        stage: ZeRO stage.

    Raises:
        ValueError: A group does not support a collective; on every rank.
    """
    for group in groups:
        needed: list[Collective] = ["broadcast", "all_reduce", "all_gather", "reduce_scatter"]
        check_collectives(group, device, needed, f"shard(stage={stage})")


def check_abstract(module: nn.Module, init: ParameterInit, groups: Iterable[dist.ProcessGroup]) -> None:
    """Check the device on which tensors of the meta device get memory.

    Raises:
        ValueError: A group cannot send tensors of that device.
    """
    place = device_of(module, init.device) if init.init_fn is None or init.device is not None else None
    for ranks in groups:
        abstract = any(tensor.is_meta for _, tensor in tensors_of(module))
        if place is not None and abstract and backend_of(ranks, place.type) is None:
            raise ValueError(
                f"device={str(place)!r}: parameters on the meta device would get memory there, and the group with the "
                f"backend {dist.get_backend(ranks)!r} sends no tensors of it; pass init=ParameterInit(device=...)"
            )


def _check_parameters(groups: Sequence[ParamGroup], names: Mapping[nn.Parameter, str]) -> None:
    """Check that an optimizer has not stepped, has only parameters of the module, and has no option that is NaN."""
    optimizer = groups[0].optimizer
    kind = type(optimizer).__name__
    if has_stepped(optimizer):
        raise ValueError(f"the {kind} has stepped already; shard first, then load its state from a checkpoint")
    for group in groups:
        for i, parameter in enumerate(group.settings["params"]):
            if parameter not in names:
                raise ValueError(
                    f"param_groups[{group.number}].params[{i}] of the {kind} is no parameter of the module; make the "
                    "optimizer from the parameters of the module that is sharded"
                )
        for key, value in group.settings.items():
            if isinstance(value, float) and math.isnan(value):
                raise ValueError(f"param_groups[{group.number}][{key!r}] of the {kind} is NaN; give a number")


def _check_each_has_one(groups: Sequence[ParamGroup], names: Mapping[nn.Parameter, str]) -> None:
    """Check that every parameter that requires gradients has one optimizer."""
    group_of: dict[nn.Parameter, ParamGroup] = {}
    for group in groups:
        for parameter in group.settings["params"]:
            if parameter in group_of:
                raise ValueError(
                    f"{names[parameter]!r} is in {group_of[parameter].place} and in {group.place}, which would both "
                    "step it; give each parameter to one optimizer"
                )
            group_of[parameter] = group
    kinds = " and the ".join(dict.fromkeys(type(group.optimizer).__name__ for group in groups))
    for parameter, name in names.items():
        if parameter.requires_grad and parameter not in group_of:
            raise ValueError(
                f"{name!r} wants gradients, but the {kinds} does not have it, so each rank would keep its own; give it "
                "to the optimizer, or call requires_grad_(False)"
            )


def check_groups(
    share: DataParallelGroup,
    gathers: dist.ProcessGroup | None = None,
    tensor: dist.ProcessGroup | None = None,
    *,
    place: str = "",
) -> None:
    """Check that groups have only this rank in common, and that both communicators have the same ranks.

    Args:
        share: Data-parallel ranks.
        gathers: Second communicator of the group, on which stage 3 all-gathers. Default: none.
        tensor: Ranks that hold the other shards of parameters which must be full. Default: none.
        place: Prefix of the groups' names in errors, such as "expert_groups[0].". Default: empty.

    Raises:
        ValueError: The groups have more ranks in common than this rank, `gathers` has other ranks than the group, or
            `index_of` is wrong for this rank.
    """
    ranks = dist.get_process_group_ranks(share.group)
    if gathers is not None and dist.get_process_group_ranks(gathers) != ranks:
        raise ValueError(
            f"gather_group={dist.get_process_group_ranks(gathers)}: group has the ranks {ranks}; pass a communicator "
            "of the same ranks in the same order, or None"
        )
    if tensor is not None:
        parts = sorted(dist.get_process_group_ranks(tensor))
        if set(share.near) & set(parts) != {dist.get_rank()}:
            raise ValueError(
                f"tensor_group={parts}: the data-parallel ranks and their replicas are {share.near}, and "
                "tensor-parallel ranks have only this rank in common with them; pass the group of this rank's tensor "
                "axis"
            )
    if set(ranks) & set(share.replica_ranks) != {dist.get_rank()}:
        raise ValueError(
            f"{place}replicas are the ranks {sorted(share.replica_ranks)}, and group the ranks {sorted(ranks)}; a "
            "rank's replicas are itself and ranks of other groups"
        )
    rank, place_in_group = dist.get_rank(), dist.get_rank(share.group)
    if share.index_of is not None and share.index_of(rank) != place_in_group:
        raise ValueError(
            f"{place}index_of({rank})={share.index_of(rank)!r}: this rank is number {place_in_group} of its group; "
            "return the position of each rank in its own group, or remove index_of"
        )


def check_expert_groups(groups: object, first: DataParallelGroup, module: nn.Module, options: ShardOptions) -> None:
    """Check the data-parallel groups of parameters that only some ranks hold.

    Raises:
        TypeError: `groups` is not a list of them.
        ValueError: A group is not possible, or two groups name one parameter.
    """
    if not isinstance(groups, Sequence) or not all(isinstance(each, DataParallelGroup) for each in groups):
        raise TypeError(
            f"expert_groups={groups!r}: it must be a list; pass one, such as [par_zero.DataParallelGroup(group)]"
        )
    own = {id(parameter) for parameter in module.parameters()}
    named: set[int] = set()
    for number, each in enumerate(groups):
        place = f"expert_groups[{number}]"
        if each.divisor is not None and (type(each.divisor) is not int or each.divisor < 1):
            raise ValueError(f"{place}.divisor={each.divisor!r}: a divisor is 1 or more; pass such an int, or None")
        if each.divisor is not None and options.precision.reduce_op == "sum":
            raise ValueError(
                f"{place}.divisor={each.divisor}: reduce_op='sum' divides by nothing; remove one of the two"
            )
        check_groups(each, place=f"{place}.")
        if each.parameters is None and set(first.near) < set(each.near):
            raise ValueError(
                f"{place} has the ranks {each.near}: they include all ranks of group, {first.near}, so sharding "
                "metadata cannot decide which parameters belong to it; pass DataParallelGroup(group, parameters=[...])"
            )
        names = {id(parameter) for parameter in each.parameters or ()}
        if names & named:
            raise ValueError(f"{place}.parameters: another group names one of them, too; name each in one group")
        if not names <= own:
            raise ValueError(f"{place}.parameters: the module does not have one of them; name its own parameters")
        named |= names
