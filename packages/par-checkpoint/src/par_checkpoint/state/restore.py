"""What is set rather than filled: param groups, a scheduler, extra state of modules."""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from .._errors import CheckpointError
from ..storage.outline import Outline
from .model import clean, unwrapped
from .optimizer import other_kind
from .targets import OptimizerTargets


@dataclass(kw_only=True)
class Restore:
    """State that waits until the tensors are read.

    Args:
        module: Whose extra state to set; or a state dict that has some.
        objects: That state by name.
        optimizer: Whose groups and state to set.
        names: The parameters of each of its groups on this rank, as the saved optimizer calls them.
        saved: Names and options of each saved group.
        state: The new state by tensor.
        of_no_tensor: That of the whole optimizer, by its keys.
        scheduler: One or several.
        scheduler_state: Theirs.
    """

    module: nn.Module | MutableMapping[str, Any] | None = None
    objects: Mapping[str, object] = field(default_factory=dict)
    optimizer: Optimizer | None = None
    names: list[tuple[str, ...]] = field(default_factory=list)
    saved: list[tuple[list[str], dict[str, Any]]] = field(default_factory=list)
    state: Mapping[torch.Tensor, dict[str, Any]] = field(default_factory=dict)
    of_no_tensor: Mapping[str, object] = field(default_factory=dict)
    scheduler: object = None
    scheduler_state: Any = None
    matches: list[int | None] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        found: Outline,
        *,
        model: object,
        optimizer: Optimizer | None,
        scheduler: object,
        targets: OptimizerTargets,
    ) -> "Restore":
        """What a checkpoint says.

        Raises:
            CheckpointError: It has no scheduler, or a different number of them.
        """
        state = found.part("scheduler") if scheduler is not None else None
        if scheduler is not None and state is None:
            raise CheckpointError("the checkpoint was saved without a scheduler; pass none")
        several = isinstance(scheduler, list | tuple)
        if several != isinstance(state, list) and scheduler is not None:
            raise CheckpointError("one of the checkpoint and the call has a list of schedulers, the other has one")
        if isinstance(scheduler, list | tuple) and isinstance(state, list) and len(scheduler) != len(state):
            raise CheckpointError(f"the checkpoint has {len(state)} schedulers, but {len(scheduler)} are given")
        inner = unwrapped(model) if isinstance(model, nn.Module) else model
        return cls(
            module=inner if isinstance(inner, nn.Module | MutableMapping) else None,
            objects={} if model is None else found.objects(),
            optimizer=optimizer,
            names=targets.groups,
            saved=[] if optimizer is None else found.groups(),
            state=targets.state,
            of_no_tensor={} if optimizer is None else {k: each for k, each in found.slots().items() if "." not in k},
            scheduler=scheduler,
            scheduler_state=state,
        )

    def candidates(self) -> list[list[int] | None]:
        """By param group: the saved groups in which its parameters on this rank were; None: it has none here."""
        return [
            [number for number, (members, _) in enumerate(self.saved) if not of.isdisjoint(members)] if of else None
            for of in map(set, self.names)
        ]

    def match(self, every: Sequence[Sequence[Sequence[int] | None]]) -> None:
        """Finds the saved group of each group; None for one whose parameters were in none.

        Args:
            every: The candidates of all ranks.

        Raises:
            CheckpointError: A group whose parameters were in several groups.
        """
        self.matches = []
        for number in range(len(self.names)):
            found = [each[number] for each in every if number < len(each)]
            of = {saved for each in found for saved in each or ()}
            if len(of) > 1:
                raise CheckpointError(
                    f"the parameters of param group {number} were in groups {sorted(of)} when they were saved; make "
                    "the groups as they were, or load without the optimizer"
                )
            if of:
                self.matches.append(of.pop())
            else:  # a group that is empty on all ranks is known by its place
                empty = all(each is None for each in found)
                self.matches.append(min(number, len(self.saved) - 1) if empty else None)

    def apply_(self) -> None:
        """Sets everything."""
        if self.optimizer is not None:
            for group, match in zip(self.optimizer.param_groups, self.matches, strict=True):
                options = None if match is None else self.saved[match][1]
                if options is not None and other_kind(self.optimizer, group, options) is None:
                    _set_options_(group, options)
            for tensor, state in self.state.items():
                if state:
                    self.optimizer.state[tensor] = state
                else:
                    self.optimizer.state.pop(tensor, None)
            cast("dict[object, object]", self.optimizer.state).update(self.of_no_tensor)
        _load_scheduler(self.scheduler, self.scheduler_state)
        if self.module is not None and self.objects:
            _set_extra_(self.module, self.objects)


def _set_options_(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    """A group's options; a tensor that is there, such as the lr of a captured step, keeps its memory."""
    for key, value in options.items():
        old = group.get(key)
        if isinstance(old, torch.Tensor) and key not in ("params", "param_names"):
            old.copy_(torch.as_tensor(value, device=old.device))
        else:
            group[key] = value


def _load_scheduler(scheduler: Any, state: Any) -> None:
    if isinstance(scheduler, list | tuple):
        for each, part in zip(scheduler, state, strict=True):
            _load_scheduler(each, part)
    elif scheduler is not None:
        scheduler.load_state_dict(state)


def _set_extra_(module: nn.Module | MutableMapping[str, Any], objects: Mapping[str, object]) -> None:
    """The extra state of modules, by its key in the state dict."""
    if isinstance(module, MutableMapping):
        module.update({key: objects[clean(key)] for key in module if clean(key) in objects})
        return
    modules = {clean(name): each for name, each in module.named_modules()}
    for key, value in objects.items():
        owner = modules.get(key.removesuffix("_extra_state").removesuffix("."))
        if owner is not None and type(owner).get_extra_state is not nn.Module.get_extra_state:
            owner.set_extra_state(value)
