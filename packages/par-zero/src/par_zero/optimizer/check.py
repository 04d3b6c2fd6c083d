"""Check that an optimizer can step what a rank has: by the table of classes, the user's declaration and a trial."""

import warnings
from collections.abc import Container, Mapping, Sequence

import torch.distributed as dist
from torch import nn

from par_groups import UpdateScope, draws_numbers, find_scope_violation

from .._param_groups import ParamGroup
from .._stage import STAGES
from ..layout.records import part_of_a_whole


def check_way_of_working(
    groups: Sequence[ParamGroup],
    names: Mapping[nn.Parameter, str],
    stage: int,
    tensor: dist.ProcessGroup | None,
    *,
    shards: int,
    replicas: int,
) -> None:
    """Check that an optimizer steps its param groups, and needs no more of a parameter than a rank has.

    Args:
        groups: Param groups of the optimizer.
        names: Parameters of the module, and their names.
        stage: Number of the ZeRO stage.
        tensor: Ranks that hold the other shards of parameters which must be full, or None.
        shards: Number of ranks that shard the parameters.
        replicas: Number of ranks that are replicas of each other.

    Raises:
        ValueError: The optimizer steps other tensors, or needs more.
    """
    optimizer = groups[0].optimizer
    kind = type(optimizer).__name__
    for attribute, value in optimizer.__dict__.items():
        if attribute not in ("param_groups", "state", "defaults") and _contains_any(value, names):
            raise ValueError(
                f"the {kind} keeps parameters in its attribute {attribute!r} too, and would go on with those instead "
                "of the flat ones that shard() puts into its param groups; take an optimizer that reads param_groups "
                "alone"
            )
    parts = {
        names[parameter]: record
        for group in groups
        for parameter in group.settings["params"]
        if (record := part_of_a_whole(parameter)) is not None
    }
    sharded = STAGES[stage].shards_state and shards > 1
    tried = set()
    for group in groups:
        settings = repr([(key, value) for key, value in group.settings.items() if key not in ("params", "param_names")])
        # A trial takes some milliseconds, and a model may have hundreds of param groups with the same settings.
        if (settings, group.atomic) in tried:
            continue
        tried.add((settings, group.atomic))
        if group.scope is UpdateScope.UNKNOWN:
            repeats = replicas * (1 if sharded else shards) > 1
            _try_unknown(group, stage if sharded else 0, next(iter(parts), None), repeats=repeats)
        if group.scope is UpdateScope.MODEL and (sharded or parts):
            raise _sees_all(group, stage if sharded else 0, next(iter(parts), None))
    for group in groups:
        for parameter in group.settings["params"]:
            name = names[parameter]
            if group.atomic and name in parts and optimizer.state.get(parameter):
                raise ValueError(
                    f"the {kind} has made state for {name!r} before its first step, and each rank has a part of that "
                    "only; take an optimizer that makes it in the first step"
                )
            if group.atomic and name in parts and tensor is None:
                record = parts[name]
                raise ValueError(
                    f"the {kind} would step a part of {name!r} as if it were the whole: this rank has "
                    f"{record.local_numel} of {record.numel} elements, of shape {tuple(record.shape)}, and "
                    f"{group.place} are atomic; pass "
                    "update=dict(tensor_group=...) with the ranks that have the rest, or give the "
                    "parameter to an optimizer that works element by element"
                )


def _sees_all(group: ParamGroup, stage: int, cut: str | None) -> ValueError:
    """Make the error about an optimizer that reads all tensors, of which a rank has only some.

    Args:
        group: Param group of the optimizer.
        stage: Number of the stage; 0 if the optimizer's state is not sharded.
        cut: Name of a parameter that tensor-parallel ranks shard, if there is one.
    """
    kind = type(group.optimizer).__name__
    place = f"the {kind} steps a parameter by what it sees of all (param_groups[{group.number}])"
    if stage:
        return ValueError(
            f"{place}, such as one norm of all gradients, and from stage 1 on no rank sees all; pass stage=0, or take "
            "another optimizer"
        )
    return ValueError(
        f"{place}, such as one norm of all gradients, and of {cut!r} each rank sees a part; take another optimizer, or "
        "do not cut parameters over tensor ranks"
    )


def _try_unknown(group: ParamGroup, stage: int, cut: str | None, *, repeats: bool) -> None:
    """Check an optimizer of an unknown class by a trial of the tensors that it reads.

    Args:
        group: Param group of the optimizer.
        stage: Number of the stage; 0 if the optimizer's state is not sharded.
        cut: Name of a parameter that tensor-parallel ranks shard, if there is one.
        repeats: Whether several ranks step the same tensors.
    """
    kind = type(group.optimizer).__name__
    if not group.declared and cut is not None:
        raise ValueError(
            f"optimizer={kind}: par-zero does not know what this class looks at, and each rank has a part of {cut!r}; "
            "pass update=dict(elementwise=True) if it treats each element by itself, or else update=dict(atomic=True)"
        )
    problem: str | None = None
    try:
        if stage or cut is not None or not group.atomic:
            problem = find_scope_violation(
                group.optimizer, group.settings, UpdateScope.TENSOR if group.atomic else UpdateScope.ELEMENT
            )
        draws = repeats and problem is None and draws_numbers(group.optimizer, group.settings)
    except Exception as error:
        # Any error means that the step does not run outside of the user's loop. Only a user who declared nothing, and
        # whose state is sharded, needs the trial's answer.
        draws, raised = False, f"{type(error).__name__}: {error}"
        if not group.atomic:
            raise ValueError(
                f"elementwise=True for {group.place}: a step of a trial raises {raised}; pass update=dict(atomic=True) "
                "instead, with which each tensor stays whole on one rank"
            ) from error
        if stage and not group.declared:
            raise ValueError(
                f"optimizer={kind}: par-zero does not know what this class looks at, and a step of a trial raises "
                f"{raised}; pass update=dict(atomic=True) if it updates each tensor by itself, or stage=0"
            ) from error
    if draws:
        raise ValueError(
            f"optimizer={kind}: its step draws random numbers from torch's generator, others on each rank that "
            "repeats the step, so weights would differ; use a generator of its own with one seed on all ranks"
        )
    if problem is not None and group.atomic:
        raise _sees_all(group, stage, cut)
    if problem is not None:
        raise ValueError(
            f"elementwise=True for {group.place}: a trial shows that {problem}; pass update=dict(atomic=True) instead, "
            "with which each tensor stays whole on one rank"
        )
    if stage and not group.declared and dist.get_rank() == 0:
        warnings.warn(
            f"optimizer={kind}: par-zero does not know what this class looks at, so each tensor stays whole on one "
            "rank; pass update=dict(elementwise=True) if it treats each element by itself, which shards the work "
            "evenly, or update=dict(atomic=True)",
            stacklevel=5,
        )


def _contains_any(value: object, parameters: Container[nn.Parameter]) -> bool:
    """Return whether a collection in an optimizer's attribute contains any of some parameters."""
    # The keys of a mapping are only looked up: an optimizer steps no key.
    if isinstance(value, Mapping):
        return _contains_any(list(value.values()), parameters)
    if isinstance(value, list | tuple | set | frozenset):
        return any(_contains_any(item, parameters) for item in value)
    return isinstance(value, nn.Parameter) and value in parameters
