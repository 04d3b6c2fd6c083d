"""The ranks that shard and average the weights of experts together."""

from collections.abc import Sequence

from torch import nn

from par_groups import EXPERTS, ProcessGroups, attributes, averaged_axes, sharding_of
from par_layers import TokenDispatcher, expert_modules
from par_zero import DataParallelGroup

EXPERT_COPIES = ("data", "expert_data")
"""The axes over which ranks hold replicas of the same experts, if these are not all data ranks."""


def share_of_experts(model: nn.Module, groups: ProcessGroups) -> list[DataParallelGroup]:
    """Return the group that shards the weights of experts instead of all data ranks: the ranks with replicas of them.

    Args:
        model: This rank's part of a model.
        groups: The groups of ranks along each axis.

    Returns:
        A list of one share. `shard` divides its gradients by the number of all data ranks, as other gradients, since
        each of them has routed tokens to the experts. An empty list if all data ranks hold the same experts.
    """
    topology, axes, averaged = groups.topology, EXPERT_COPIES, averaged_axes(groups.topology)
    if EXPERTS not in topology.views or topology.blocks(axes) == topology.blocks(averaged):
        return []
    near, every = set(groups.ranks(axes)), set(groups.ranks(averaged))
    dealt = [
        parameter
        for module in expert_modules(model).values()
        for parameter in module.parameters()
        if attributes.SHARDING.is_on(parameter)
        # A norm of all experts' outputs is replicated over all data ranks, each of which has outputs of its experts.
        and all(near <= set(box.copies) and not every <= set(box.copies) for box in sharding_of(parameter).boxes)
    ]
    return [DataParallelGroup(groups[axes], parameters=dealt)] if dealt else []


def has_experts(model: nn.Module) -> bool:
    """Return whether a module of the model holds expert weights, or dispatches tokens to the ranks with experts."""
    return bool(expert_modules(model)) or any(
        isinstance(value, TokenDispatcher) for module in model.modules() for value in vars(module).values()
    )


def no_experts(models: Sequence[nn.Module], ranks: int) -> ValueError:
    """Return the error for models without experts under a topology that distributes experts."""
    names = ", ".join(dict.fromkeys(type(model).__name__ for model in models))
    return ValueError(
        f"parallel: the topology distributes experts over {ranks} ranks, and {names} has no experts; make layers with "
        "Strategy.layers.MoE, pass a transformers model that has experts, or use these ranks for data or tensor"
    )
