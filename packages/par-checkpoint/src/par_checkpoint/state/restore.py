"""What a load sets rather than fills, when all tensors are read: param groups, schedulers, extra state of modules."""

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from .._errors import UNDEFINED, CheckpointError, corrupt
from ..format.manifest import MANIFEST
from .model import Model, clean, unwrapped
from .optimizer import other_kind

SavedGroup = tuple[list[str], dict[str, Any]]
"""The names of the parameters of a saved param group, and its other options."""


def candidates(groups: Sequence[Sequence[str]], saved: Sequence[SavedGroup]) -> list[list[int] | None]:
    """For each param group: numbers of the saved groups in which its parameters on this rank were; None if it has none.

    Args:
        groups: For each param group, its parameters on this rank, as the saved optimizer calls them.
        saved: The saved param groups.
    """
    return [
        [number for number, (members, _) in enumerate(saved) if not names.isdisjoint(members)] if names else None
        for names in map(set, groups)
    ]


def matching_groups(of_ranks: Sequence[Sequence[Sequence[int] | None]], saved: int) -> list[int | None]:
    """The number of the saved group of each param group; None for a group whose parameters were in none.

    Args:
        of_ranks: For each rank, the `candidates` there; a rank without an optimizer has none.
        saved: Number of saved groups.

    Raises:
        CheckpointError: A group whose parameters were in several groups.
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
    """Sets the options of param groups, and the state of tensors and of the optimizer as a whole.

    Args:
        optimizer: The optimizer.
        saved: The saved param groups.
        matches: For each param group, the number of the saved one, or None.
        state: The new state of tensors, which takes the place of the old one.
        slots: Saved slots that are no tensors; those without a dot belong to the optimizer as a whole.
    """
    for group, match in zip(optimizer.param_groups, matches, strict=False):
        if match is None or other_kind(optimizer, group, saved[match][1]) is not None:
            continue
        for key, value in saved[match][1].items():
            old = group.get(key)
            if isinstance(old, torch.Tensor):  # such as the lr of a captured step, which keeps its memory
                old.copy_(torch.as_tensor(value, device=old.device))
            else:
                group[key] = value
    for tensor, of_tensor in state.items():
        if of_tensor:
            optimizer.state[tensor] = of_tensor
        else:
            optimizer.state.pop(tensor, None)
    of_no_tensor = {key: value for key, value in slots.items() if "." not in key}
    cast("dict[object, object]", optimizer.state).update(of_no_tensor)


def check_schedulers(scheduler: object, state: object) -> None:
    """Checks that a checkpoint has a state for each scheduler.

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
    """Sets the state of a scheduler, or of each in a list of them."""
    if isinstance(scheduler, list | tuple):
        for one, its_state in zip(scheduler, state, strict=True):
            set_scheduler_(one, its_state)
    elif scheduler is not None:
        with _taken(f"the {type(scheduler).__name__}"):
            scheduler.load_state_dict(state)


@contextmanager
def _taken(what: str) -> Iterator[None]:
    """Raises CheckpointError where something does not take the state that was saved of it."""
    try:
        yield
    except Exception as error:
        raise CheckpointError(
            f"{what} does not take its saved state ({type(error).__name__}: {error}); use the class that was saved, or "
            f"load without it{UNDEFINED}"
        ) from error


def set_extra_state_(model: Model | None, objects: Mapping[str, object]) -> None:
    """Sets the extra state of modules.

    Args:
        model: The module, or a state dict that has some.
        objects: The extra state by its key in the state dict.
    """
    inner = None if model is None else unwrapped(model)
    if isinstance(inner, nn.Module):
        modules = {clean(name): module for name, module in inner.named_modules()}
        for key, value in objects.items():
            owner = modules.get(key.removesuffix("_extra_state").removesuffix("."))
            if owner is not None and type(owner).get_extra_state is not nn.Module.get_extra_state:
                with _taken(f"{key!r}"):
                    owner.set_extra_state(value)
    elif isinstance(inner, MutableMapping):
        inner.update({key: objects[clean(key)] for key in inner if clean(key) in objects})
