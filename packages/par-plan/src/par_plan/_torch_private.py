"""Private APIs of torch that par-plan uses: check this file first when torch changes."""

from torch import Tensor
from torch.utils import _pytree

# torch.utils._pytree: `tree_map` since torch 1.8, `tree_leaves` since 2.2. torch and users register containers there.
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map


def storage_key(tensor: Tensor) -> int:
    """Return a key that is equal for tensors that share memory, also on the meta device without addresses.

    `UntypedStorage._cdata` exists since torch 2.0; `data_ptr()` is 0 there, and Python's own objects come and go.
    """
    key: int = tensor.untyped_storage()._cdata
    return key
