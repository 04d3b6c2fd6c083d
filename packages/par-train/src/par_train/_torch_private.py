"""The APIs of torch that par-train uses and that are not public. Open this file first when torch changes."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch.utils import _pytree


def tree_leaves(value: Any) -> list[Any]:
    """Return the leaves of nested containers, in order. `torch.utils._pytree.tree_leaves` exists since torch 2.2.

    It is needed because a batch may nest tensors in containers that their packages have registered with torch, such as
    the outputs of transformers' models; torch.export's public registry has no function that reads them.
    """
    return _pytree.tree_leaves(value)


def tree_map(function: Callable[[Any], Any], value: Any) -> Any:
    """Return nested containers with other leaves. `torch.utils._pytree.tree_map` exists since torch 1.8.

    See `tree_leaves` for why it is needed.
    """
    return _pytree.tree_map(function, value)


def import_compiler() -> None:
    """Import `torch._dynamo`, which torch imports when a program makes its first optimizer; since torch 2.0.

    It takes seconds. Ranks that wait for a new rank would wait for its import.
    """
    import_module("torch._dynamo")
