"""Whether an optimizer sees of a model what it needs: some look at whole tensors, or at all of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from par_groups import JointOptimizer, ProcessGroups, sharding_of
from par_zero import UpdateScope, find_scope_violation, update_scope_of


def joined(given: Any) -> Any:
    """A list of optimizers as one optimizer; anything else as it is."""
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
    """Checks that what an optimizer does to a parameter does not depend on how many ranks there are.

    Args:
        optimizer: The optimizer, which has not stepped.
        models: What it trains.
        groups: The groups of ranks along each axis.
        options: Arguments of `par_zero.OptimizerUpdate`, by which a user declares how an optimizer works.
        alone: Whether it will step the models' own parameters. Else par-zero has a look, which can gather tensors.

    Raises:
        ValueError: It looks at all tensors, of which ranks have parts; or at whole ones, which are cut.
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
                f"the {kind} steps a parameter by what it sees of all (param_groups[{number}]), such as one norm of "
                f"all gradients, and each of {groups.size(parts[0])} {parts[0]} ranks sees a part; take another "
                f"optimizer, or {parts[0]}=1"
            )
        if parts and scope is UpdateScope.UNKNOWN and not (by_element or whole):
            raise ValueError(
                f"optimizer={kind}: par-zero does not know what this class looks at, and each of "
                f"{groups.size(parts[0])} {parts[0]} ranks has some of the parameters; pass zero=dict(stage=..., "
                "update=dict(elementwise=True)) if it treats each element by itself, or else update=dict(atomic=True)"
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
                    f"the {kind} would step a part of {names[parameter]!r} as if it were the whole: this rank has "
                    f"{record.local_numel} of {record.numel} elements; give it to an optimizer that works element by "
                    "element, or tensor=1"
                )
            if len(record.boxes) > 1:
                raise ValueError(
                    f"the {kind} would step {names[parameter]!r} as one tensor, of which the record says that it is "
                    f"{len(record.boxes)}, such as q, k and v; leave 'data_parallel' in gradient_handlers, which takes "
                    "them apart with zero=dict(stage=0, update=dict(atomic=True))"
                )


def cut_state_(optimizer: Optimizer, model: nn.Module) -> None:
    """Cuts what an optimizer's constructor has made for whole parameters, as Adagrad's does, as they are cut."""
    for parameter in model.parameters():
        state, record = optimizer.state.get(parameter, {}), sharding_of(parameter)
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == record.shape != parameter.shape:
                part = value.new_ones(parameter.shape)  # by which padding can be divided
                for box in record.boxes:
                    box.of(part).copy_(value[box.slices])
                state[name] = part


def check_partial_sums(model: nn.Module, groups: ProcessGroups) -> None:
    """Checks that a gradient that is a partial sum is so over all tensor ranks that have a copy, as par-zero takes it.

    Raises:
        ValueError: A record that says otherwise.
    """
    tensor = set(groups.ranks("tensor"))
    for name, parameter in model.named_parameters():
        record = sharding_of(parameter)
        for box in record.boxes:
            copies = len(tensor.intersection(box.copies))
            if box.sum_over and box.numel < record.numel and groups.size(box.sum_over) != copies:
                raise ValueError(
                    f"the gradient of {name!r} is a sum over {box.sum_over} of {groups.size(box.sum_over)} ranks, and "
                    f"{copies} tensor ranks have copies, so it cannot be put together for an optimizer that must see "
                    "whole tensors; give it to one that works element by element"
                )
