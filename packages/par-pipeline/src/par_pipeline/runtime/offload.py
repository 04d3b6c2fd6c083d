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
        store: Puts a tensor away and returns what `load` takes. Default: it goes into host memory.
        load: Brings a tensor back, from what `store` returned.

    Raises:
        ValueError: The number of bytes is negative.
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
        modules: This rank's stages; their parameters and buffers stay.
    """

    def __init__(self, offload: Offload | None, modules: Iterable[nn.Module]) -> None:
        self._offload, self._modules = offload, tuple(modules)
        self._resident: dict[Key, dict[int, int]] = {}  # for each microbatch, the bytes at each address

    def saving(self, key: Key) -> AbstractContextManager[object]:
        """A context for the forward of one stage and microbatch, in which saved activations are stored."""
        if self._offload is None:
            return nullcontext()
        offload, resident = self._offload, self._resident
        tensors = (tensor for module in self._modules for tensor in (*module.parameters(), *module.buffers()))
        fixed = {_address(tensor) for tensor in tensors}
        mine = resident[key] = {}

        def pack(tensor: Tensor) -> Any:
            address = _address(tensor)
            size = tensor.untyped_storage().nbytes()
            if address in fixed or address in mine:
                return tensor
            if sum(sum(sizes.values()) for sizes in resident.values()) + size <= offload.resident:
                mine[address] = size
                return tensor
            return _Stored(offload.store(tensor))

        def unpack(saved: Any) -> Tensor:
            return offload.load(saved.value) if isinstance(saved, _Stored) else saved

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def free_(self, received: Sequence[Tensor], output: Any) -> None:
        """Frees the memory of what a stage received, unless it is resident or part of the stage's output."""
        if self._offload is None:
            return
        if self._offload.store is to_host and all(tensor.is_cpu for tensor in received):
            return
        needed = {_address(tensor) for tensor in tensors_of(output)}.union(*self._resident.values())
        for tensor in received:
            if _address(tensor) not in needed:
                tensor.untyped_storage().resize_(0)

    def done(self, key: Key) -> None:
        """Says that the backward of one stage and microbatch is over."""
        self._resident.pop(key, None)

    def reset(self) -> None:
        """Forgets all microbatches."""
        self._resident.clear()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
