"""What cannot be sharded, and what differs between the ranks: said on all of them, before anything is changed."""

import hashlib
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from par_groups import agree, check_alike

from ._options import ShardOptions
from ._step import is_fresh, uses_all, works_flat
from .layout.chunk import Member
from .layout.units import Place

ENGINE = "par_zero"
"""The attribute of a sharded module that holds its engine."""


def check(module: nn.Module, optimizer: Optimizer | None, stage: int, options: ShardOptions) -> None:
    """Raises ValueError or TypeError for what cannot be sharded, as this rank sees it."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}; give an nn.Module")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; give a torch.optim.Optimizer, or None")
    if type(stage) is not int or stage not in (0, 1, 2, 3):
        raise ValueError(f"stage is {stage!r}; it can be 0, 1, 2 or 3")
    if any(ENGINE in each.__dict__ for each in module.modules()):
        raise ValueError("the module, or a part of it, is sharded already; shard once")
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{name!r} is on the meta device; materialise it first, or load a checkpoint into it")
        if not parameter.is_floating_point() and not parameter.is_complex():
            raise ValueError(f"{name!r} has dtype {parameter.dtype}, which has no gradients; make it a buffer")
        if hasattr(parameter, "placements"):
            raise ValueError(
                f"{name!r} is a DTensor; shard plain parameters, with a par_groups.Sharding if they are cut"
            )
    if optimizer is not None:
        _check_optimizer(module, optimizer, stage, options)


def _check_optimizer(module: nn.Module, optimizer: Optimizer, stage: int, options: ShardOptions) -> None:
    names = {parameter: name for name, parameter in module.named_parameters()}
    kind = type(optimizer).__name__
    if not is_fresh(optimizer):
        raise ValueError(f"the {kind} has stepped already; shard first, then load its state from a checkpoint")
    for number, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            if parameter not in names:
                raise ValueError(f"param_groups[{number}].params[{i}] of the {kind} is no parameter of the module")
        for key, value in group.items():
            if isinstance(value, float) and math.isnan(value):
                raise ValueError(f"param_groups[{number}][{key!r}] of the {kind} is NaN; give a number")
    listed = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for parameter, name in names.items():
        if parameter.requires_grad and parameter not in listed:
            raise ValueError(
                f"{name!r} wants gradients, but the {kind} does not have it, so each rank would keep its own; give it "
                "to the optimizer, or call requires_grad_(False)"
            )
    _check_kind(optimizer, names, stage, options)


def _check_kind(optimizer: Optimizer, names: Mapping[nn.Parameter, str], stage: int, options: ShardOptions) -> None:
    """What an optimizer is told from its attributes, and from steps that copies of it make."""
    kind = type(optimizer).__name__
    for attribute, value in optimizer.__dict__.items():
        if attribute not in ("param_groups", "state", "defaults") and _has_any(value, names):
            raise ValueError(
                f"the {kind} keeps parameters in its attribute {attribute!r} too, and would go on with those instead "
                "of the flat ones that shard() puts into its param groups; take an optimizer that reads param_groups "
                "alone"
            )
    for number, group in _distinct(optimizer.param_groups):
        if stage and uses_all(optimizer, group):
            raise ValueError(
                f"the {kind} steps a parameter by what it sees of all (param_groups[{number}]), such as one norm of "
                "all gradients, and from stage 1 on no rank sees all; pass stage=0, or take another optimizer"
            )
        if not options.atomic and not works_flat(optimizer, group):
            raise ValueError(
                f"{kind} does not treat each element by itself (param_groups[{number}]), so its parameters cannot be "
                "cut; pass atomic=True, which keeps each whole on one rank"
            )


def _has_any(value: object, parameters: Container[nn.Parameter]) -> bool:
    """Whether a collection, as an optimizer may have as its own, has one of some parameters."""
    if isinstance(value, Mapping):  # what is known of parameters, by them as keys, steps none of them
        return _has_any(list(value.values()), parameters)
    if isinstance(value, list | tuple | set | frozenset):
        return any(_has_any(each, parameters) for each in value)
    return isinstance(value, nn.Parameter) and value in parameters


def _distinct(groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Param groups that differ in their settings, with their numbers."""
    seen = set()
    for number, group in enumerate(groups):
        settings = repr([(key, value) for key, value in group.items() if key not in ("params", "param_names")])
        if settings not in seen:
            seen.add(settings)
            yield number, group


def check_groups(group: dist.ProcessGroup, replicas: dist.ProcessGroup | None) -> None:
    """Raises ValueError where a rank would be a replica of one that it shares with."""
    if replicas is not None:
        near, far = (sorted(dist.get_process_group_ranks(each)) for each in (group, replicas))
        if set(near) & set(far) != {dist.get_rank()}:
            raise ValueError(
                f"replicas are the ranks {far}, and group the ranks {near}; a rank's replicas are itself and ranks of "
                "other groups"
            )


def described(
    members: Sequence[Member], place_of: Mapping[nn.Parameter, Place], stage: int, options: ShardOptions
) -> str:
    """What all ranks must have alike."""
    parts = [
        (
            *(each.names, tuple(each.shape), str(each.parameter.dtype), each.group, place_of[each.parameter]),
            each.parameter.requires_grad and each.group < 0,
        )
        for each in members
    ]
    fields = (stage, options.bucket, options.param_dtype, options.reduce_dtype, options.reduce, options.atomic)
    return repr((fields, parts))


def agreed_ranks(
    problem: Exception | None, text: str, group: dist.ProcessGroup, replicas: dist.ProcessGroup | None
) -> tuple[int, ...]:
    """All ranks; raises on every one if any has a problem, or if they are about to make different chunks."""
    digests = agree(
        problem, hashlib.sha256(text.encode()).hexdigest(), group, *([] if replicas is None else [replicas])
    )
    what, remedy = "parameters, shapes, dtypes, param groups or options", "build the same model and optimizer on all"
    check_alike(digests, what, remedy=remedy, show=False)
    return tuple(digests)
