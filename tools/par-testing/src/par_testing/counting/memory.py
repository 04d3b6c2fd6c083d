"""Bytes of the tensors that are alive, and of those that autograd keeps between forward and backward."""

import gc
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def saved_bytes(run: Callable[[], object], ignore: Iterable[Tensor] = ()) -> int:
    """Bytes of the distinct storages that are saved for backward while `run` computes.

    Args:
        run: A forward pass; what it returns is kept until all is counted.
        ignore: Tensors whose storages do not count, such as parameters.
    """
    left_out = {tensor.untyped_storage().data_ptr() for tensor in ignore}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in left_out:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = run()
        total = sum(storages.values())
    del kept
    return total


def live_bytes(expected: Callable[[int], bool] = lambda _: True, *, patience: float = 5.0) -> int:
    """Bytes of all tensors that Python knows, each storage counted once; sparse ones, which have none, left out.

    Args:
        expected: Whether a number of bytes is what the test expects. While it is not, the tensors are counted again:
            gloo's thread drops a finished collective, and with it the tensors that it held, only when the thread gets
            its turn again, so that the first count may have a tensor too many on a busy machine. What leaks never goes.
        patience: After how many seconds the last count is returned, whatever it is.
    """
    limit = time.monotonic() + patience
    while True:
        gc.collect()
        found = [item for item in gc.get_objects() if issubclass(type(item), Tensor)]
        tensors = [tensor for tensor in found if tensor.layout is torch.strided]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
        total: int = sum(storages.values())
        if expected(total) or time.monotonic() >= limit:
            return total
        del found, tensors
        time.sleep(0.01)
