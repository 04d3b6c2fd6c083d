"""What cannot be sharded, and what differs between the ranks: every rank says so before anything is changed."""

import hashlib
import math
from collections.abc import Container, Mapping, Sequence

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from par_groups import agree, check_alike

from ._options import ShardOptions
from ._probe import looks_at_all_tensors, looks_at_whole_tensors
from ._stage import STAGES, Stage
from ._step import is_fresh
from .layout.chunk import Member
from .layout.units import Place

ENGINE = "par_zero"
"""The attribute of a sharded module that holds its engine."""


def check(module: nn.Module, optimizer: Optimizer | None, stage: int, options: ShardOptions) -> None:
    """Checks what is to be sharded, as far as this rank sees it.

    Raises:
        ValueError, TypeError: What cannot be sharded.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is a {type(module).__name__}; give an nn.Module")
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}; give a torch.optim.Optimizer, or None")
    if type(stage) is not int or stage not in range(len(STAGES)):
        raise ValueError(f"stage is {stage!r}; it can be 0, 1, 2 or 3")
    if any(ENGINE in part.__dict__ for part in module.modules()):
        raise ValueError(f"the {type(module).__name__}, or a part of it, is sharded already; shard it once, as a whole")
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
        names = {parameter: name for name, parameter in module.named_parameters()}
        _check_parameters(optimizer, names)
        _check_way_of_working(optimizer, names, STAGES[stage], options)


def _check_parameters(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> None:
    """Checks that the optimizer has not stepped, and has the module's parameters and no others."""
    kind = type(optimizer).__name__
    if not is_fresh(optimizer):
        raise ValueError(f"the {kind} has stepped already; shard first, then load its state from a checkpoint")
    for number, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            if parameter not in names:
                raise ValueError(
                    f"param_groups[{number}].params[{i}] of the {kind} is no parameter of the module; make the "
                    "optimizer from the parameters of the module that is sharded"
                )
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


def _check_way_of_working(
    optimizer: Optimizer, names: Mapping[nn.Parameter, str], stage: Stage, options: ShardOptions
) -> None:
    """Checks that the optimizer steps what its param groups hold, and needs no more of it than a rank has."""
    kind = type(optimizer).__name__
    for attribute, value in optimizer.__dict__.items():
        if attribute not in ("param_groups", "state", "defaults") and _contains_any(value, names):
            raise ValueError(
                f"the {kind} keeps parameters in its attribute {attribute!r} too, and would go on with those instead "
                "of the flat ones that shard() puts into its param groups; take an optimizer that reads param_groups "
                "alone"
            )
    tried = set()
    for number, group in enumerate(optimizer.param_groups):
        settings = repr([(key, value) for key, value in group.items() if key not in ("params", "param_names")])
        if settings in tried:
            continue
        tried.add(settings)
        if stage.shards_state and looks_at_all_tensors(optimizer, group):
            raise ValueError(
                f"the {kind} steps a parameter by what it sees of all (param_groups[{number}]), such as one norm of "
                "all gradients, and from stage 1 on no rank sees all; pass stage=0, or take another optimizer"
            )
        if not options.atomic and looks_at_whole_tensors(optimizer, group):
            raise ValueError(
                f"{kind} does not treat each element by itself (param_groups[{number}]), so its parameters cannot be "
                "cut; pass atomic=True, which keeps each whole on one rank"
            )


def _contains_any(value: object, parameters: Container[nn.Parameter]) -> bool:
    """Whether a collection, as an optimizer may keep one for itself, contains one of some parameters."""
    if isinstance(value, Mapping):  # an optimizer does not step the keys, about which it knows something
        return _contains_any(list(value.values()), parameters)
    if isinstance(value, list | tuple | set | frozenset):
        return any(_contains_any(item, parameters) for item in value)
    return isinstance(value, nn.Parameter) and value in parameters


def check_groups(group: dist.ProcessGroup, replicas: dist.ProcessGroup | None) -> None:
    """Checks that no rank would be a replica of one with which it shares.

    Raises:
        ValueError: The groups have more ranks in common than this one.
    """
    if replicas is not None:
        near, far = (sorted(dist.get_process_group_ranks(one)) for one in (group, replicas))
        if set(near) & set(far) != {dist.get_rank()}:
            raise ValueError(
                f"replicas are the ranks {far}, and group the ranks {near}; a rank's replicas are itself and ranks of "
                "other groups"
            )


def described(
    members: Sequence[Member], place_of: Mapping[nn.Parameter, Place], stage: int, options: ShardOptions
) -> str:
    """A text of everything that all ranks must have alike, for them to make the same chunks."""
    parts = [
        (
            *(member.names, tuple(member.shape), str(member.parameter.dtype), member.group, place_of[member.parameter]),
            member.parameter.requires_grad and member.group < 0,
        )
        for member in members
    ]
    fields = (stage, options.bucket, options.param_dtype, options.reduce_dtype, options.reduce, options.atomic)
    return repr((fields, parts))


def agreed_ranks(
    problem: Exception | None, text: str, group: dist.ProcessGroup, replicas: dist.ProcessGroup | None
) -> tuple[int, ...]:
    """Agrees with the other ranks on whether to go on. Objects are gathered over each of the groups.

    Args:
        problem: What this rank cannot do, if there is something.
        text: What all ranks must have alike, from `described`.
        group: The ranks that share.
        replicas: The ranks that keep the same share, or None.

    Returns:
        All ranks of both groups, ascending.

    Raises:
        Exception: This rank's own problem, as it is.
        ValueError: Another rank's problem, or a difference between the ranks.
    """
    digests = agree(
        problem, hashlib.sha256(text.encode()).hexdigest(), group, *([] if replicas is None else [replicas])
    )
    what, remedy = "parameters, shapes, dtypes, param groups or options", "build the same model and optimizer on all"
    check_alike(digests, what, remedy=remedy, show=False)
    return tuple(digests)
