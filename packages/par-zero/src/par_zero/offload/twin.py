"""Stepping one tensor of an optimizer, as its own step would."""

from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from .._torch_private import bare_step
from ..optimizer.twin import twin_of

_Place = tuple[str, int | str, str]
"""Where a value stands that a step may count up: among attributes, in a param group, in the state as a whole."""


class Twins:
    """Steps tensors of an optimizer one by one, each by an optimizer of the same class and settings.

    Args:
        optimizer: The optimizer, which is about to step; all settings are those of this moment.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._step = bare_step(optimizer)
        self._shared = {key: _own(value) for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
        self._settings = [
            {key: _own(value) for key, value in group.items() if key not in ("params", "param_names")}
            for group in optimizer.param_groups
        ]
        self._model = twin_of(optimizer, {})
        vars(self._model).update({key: _own(value) for key, value in vars(self._model).items()})
        self._counted: dict[int, dict[_Place, tuple[Any, Any]]] = {}  # by param group: before and after a step

    def step(self, tensor: nn.Parameter, number: int, state: dict[str, Any]) -> None:
        """Steps one tensor.

        Args:
            tensor: The tensor, with its gradient.
            number: Number of its param group.
            state: Its state, which the step changes in place, or makes if it is empty.

        Raises:
            RuntimeError: The step changes a setting in a way that depends on the tensor.
        """
        settings = {key: _own(value) for key, value in self._settings[number].items()}
        twin = twin_of(self._model, {**settings, "params": [tensor]})
        attributes = {key: value for key, value in vars(twin).items() if isinstance(value, torch.Tensor)}
        vars(twin).update({key: _own(value) for key, value in attributes.items()})
        cast("dict[object, object]", twin.state).update({key: _own(value) for key, value in self._shared.items()})
        if state:
            twin.state[tensor] = state
        self._step(twin)
        made = twin.state.pop(tensor, state)
        if made is not state:
            state.clear()
            state.update(made)
        counted = dict(self._changed(twin, number))
        known = self._counted.setdefault(number, counted)
        for place in counted | known:
            if place not in counted or place not in known or _differ(counted[place][1], known[place][1]):
                raise RuntimeError(
                    f"the {type(self._optimizer).__name__} sets {place[2]!r} in a step by what it steps, and with "
                    "state on a disk its tensors are stepped one by one; leave offload out"
                )

    def _changed(self, twin: Optimizer, number: int) -> list[tuple[_Place, tuple[Any, Any]]]:
        """What a step of the twin has set beside the tensor and its state: places, and values before and after."""
        pairs = [
            *((("attribute", 0, key), (vars(self._model).get(key), value)) for key, value in vars(twin).items()),
            *((("state", 0, str(key)), (self._shared.get(key), value)) for key, value in twin.state.items()),
            *(
                (("setting", number, key), (self._settings[number].get(key), value))
                for key, value in twin.param_groups[0].items()
                if key != "params"
            ),
        ]
        return [(place, (before, after)) for place, (before, after) in pairs if _differ(before, after)]

    def take_over_(self) -> None:
        """Sets what the twins have set, once, unless the optimizer's own step has done so."""
        for number, counted in self._counted.items():
            for (kind, _, key), (before, after) in counted.items():
                places: Any = vars(self._optimizer) if kind == "attribute" else self._optimizer.state
                if kind == "setting":
                    places = self._optimizer.param_groups[number]
                if not _differ(places.get(key), before):
                    places[key] = after


def _own(value: Any) -> Any:
    """A value that a step may change in place."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _differ(one: Any, other: Any) -> bool:
    """Whether two settings differ; only numbers, texts and tuples and tensors of them are compared."""
    if one is other:
        return False
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return not torch.equal(one, other)
    plain = (bool, int, float, complex, str, tuple, type(None))
    return isinstance(one, plain) and isinstance(other, plain) and one != other
