"""What par-train uses of torch that it does not call public: the first file to open when torch moves."""

from typing import Any

from torch.utils import _pytree


def tree_leaves(value: Any) -> list[Any]:
    """Lists what nested containers hold, in order. `torch.utils._pytree.tree_leaves` exists since torch 2.2.

    It is needed because a batch may nest tensors in containers that their packages have registered with torch, such as
    the outputs of transformers' models; torch.export's public registry has no function that reads them.
    """
    return _pytree.tree_leaves(value)
