"""Bytes that autograd keeps between forward and backward."""

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
