"""Checks that each optimizer receives the full tensors, or all tensors, that its update reads."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from par_groups import JointOptimizer, ProcessGroups, sharding_of
from par_zero import UpdateScope, find_scope_violation, update_scope_of


def joined(given: Any) -> Any:
    """Return a list of optimizers as one optimizer, and any other object unchanged."""
    if isinstance(given, list | tuple) and given and all(isinstance(one, Optimizer) for one in given):
        return JointOptimizer(*given)
    return given


def declared(option: Any, group: Mapping[str, Any]) -> bool:
    """Return what `atomic` or `elementwise` of `par_zero.shard` says of a param group.

    Args:
        option: True, False, or a function of a param group.
        group: The param group.
    """
    return bool(option(group) if callable(option) else option)


def needs_whole(optimizer: Optimizer | None, options: Mapping[str, Any]) -> bool:
    """Return whether any param group of an optimizer has whole tensors under par-zero.

    Args:
        optimizer: The optimizer.
        options: Arguments of `par_zero.OptimizerUpdate`.
    """
    every = optimizer.optimizers if isinstance(optimizer, JointOptimizer) else [optimizer] if optimizer else []
    return any(
        declared(options.get("atomic", False), group)
        or (
            update_scope_of(one, group) is not UpdateScope.ELEMENT
            and not declared(options.get("elementwise", False), group)
        )
        for one in every
        for group in one.param_groups
    )


def check_sees_enough(
    optimizer: Optimizer,
    models: Sequence[nn.Module],
    groups: ProcessGroups,
    options: Mapping[str, Any],
    *,
    alone: bool,
) -> None:
    """Check that the update of an optimizer does not depend on the number of ranks.

    Args:
        optimizer: The optimizer, before its first step.
        models: The models of its parameters.
        groups: The groups of ranks along each axis.
        options: Arguments of `par_zero.OptimizerUpdate`, in which a user declares the kind of the optimizer.
        alone: Whether it will step the models' own parameters. Otherwise par-zero checks it again, and can gather
            tensors for it.

    Raises:
        ValueError: It reads all tensors, or full tensors, and a rank has only some of them or shards of them.
    """
    if isinstance(optimizer, JointOptimizer):
        for one in optimizer.optimizers:
            check_sees_enough(one, models, groups, options, alone=alone)
        return
    kind, parts = type(optimizer).__name__, [axis for axis in ("tensor", "pipeline") if groups.size(axis) > 1]
    names = {parameter: name for model in models for name, parameter in model.named_parameters()}
    for number, group in enumerate(optimizer.param_groups) if parts or alone else ():
        scope = update_scope_of(optimizer, group)
        by_element, whole = (declared(options.get(name, False), group) for name in ("elementwise", "atomic"))
        if parts and scope is UpdateScope.MODEL:
            raise ValueError(
                f"optimizer={kind}: it updates each parameter of param_groups[{number}] by a quantity of all of them, "
                f"such as one norm of all gradients, and each of {groups.size(parts[0])} {parts[0]} ranks has only "
                f"some of them; use another optimizer, or set {parts[0]}=1"
            )
        if parts and scope is UpdateScope.UNKNOWN and not (by_element or whole):
            raise ValueError(
                f"optimizer={kind}: par-zero does not know whether this class updates each element separately, and "
                f"each of {groups.size(parts[0])} {parts[0]} ranks has only some of the parameters; pass "
                "zero=dict(stage=..., update=dict(elementwise=True)) if it does, and atomic=True instead if it does not"
            )
        if parts and scope is UpdateScope.UNKNOWN:
            problem = find_scope_violation(optimizer, group, UpdateScope.ELEMENT if by_element else UpdateScope.TENSOR)
            if problem:
                raise ValueError(
                    f"{'elementwise' if by_element else 'atomic'}=True for param_groups[{number}] of the {kind}: a "
                    f"trial shows that {problem}; use another optimizer, or set {parts[0]}=1"
                )
        if not alone or scope is UpdateScope.ELEMENT or by_element:
            continue
        for parameter in group["params"]:
            record = sharding_of(parameter)
            if record.local_numel < record.numel:
                raise ValueError(
                    f"optimizer={kind}: it would treat a shard of {names[parameter]!r} as the full tensor, "
                    f"since this rank has {record.local_numel} of {record.numel} elements; use an optimizer that "
                    "updates each element separately, or set tensor=1"
                )
            if len(record.boxes) > 1:
                raise ValueError(
                    f"optimizer={kind}: it would update {names[parameter]!r} as one tensor, and the sharding metadata "
                    f"lists {len(record.boxes)} in it, such as q, k and v; use 'data_parallel' in gradient_handlers, "
                    "which separates them with zero=dict(stage=0, update=dict(atomic=True))"
                )


def cut_state_(optimizer: Optimizer, model: nn.Module) -> None:
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
