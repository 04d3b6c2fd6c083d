"""Private APIs of torch that par-plan uses: check this file first when torch changes."""

from torch import Tensor


def storage_key(tensor: Tensor) -> int:
    """Return a key that is equal for tensors that share memory, also on the meta device without addresses.

    `UntypedStorage._cdata` exists since torch 2.0; `data_ptr()` is 0 there, and Python's own objects come and go.
    """
    key: int = tensor.untyped_storage()._cdata
    return key
