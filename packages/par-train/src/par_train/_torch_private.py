"""What par-train uses of torch that it does not call public: the first file to open when torch moves."""

from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree


def tree_leaves(value: Any) -> list[Any]:
    """Lists what nested containers hold, in order. `torch.utils._pytree.tree_leaves` exists since torch 2.2.

    It is needed because a batch may nest tensors in containers that their packages have registered with torch, such as
    the outputs of transformers' models; torch.export's public registry has no function that reads them.
    """
    return _pytree.tree_leaves(value)


def version_of(tensor: Tensor) -> int:
    """How often a tensor was written in place. `Tensor._version` exists since torch 0.4.

    It is needed because only that tells whether somebody else's function has given a tensor its values.
    """
    return tensor._version


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's own table of buffers, without those of its children. `Module._buffers`, since torch 0.1."""
    return module._buffers


def unsaved_buffers_of(module: nn.Module) -> set[str]:
    """Return the names of a module's non-persistent buffers. `Module._non_persistent_buffers_set`, since torch 1.6."""
    return module._non_persistent_buffers_set
