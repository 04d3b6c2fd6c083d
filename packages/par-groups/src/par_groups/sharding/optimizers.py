"""Functions on optimizers: whether one has stepped, a call of its `zero_grad`, a clean state."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer


def has_stepped(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has stepped, as far as its state shows.

    State from a constructor does not count: a step count of 0, zeros, and a copy of the parameter. An empty entry, as
    from a mode switch of a schedule-free optimizer, does not count either.

    Args:
        optimizer: Optimizer.
    """
    return any(_is_of_a_step(key, state) for key, state in optimizer.state.items())


def _is_of_a_step(key: object, state: object) -> bool:
    if not isinstance(state, Mapping):
        return state is not None
    if "step" in state:
        return bool(state["step"] != 0)
    return any(_has_values(key, value) for value in state.values())


def _has_values(key: object, value: object) -> bool:
    if not isinstance(value, torch.Tensor) or value.is_meta or not value.numel():
        return False
    if isinstance(key, torch.Tensor) and value.shape == key.shape and torch.equal(value, key.detach().to(value)):
        return False
    return bool(value.any())


def zero_grad_(optimizer: Optimizer, set_to_none: bool, zero_grad: Callable[..., Any] | None = None) -> None:
    """Drop the gradients of an optimizer, also if its `zero_grad` accepts no `set_to_none`.

    Args:
        optimizer: Optimizer.
        set_to_none: Whether gradients become None instead of zeros; ignored if `zero_grad` does not accept it.
        zero_grad: Function to call. Default: the optimizer's own `zero_grad`.
    """
    call = optimizer.zero_grad if zero_grad is None else zero_grad
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):  # a callable that does not say what it takes
        call()
        return
    kinds = {parameter.kind for parameter in parameters}
    if any(parameter.name == "set_to_none" for parameter in parameters) or inspect.Parameter.VAR_KEYWORD in kinds:
        call(set_to_none=set_to_none)
    else:
        call()


def drop_reads_(optimizer: Optimizer) -> None:
    """Remove the entries of an optimizer's state that reads with tensors of no param group have made.

    Call it before an optimizer that holds other tensors than the module's parameters returns its state dict. torch's
    state is a defaultdict, so `optimizer.state[parameter]` adds an empty entry, with which `state_dict` would end in a
    KeyError that names an address.

    Args:
        optimizer: The optimizer.

    Raises:
        ValueError: Such an entry is not empty, so the caller has written state that no step reads.
    """
    own = {tensor for group in optimizer.param_groups for tensor in group["params"]}
    for key in [key for key in optimizer.state if isinstance(key, torch.Tensor) and key not in own]:
        if optimizer.state[key]:
            raise ValueError(
                f"the state of the {type(optimizer).__name__} has {', '.join(map(repr, optimizer.state[key]))} for a "
                f"tensor of shape {tuple(key.shape)} that is in none of its param groups, so no step reads it; the "
                "state is kept for the tensors in optimizer.param_groups"
            )
        del optimizer.state[key]
