"""Clones of an optimizer for other tensors, and steps of one tensor at a time by such clones."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from .._torch_private import bare_step, hooks_of

_SettingPlace = tuple[str, int | str, str]
"""Location of a value that steps change: ("attribute", 0, name), ("setting", param group, name), ("state", 0, key)."""


def clone_of(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    """Return an optimizer of the same class and attributes, without state and without hooks.

    Its constructor is not called, because the arguments of the original call are unknown.

    Args:
        optimizer: The original; it is not changed.
        group: The only param group of the clone.
    """
    clone = object.__new__(type(optimizer))
    clone.__dict__.update(optimizer.__dict__)
    for name in hooks_of(optimizer):
        clone.__dict__[name] = type(clone.__dict__[name])()
    for name in optimizer.__dict__:
        if callable(getattr(type(optimizer), name, None)):
            # A replaced method, such as `step` by an lr scheduler, is bound to the original.
            del clone.__dict__[name]
    clone.param_groups = [group]
    clone.state = defaultdict(dict)
    return clone


def step_others_(
    optimizer: Optimizer, groups: Sequence[Sequence[nn.Parameter]], state: Mapping[nn.Parameter, dict[str, Any]]
) -> None:
    """Run an optimizer's step for other tensors than its own, with its current settings and without its hooks.

    The optimizer does not change, so a setting that each step changes is changed once: by the optimizer's own step.

    Args:
        optimizer: The optimizer, which is about to step.
        groups: Tensors of each param group, with their gradients.
        state: State of each tensor; the step changes or fills these dicts.
    """
    clone = clone_of(optimizer, {})
    vars(clone).update({key: _own(value) for key, value in vars(clone).items()})
    settings = [{key: _own(value) for key, value in group.items()} for group in optimizer.param_groups]
    clone.param_groups = [{**kept, "params": list(some)} for kept, some in zip(settings, groups, strict=True)]
    cast("dict[object, object]", clone.state).update(
        {key: _own(value) for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    )
    clone.state.update({tensor: of for tensor, of in state.items() if of})
    bare_step(optimizer)(clone)
    for tensor, of in state.items():
        # The step makes the state of a tensor that it has not stepped before, and may replace a dict.
        made = clone.state.get(tensor, of)
        if made is not of:
            of.clear()
            of.update(made)


class TensorStepper:
    """Steps of single tensors as an optimizer's own step would make them.

    Args:
        optimizer: The optimizer, which is about to step. Later changes of its settings have no effect.
        copy: Copies each tensor that is no state of a single tensor, to the memory that is stepped. Copies are read
            from the first `step` on. Default: a clone.
    """

    def __init__(self, optimizer: Optimizer, copy: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> None:
        def own(value: Any) -> Any:
            return copy(value) if isinstance(value, torch.Tensor) else value

        self._optimizer = optimizer
        self._step = bare_step(optimizer)
        # State under a key that is no tensor belongs to all tensors, such as a common step count.
        self._shared = {key: own(value) for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
        self._settings = [
            {key: own(value) for key, value in group.items() if key not in ("params", "param_names")}
            for group in optimizer.param_groups
        ]
        self._model = clone_of(optimizer, {})
        vars(self._model).update({key: own(value) for key, value in vars(self._model).items()})
        # By param group, values before and after a step. The optimizer counts a step once, but each clone counts too.
        self._changes: dict[int, dict[_SettingPlace, tuple[Any, Any]]] = {}

    @property
    def is_skipped(self) -> bool:
        """Whether the step is to change nothing: torch's GradScaler sets `found_inf` for fused kernels that skip."""
        found_inf = vars(self._model).get("found_inf")
        return found_inf is not None and bool(found_inf)

    def find_change(self) -> str | None:
        """Return the name of a setting that a program has changed since this object was made. None: no setting."""
        for before, after in zip(self._settings, self._optimizer.param_groups, strict=True):
            for key in (before.keys() | after.keys()) - {"params", "param_names"}:
                if key not in before or key not in after or _differ(before[key], after[key]):
                    return key
        # torch's GradScaler sets these attributes for the time of a step.
        scaled = (key for key in ("found_inf", "grad_scale") if getattr(self._optimizer, key, None) is not None)
        return next(scaled, None)

    def step(self, tensor: nn.Parameter, number: int, state: dict[str, Any]) -> None:
        """Run the optimizer's step for one tensor.

        Args:
            tensor: Tensor, with a gradient.
            number: Number of its param group.
            state: State of the tensor. The step changes it in place, or makes it if it is empty.

        Raises:
            RuntimeError: The step changes a setting in a way that depends on the tensor.
        """
        settings = {key: _own(value) for key, value in self._settings[number].items()}
        clone = clone_of(self._model, {**settings, "params": [tensor]})
        attributes = {key: value for key, value in vars(clone).items() if isinstance(value, torch.Tensor)}
        vars(clone).update({key: _own(value) for key, value in attributes.items()})
        cast("dict[object, object]", clone.state).update({key: _own(value) for key, value in self._shared.items()})
        if state:
            clone.state[tensor] = state
        self._step(clone)
        made = clone.state.pop(tensor, state)
        # The step may have replaced the dict, and the caller still holds the old one.
        if made is not state:
            state.clear()
            state.update(made)
        changes = dict(self._changes_by(clone, number))
        known = self._changes.setdefault(number, changes)
        for place in changes | known:
            if place not in changes or place not in known or _differ(changes[place][1], known[place][1]):
                raise RuntimeError(
                    f"the {type(self._optimizer).__name__} sets {place[2]!r} in a step by what it steps, so its "
                    "tensors cannot be stepped one by one, as offloaded state is; step all of them together"
                )

    def _changes_by(self, clone: Optimizer, number: int) -> list[tuple[_SettingPlace, tuple[Any, Any]]]:
        """Return places outside of a tensor's state that a clone's step has changed, with values before and after."""
        pairs = [
            *((("attribute", 0, key), (vars(self._model).get(key), value)) for key, value in vars(clone).items()),
            *((("state", 0, str(key)), (self._shared.get(key), value)) for key, value in clone.state.items()),
            *(
                (("setting", number, key), (self._settings[number].get(key), value))
                for key, value in clone.param_groups[0].items()
                if key != "params"
            ),
        ]
        return [(place, (before, after)) for place, (before, after) in pairs if _differ(before, after)]

    def apply_changes_(self) -> None:
        """Make each change of a setting once in the optimizer, unless its own step has made it."""
        for number, changes in self._changes.items():
            for (kind, _, key), (before, after) in changes.items():
                places: Any = vars(self._optimizer) if kind == "attribute" else self._optimizer.state
                if kind == "setting":
                    places = self._optimizer.param_groups[number]
                value = places.get(key)
                device = value.device if isinstance(value, torch.Tensor) else None
                # The optimizer's own step may have stepped other tensors and made the same change already.
                if not _differ(value, _on(device, before)):
                    places[key] = _on(device, after)


def _own(value: Any) -> Any:
    """Return a value that a step may change in place."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _on(device: torch.device | None, value: Any) -> Any:
    """Return a value on a device if it is a tensor. None: as it is."""
    return value.to(device) if device is not None and isinstance(value, torch.Tensor) else value


def _differ(one: Any, other: Any) -> bool:
    """Return whether two settings differ. Only numbers, texts, and tuples and tensors of numbers are compared."""
    if one is other:
        return False
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return not torch.equal(one, other)
    plain = (bool, int, float, complex, str, tuple, type(None))
    return isinstance(one, plain) and isinstance(other, plain) and one != other
