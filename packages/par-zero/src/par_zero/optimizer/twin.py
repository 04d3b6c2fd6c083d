"""An optimizer of the same class and settings as another one, for other tensors."""

from collections import defaultdict
from typing import Any

from torch.optim import Optimizer

from .._torch_private import hooks_of


def twin_of(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    """An optimizer of the same class and attributes, without state and without hooks.

    Its constructor is not called, since nobody knows with what. Instead it gets the attributes of the original, except
    those that are bound to the original.

    Args:
        optimizer: The original; it is not touched.
        group: The only param group of the twin.
    """
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    for name in hooks_of(optimizer):
        twin.__dict__[name] = type(twin.__dict__[name])()
    for name in optimizer.__dict__:
        if callable(getattr(type(optimizer), name, None)):
            del twin.__dict__[name]  # a method that was replaced, such as `step` by an lr scheduler
    twin.param_groups = [group]
    twin.state = defaultdict(dict)
    return twin
