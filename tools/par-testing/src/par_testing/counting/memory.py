"""Bytes of the tensors that are alive, and of those that autograd keeps between forward and backward."""

import gc
import time
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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


def live_bytes(
    expected: Callable[[int], bool] = lambda _: True, *, patience: float = 60.0, without: Container[int] = ()
) -> int:
    """Bytes of all tensors that Python knows, each storage counted once; sparse and meta ones have none.

    Args:
        expected: Whether a number of bytes is what the test expects. While it is not, the tensors are counted again:
            gloo's thread drops a finished collective, and with it the tensors that it held, only when the thread gets
            its turn again, so that the first count may have a tensor too many on a busy machine. What leaks never goes.
        patience: After how many seconds the last count is returned, whatever it is.
        without: Numbers of storages that do not count, such as `live_storages()` of before, which keeps them.
    """
    limit = time.monotonic() + patience
    while True:
        gc.collect()
        total = sum(storage.nbytes() for key, storage in live_storages().items() if key not in without)
        if expected(total) or time.monotonic() >= limit:
            return total
        time.sleep(0.01)


def live_storages() -> dict[int, torch.UntypedStorage]:
    """Return the storages of all live tensors, by an id that is unique while the storage is alive.

    Sparse and meta tensors are left out. The function does not collect garbage first.
    """
    found = (item for item in gc.get_objects() if issubclass(type(item), Tensor))
    tensors = (tensor for tensor in found if tensor.layout is torch.strided and not tensor.is_meta)
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {storage._cdata: storage for storage in storages}


def peak_bytes(run: Callable[[], object], expected: float = float("inf"), *, least: int = 4096) -> int:
    """The most bytes that are alive at one time while `run` computes, counted by `live_bytes` wherever there are more.

    Args:
        run: What allocates and frees tensors. What one operator takes and gives back by itself is not seen.
        expected: How many bytes the test expects at most. Where there are more, they are counted again for a minute,
            as gloo may hold a tensor for a little longer.
        least: Operators that make smaller tensors than this many bytes are passed over, as counting takes a while.
    """
    peak = _Peak(expected, least)
    with peak:
        run()
    return peak.most


class _Peak(TorchDispatchMode):
    """Counts the live bytes after each operator that has made a new storage."""

    def __init__(self, expected: float, least: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._expected, self._least = expected, least

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        given = {_storage(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and not leaf.is_meta]
        if any(_storage(leaf) not in given and leaf.untyped_storage().nbytes() >= self._least for leaf in made):
            patience = 60.0 if self.most <= self._expected else 0.0
            self.most = max(self.most, live_bytes(lambda total: total <= self._expected, patience=patience))
        return result


def _storage(tensor: Tensor) -> int:
    """A number of the memory that a tensor is a view of; 0 for a sparse one, which has none."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0
