"""What modules return: the tensors whose gradients tell where the backward of a call begins."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from par_groups import slotted_attributes

from .._torch_private import tree_leaves

_CLOSED = (
    *(str, bytes, int, float, complex, torch.dtype, torch.device),
    *(nn.Module, Optimizer, ModuleType, FunctionType, MethodType, type),
)
"""Types of values in which no output is looked for: they have none, or whatever a program has."""


def hook_(module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> None:
    """Calls before and after each forward of a module, also one that raises; torch.compile leaves both alone."""
    module.register_forward_pre_hook(torch.compiler.disable(before))
    module.register_forward_hook(torch.compiler.disable(after), always_call=True)


def computed(output: Any) -> list[torch.Tensor]:
    """The tensors in what a module returns that a backward pass goes through; a parameter would keep hooks for good."""
    return [tensor for tensor in tensors_of(output) if tensor.requires_grad and not tensor.is_leaf]


def tensors_of(output: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """The tensors in what a module returns: in collections, in what torch's pytree knows, in attributes of objects.

    Args:
        output: What the module returns, or a part of it.
        seen: Objects that were looked into before, by their `id`.
    """
    if isinstance(output, torch.Tensor):
        yield output
        return
    seen = set() if seen is None else seen
    if output is None or isinstance(output, _CLOSED) or id(output) in seen:
        return
    seen.add(id(output))
    for part in _parts_of(output):
        yield from tensors_of(part, seen)


class SideOutputs:
    """Tensors that modules leave in their attributes instead of returning them, such as auxiliary losses.

    Backward may begin with such a tensor, before it comes to what the module has returned. The first two calls look
    through all attributes, and later ones at those in which something was found, so a step costs next to nothing.

    Args:
        modules: The modules, without their children.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules, self._looks = tuple(modules), 2
        self._found: dict[tuple[int, str], nn.Module] = {}

    def computed(self) -> list[torch.Tensor]:
        """The tensors with a graph in attributes now: tensors, or items of lists, tuples and dicts."""
        if self._looks:
            self._looks -= 1
            for number, module in enumerate(self._modules):
                self._found |= {(number, name): module for name, value in vars(module).items() if _computed_in(value)}
        return [tensor for (_, name), module in self._found.items() for tensor in _computed_in(vars(module).get(name))]


def _computed_in(value: Any) -> list[torch.Tensor]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    return [item for item in items if isinstance(item, torch.Tensor) and item.requires_grad and not item.is_leaf]


def _parts_of(value: Any) -> Iterable[Any]:
    """The items of a collection; of any other object what it was registered with, or else its attributes."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    leaves = tree_leaves(value)
    if len(leaves) != 1 or leaves[0] is not value:
        return leaves
    return [
        *getattr(value, "__dict__", {}).values(),
        *(getattr(value, name, None) for name in slotted_attributes(type(value))),
    ]
