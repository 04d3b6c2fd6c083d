"""Private APIs of torch that par-plan uses: check this file first when torch changes."""

from torch import Tensor


def storage_key(tensor: Tensor) -> int:
    """Tells whether tensors share memory, also on the meta device, where no memory has an address.

    `UntypedStorage._cdata` exists since torch 2.0; `data_ptr()` is 0 there, and Python's own objects come and go.
    """
    key: int = tensor.untyped_storage()._cdata
    return key
