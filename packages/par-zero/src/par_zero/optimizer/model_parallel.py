"""Optimizers of models whose parameters are also divided over tensor and pipeline ranks: checks, and their state.

`shard` knows the ranks that share its data only. Call these functions where the groups of all axes are known.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from par_groups import JointOptimizer, ProcessGroups, UpdateScope, find_scope_violation, sharding_of

from .._param_groups import ParamGroup, param_groups
from .._policies import OptimizerUpdate


def needs_full_tensors(optimizer: Optimizer | None, update: Mapping[str, Any]) -> bool:
    """Return whether any param group of an optimizer gets full tensors from `shard`.

    Args:
        optimizer: The optimizer; None for a model without one.
        update: Arguments of `OptimizerUpdate`.
    """
    return any(group.atomic for group in _groups_of(optimizer, update))


def check_update_scope(
    optimizer: Optimizer,
    models: Sequence[nn.Module],
    groups: ProcessGroups,
    update: Mapping[str, Any],
    *,
    is_sharded: bool,
) -> None:
    """Check that an optimizer's update needs no element that is only on other tensor or pipeline ranks.

    Args:
        optimizer: The optimizer, before its first step.
        models: The models of its parameters.
        groups: The groups of ranks along each axis.
        update: Arguments of `OptimizerUpdate`, by which a user declares the scope of the optimizer.
        is_sharded: Whether `shard` will take the optimizer. It then checks shards itself, and can gather full tensors.

    Raises:
        ValueError: The update reads all tensors, or full tensors, and a rank has only some of them or shards of them.
    """
    parts = [axis for axis in ("tensor", "pipeline") if groups.size(axis) > 1]
    if is_sharded and not parts:
        return
    names = {parameter: name for model in models for name, parameter in model.named_parameters()}
    for group in _groups_of(optimizer, update):
        kind = type(group.optimizer).__name__
        if parts and group.scope is UpdateScope.MODEL:
            raise ValueError(
                f"optimizer={kind}: it updates each parameter of param_groups[{group.number}] by a quantity of all of "
                f"them, such as one norm of all gradients, and each of {groups.size(parts[0])} {parts[0]} ranks has "
                f"only some of them; use another optimizer, or set {parts[0]}=1"
            )
        if parts and group.scope is UpdateScope.UNKNOWN and not group.declared:
            raise ValueError(
                f"optimizer={kind}: par-zero does not know whether this class updates each element separately, and "
                f"each of {groups.size(parts[0])} {parts[0]} ranks has only some of the parameters; pass "
                "zero=dict(stage=..., update=dict(elementwise=True)) if it does, and atomic=True instead if it does not"
            )
        if parts and group.scope is UpdateScope.UNKNOWN:
            allowed = UpdateScope.TENSOR if group.atomic else UpdateScope.ELEMENT
            problem = find_scope_violation(group.optimizer, group.settings, allowed)
            if problem:
                raise ValueError(
                    f"{'atomic' if group.atomic else 'elementwise'}=True for {group.place}: a trial shows that "
                    f"{problem}; use another optimizer, or set {parts[0]}=1"
                )
        for parameter in group.settings["params"] if group.atomic and not is_sharded else ():
            _check_is_full(parameter, names[parameter], kind)


def _groups_of(optimizer: Optimizer | None, update: Mapping[str, Any]) -> list[ParamGroup]:
    members = optimizer.optimizers if isinstance(optimizer, JointOptimizer) else [optimizer] if optimizer else []
    return param_groups(members, OptimizerUpdate(**update))


def _check_is_full(parameter: nn.Parameter, name: str, kind: str) -> None:
    """Raise ValueError if an optimizer that reads full tensors would get a shard, or several tensors as one."""
    record = sharding_of(parameter)
    if record.local_numel < record.numel:
        raise ValueError(
            f"optimizer={kind}: it would treat a shard of {name!r} as the full tensor, since this rank has "
            f"{record.local_numel} of {record.numel} elements; use an optimizer that updates each element separately, "
            "or set tensor=1"
        )
    if len(record.boxes) > 1:
        raise ValueError(
            f"optimizer={kind}: it would update {name!r} as one tensor, and the sharding metadata lists "
            f"{len(record.boxes)} in it, such as q, k and v; use 'data_parallel' in gradient_handlers, which separates "
            "them with zero=dict(stage=0, update=dict(atomic=True))"
        )


def shard_state_(optimizer: Optimizer, model: nn.Module) -> None:
    """Shard state that an optimizer's constructor has made for full parameters, such as Adagrad's, like these."""
    for parameter in model.parameters():
        state, record = optimizer.state.get(parameter, {}), sharding_of(parameter)
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == record.shape != parameter.shape:
                part = value.new_ones(parameter.shape)  # ones, since some optimizers divide by their state
                for box in record.boxes:
                    box.of(part).copy_(value[box.slices])
                state[name] = part


def check_partial_sums(model: nn.Module, groups: ProcessGroups) -> None:
    """Check that a partial gradient is partial over all tensor ranks that hold a replica, as par-zero assumes.

    Raises:
        ValueError: The sharding metadata of a parameter contradicts this.
    """
    tensor = set(groups.ranks("tensor"))
    for name, parameter in model.named_parameters():
        record = sharding_of(parameter)
        for box in record.boxes:
            copies = len(tensor.intersection(box.copies))
            if box.sum_over and box.numel < record.numel and groups.size(box.sum_over) != copies:
                raise ValueError(
                    f"{name!r}: its gradient is partial over {groups.size(box.sum_over)} ranks of {box.sum_over}, and "
                    f"{copies} tensor ranks hold replicas, so it cannot be gathered for an optimizer that needs full "
                    "tensors; use an optimizer that updates each element separately"
                )
