"""Activations of waiting microbatches elsewhere than on the device, such as in host memory."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._structure import tensors_of

Key = tuple[int, int]  # stage and microbatch


def to_host(tensor: Tensor) -> tuple[torch.device, Tensor]:
    """A tensor's device, and the tensor in host memory, pinned where it comes from an accelerator."""
    if tensor.device.type == "cpu":
        return tensor.device, tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return tensor.device, host.copy_(tensor, non_blocking=True)  # the way back is in the same stream


def from_host(stored: tuple[torch.device, Tensor]) -> Tensor:
    """The tensor on its device again."""
    device, host = stored
    return host.to(device, non_blocking=True)


@dataclass(frozen=True, kw_only=True)
class Offload:
    """Where the activations of microbatches wait for their backward.

    Args:
        resident: Bytes of saved activations that may stay where they are, on each rank; what does not fit is stored.
        store: Puts a tensor away; default: into host memory.
        load: Brings it back, from what `store` gave.

    Raises:
        ValueError: A negative number of bytes.
    """

    resident: int = 0
    store: Callable[[Tensor], Any] = to_host
    load: Callable[[Any], Tensor] = from_host

    def __post_init__(self) -> None:
        if self.resident < 0:
            raise ValueError(f"resident is {self.resident} bytes; give 0 or more")


class _Stored:
    """A saved tensor that is put away."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Activations:
    """Keeps to the limit of an `Offload`.

    Args:
        offload: The limit; None: everything stays.
        modules: This rank's; their parameters and buffers stay.
    """

    def __init__(self, offload: Offload | None, modules: Iterable[nn.Module]) -> None:
        self._offload, self._modules = offload, tuple(modules)
        self._resident: dict[Key, dict[int, int]] = {}  # of each microbatch, the bytes at each address

    def saving(self, key: Key) -> AbstractContextManager[object]:
        """For the forward of one microbatch."""
        if self._offload is None:
            return nullcontext()
        offload, resident = self._offload, self._resident
        fixed = {_address(each) for module in self._modules for each in (*module.parameters(), *module.buffers())}
        mine = resident[key] = {}

        def pack(tensor: Tensor) -> Any:
            address = _address(tensor)
            size = tensor.untyped_storage().nbytes()
            if address in fixed or address in mine:
                return tensor
            if sum(sum(each.values()) for each in resident.values()) + size <= offload.resident:
                mine[address] = size
                return tensor
            return _Stored(offload.store(tensor))

        def unpack(saved: Any) -> Tensor:
            return offload.load(saved.value) if isinstance(saved, _Stored) else saved

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def free_(self, received: Sequence[Tensor], output: Any) -> None:
        """Frees the memory of what a stage received, unless it is resident or given on."""
        if self._offload is None or (self._offload.store is to_host and all(each.is_cpu for each in received)):
            return
        needed = {_address(each) for each in tensors_of(output)}.union(*self._resident.values())
        for each in received:
            if _address(each) not in needed:
                each.untyped_storage().resize_(0)

    def done(self, key: Key) -> None:
        """The backward of a microbatch is over."""
        self._resident.pop(key, None)

    def reset(self) -> None:
        """Forgets all microbatches."""
        self._resident.clear()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
