"""The APIs of torch that par-train uses and that are not public. Open this file first when torch changes."""

from typing import Any

from torch.utils import _pytree


def tree_leaves(value: Any) -> list[Any]:
    """Return the leaves of nested containers, in order. `torch.utils._pytree.tree_leaves` exists since torch 2.2.

    It is needed because a batch may nest tensors in containers that their packages have registered with torch, such as
    the outputs of transformers' models; torch.export's public registry has no function that reads them.
    """
    return _pytree.tree_leaves(value)
