"""Who shares the weights of experts, and whether a model has any where the topology deals them out."""

from collections.abc import Sequence

from torch import nn

from par_groups import ProcessGroups, attributes, sharding_of
from par_layers import TokenDispatcher, expert_modules
from par_zero import DataParallelGroup

from ..axes import EXPERTS, averaged_over

EXPERT_COPIES = ("data", "expert_data")
"""The axes over which ranks have copies of the same experts, where these are not all data ranks."""


def share_of_experts(model: nn.Module, groups: ProcessGroups) -> list[DataParallelGroup]:
    """Who shares the weights of experts in the place of all data ranks: those that have copies of the same ones.

    Args:
        model: What this rank has of a model.
        groups: The groups of ranks along each axis.

    Returns:
        One share, whose gradients are divided by what all others are; none where all data ranks have the same experts.
    """
    topology, axes, averaged = groups.topology, EXPERT_COPIES, averaged_over(groups.topology)
    if EXPERTS not in topology.views or topology.blocks(axes) == topology.blocks(averaged):
        return []
    near = set(groups.ranks(axes))
    dealt = [
        parameter
        for module in expert_modules(model).values()
        for parameter in module.parameters()
        if attributes.SHARDING.is_on(parameter) and all(near <= set(box.copies) for box in sharding_of(parameter).boxes)
    ]
    return [DataParallelGroup(groups[axes], divisor=groups.size(averaged), parameters=dealt)] if dealt else []


def has_experts(model: nn.Module) -> bool:
    """Whether a module of the model exchanges rows with the ranks of experts, or has such weights."""
    return bool(expert_modules(model)) or any(
        isinstance(value, TokenDispatcher) for module in model.modules() for value in vars(module).values()
    )


def no_experts(models: Sequence[nn.Module], ranks: int) -> ValueError:
    """The error for models none of which has experts, where the topology deals experts out."""
    names = ", ".join(dict.fromkeys(type(model).__name__ for model in models))
    return ValueError(
        f"the topology deals experts out over {ranks} ranks, and {names} has none; make layers with "
        "Strategy.layers.MoE, give a model of transformers that has experts, or give these ranks to data or tensor"
    )
