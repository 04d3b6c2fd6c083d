"""The tensors in the outputs of modules. The gradient of such a tensor marks the beginning of a call's backward."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from par_groups import slotted_attributes

from .._torch_private import tree_leaves, uncompiled

_CLOSED = (
    *(str, bytes, int, float, complex, torch.dtype, torch.device),
    *(nn.Module, Optimizer, ModuleType, FunctionType, MethodType, type),
)
"""Types of values that are not searched for tensors. They contain no outputs, or refer to unrelated objects."""


def hook_(
    module: nn.Module, before: Callable[..., None], after: Callable[..., None]
) -> tuple[RemovableHandle, RemovableHandle]:
    """Register hooks before and after each forward of a module, which torch.compile does not compile.

    Args:
        module: Module to hook.
        before: Forward pre-hook.
        after: Forward hook, which also runs if forward raises.

    Returns:
        The handles that remove the two hooks.
    """
    return (
        module.register_forward_pre_hook(uncompiled(before)),
        module.register_forward_hook(uncompiled(after), always_call=True),
    )


def computed(output: Any) -> list[torch.Tensor]:
    """Return the tensors in a module's output that a backward pass goes through.

    Args:
        output: Output of a module.
    """
    # Hooks on a leaf, such as a parameter that a module returns, would remain after the pass.
    return [tensor for tensor in output_tensors(output) if tensor.requires_grad and not tensor.is_leaf]


def output_tensors(output: Any, seen: set[int] | None = None) -> Iterator[torch.Tensor]:
    """Yield the tensors in a module's output: in collections, in types of torch's pytree and in attributes of objects.

    Args:
        output: Output of the module, or a part of the output.
        seen: `id`s of the objects that were searched before. Objects may refer to each other in circles. Default: none.
    """
    if isinstance(output, torch.Tensor):
        yield output
        return
    seen = set() if seen is None else seen
    if output is None or isinstance(output, _CLOSED) or id(output) in seen:
        return
    seen.add(id(output))
    for part in _parts_of(output):
        yield from output_tensors(part, seen)


def call_at_backward(tensors: Sequence[torch.Tensor], call: Callable[[torch.Tensor], None]) -> None:
    """Call a function with the first gradient that arrives for any of some tensors, once in each backward pass.

    Args:
        tensors: Tensors, which are no leaves.
        call: Function, which returns None.
    """
    # The loss need not depend on every tensor. torch's hook of several tensors takes ten times as long to register, and
    # almost every module returns one.
    if len(tensors) == 1:
        tensors[0].register_hook(call)
    else:
        torch.autograd.graph.register_multi_grad_hook(tensors, call, mode="any")


class SideOutputs:
    """The tensors that modules store in their attributes instead of returning them, such as auxiliary losses.

    Backward may begin with such a tensor, before it reaches the output of the module. The first two calls search all
    attributes. Later calls inspect only the attributes in which a tensor was found, so they cost almost no time.

    Args:
        modules: Modules to search, without their children.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules, self._looks = tuple(modules), 2
        self._found: dict[tuple[int, str], nn.Module] = {}

    def computed(self) -> list[torch.Tensor]:
        """Return the tensors with a graph that attributes hold now, directly or in lists, tuples and dicts."""
        if self._looks:
            self._looks -= 1
            for number, module in enumerate(self._modules):
                self._found |= {(number, name): module for name, value in vars(module).items() if _computed_in(value)}
        return [tensor for (_, name), module in self._found.items() for tensor in _computed_in(vars(module).get(name))]


def _computed_in(value: Any) -> list[torch.Tensor]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
    return [item for item in items if isinstance(item, torch.Tensor) and item.requires_grad and not item.is_leaf]


def _parts_of(value: Any) -> Iterable[Any]:
    """Return the items of a collection, the pytree leaves of a registered object, or the attributes of another one."""
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    # An object that is its own single leaf is not registered with torch's pytree.
    leaves = tree_leaves(value)
    if len(leaves) != 1 or leaves[0] is not value:
        return leaves
    return [
        *getattr(value, "__dict__", {}).values(),
        *(getattr(value, name, None) for name in slotted_attributes(type(value))),
    ]
