"""State that a load sets after all tensors are filled: param groups and schedulers."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .._errors import CheckpointError, corrupt, taken
from ..format.manifest import MANIFEST
from .optimizer import other_kind

SavedGroup = tuple[list[str], dict[str, Any]]
"""The names of the parameters of a saved param group, and its other options."""


def candidates(groups: Sequence[Sequence[str]], saved: Sequence[SavedGroup]) -> list[list[int] | None]:
    """Return the saved groups that contain parameters of each param group on this rank.

    None for a group without parameters.

    Args:
        groups: This rank's parameters of each param group, by their names in the saved optimizer.
        saved: Saved param groups.
    """
    return [
        [number for number, (members, _) in enumerate(saved) if not names.isdisjoint(members)] if names else None
        for names in map(set, groups)
    ]


def matching_groups(of_ranks: Sequence[Sequence[Sequence[int] | None]], saved: int) -> list[int | None]:
    """Return the number of the saved group of each param group; None if its parameters were in no group.

    Args:
        of_ranks: `candidates` of each rank; a rank without an optimizer has none.
        saved: Number of saved groups.

    Raises:
        CheckpointError: The parameters of a group were in several groups.
    """
    matches: list[int | None] = []
    for number in range(max(map(len, of_ranks))):
        found = [of_rank[number] for of_rank in of_ranks if number < len(of_rank)]
        groups = {group for some in found for group in some or ()}
        if len(groups) > 1:
            raise CheckpointError(
                f"the parameters of param group {number} were in groups {sorted(groups)} when they were saved; make "
                "the groups as they were, or load without the optimizer"
            )
        if groups:
            matches.append(groups.pop())
        else:  # a group that is empty on all ranks is known by its place
            is_empty = all(some is None for some in found)
            matches.append(min(number, saved - 1) if is_empty else None)
    return matches


def set_optimizer_(
    optimizer: Optimizer,
    saved: Sequence[SavedGroup],
    matches: Sequence[int | None],
    state: Mapping[torch.Tensor, dict[str, Any]],
    slots: Mapping[str, object],
) -> None:
    """Set the options of param groups, and the state of tensors and of the optimizer as a whole.

    Args:
        optimizer: Optimizer to change.
        saved: Saved param groups.
        matches: Number of the saved group of each param group, or None.
        state: New state of tensors, which replaces the old state.
        slots: Saved slots that are not tensors; slots without a dot belong to the optimizer as a whole.
    """
    chosen = [
        None if match is None or other_kind(optimizer, group, saved[match][1], "") is not None else saved[match][1]
        for group, match in zip(optimizer.param_groups, matches, strict=False)
    ]
    others = [group for group, options in zip(optimizer.param_groups, chosen, strict=False) if options is None]
    shared = {id(value) for group in others for value in group.values()}  # with a group that stays as it is
    for group, options in zip(optimizer.param_groups, chosen, strict=False):
        for key, value in (options or {}).items():
            old = group.get(key)
            if not isinstance(old, torch.Tensor):
                group[key] = copy.deepcopy(value)  # of a saved group that several groups may get
                continue
            new = torch.as_tensor(value, device=old.device)
            if id(old) in shared and not torch.equal(old, new.to(old.dtype)):
                group[key] = old = old.detach().clone()  # torch gives all groups the tensor of the constructor
            old.copy_(new)  # a captured step reads this memory
            shared.add(id(old))
    for tensor, of_tensor in state.items():
        # A parameter without state had not stepped when it was saved, which optimizers tell by a missing entry.
        if of_tensor:
            optimizer.state[tensor] = of_tensor
        else:
            optimizer.state.pop(tensor, None)
    # A key without a dot names no parameter, and is state of the optimizer as a whole.
    of_no_tensor = {key: value for key, value in slots.items() if "." not in key}
    cast("dict[object, object]", optimizer.state).update(of_no_tensor)


def check_schedulers(scheduler: object, state: object) -> None:
    """Check that a checkpoint has a state for each scheduler.

    Args:
        scheduler: A scheduler, a list of them, or None.
        state: The saved state, or a list of states; None if none was saved.

    Raises:
        CheckpointError: It has none, or another number of them.
    """
    if scheduler is None:
        return
    if state is None:
        raise CheckpointError("the checkpoint was saved without a scheduler; pass none")
    if isinstance(scheduler, list | tuple) != isinstance(state, list):
        raise CheckpointError("one of the checkpoint and the call has a list of schedulers, the other has one")
    if isinstance(scheduler, list | tuple) and isinstance(state, list) and len(scheduler) != len(state):
        raise CheckpointError(f"the checkpoint has {len(state)} schedulers, but {len(scheduler)} are given")
    if isinstance(scheduler, LRScheduler) and not isinstance(state, dict):
        raise corrupt(MANIFEST, f"has a {type(state).__name__} as the state of a {type(scheduler).__name__}")
    if isinstance(scheduler, list | tuple):
        for one, its_state in zip(scheduler, state, strict=True):  # type: ignore[call-overload]
            check_schedulers(one, its_state)


def set_scheduler_(scheduler: Any, state: Any) -> None:
    """Set the state of a scheduler, or of each in a list of them."""
    if isinstance(scheduler, list | tuple):
        for one, its_state in zip(scheduler, state, strict=True):
            set_scheduler_(one, its_state)
    elif scheduler is not None:
        with taken(f"the {type(scheduler).__name__}"):
            scheduler.load_state_dict(state)
