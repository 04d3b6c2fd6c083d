"""Offloading of the activations of waiting microbatches, such as to host memory."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._structure import tensors_of

Key = tuple[int, int]  # stage and microbatch

AHEAD = 2
"""Prefetch depth: number of microbatches before its backward at which an offloaded activation is fetched."""


class PinnedStore:
    """Copies of tensors into pinned host memory and back, concurrent with the computation of their device.

    Copies out and copies back each have a stream, so that they delay neither the computation nor each other. The
    computation waits only for a tensor that is copied back. CPU tensors stay unchanged.

    Args:
        device_module: Module that makes streams and events, such as torch.cuda. Default: the module of each tensor's
            device.
    """

    def __init__(self, device_module: Any = None) -> None:
        self._module = device_module
        self._streams: dict[torch.device, tuple[Any, Any]] = {}  # out and back

    def store(self, tensor: Tensor) -> "Tensor | PinnedTensor":
        """Begin to copy a tensor out."""
        module = self._module
        if module is None:
            if tensor.is_cpu:
                return tensor
            module = torch.get_device_module(tensor.device)
        if tensor.device not in self._streams:
            self._streams[tensor.device] = module.Stream(tensor.device), module.Stream(tensor.device)
        out, back = self._streams[tensor.device]
        # The tensor is complete only when the computing stream has reached this point.
        out.wait_stream(module.current_stream(tensor.device))
        with module.stream(out):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.accelerator.is_available())
            host.copy_(tensor, non_blocking=True)
        if not tensor.is_cpu:
            tensor.record_stream(out)  # its memory is not given to another before the copy has read it
        return PinnedTensor(host, tensor.device, out.record_event(), back, module)

    @staticmethod
    def fetch(stored: "Tensor | PinnedTensor") -> None:
        """Begin to copy a tensor back, unless the copy has begun."""
        if isinstance(stored, PinnedTensor):
            stored.come_back()

    @staticmethod
    def load(stored: "Tensor | PinnedTensor") -> Tensor:
        """Return the tensor on its device; the current stream waits for the copy back."""
        return stored.take() if isinstance(stored, PinnedTensor) else stored


@dataclass
class PinnedTensor:
    """Tensor that `PinnedStore` has copied out.

    Args:
        host: Copy in host memory, valid after the event `is_out`.
        device: Device of the tensor, before and after.
        is_out: Event at the end of the copy out.
        back: Stream of the copy back.
        module: Module that makes streams and events for the device.

    Attributes:
        returning: Tensor of the copy back and the event at the copy's end, between `come_back` and `take`.
    """

    host: Tensor
    device: torch.device
    is_out: Any
    back: Any
    module: Any
    returning: tuple[Tensor, Any] | None = None

    def come_back(self) -> tuple[Tensor, Any]:
        """Begin the copy back, unless it has begun; return the tensor and the event at the copy's end."""
        if self.returning is None:
            # The host memory is filled by the stream of copies out, which may still run.
            self.back.wait_event(self.is_out)
            with self.module.stream(self.back):
                tensor = torch.empty_like(self.host, device=self.device)
                tensor.copy_(self.host, non_blocking=True)
            self.returning = tensor, self.back.record_event()
        return self.returning

    def take(self) -> Tensor:
        """Return the tensor on its device and drop the reference to it; the current stream waits for the copy."""
        tensor, is_back = self.come_back()
        # The handle stays in autograd's graph until the backward ends, and must not keep the device memory with it.
        self.returning = None
        current = self.module.current_stream(self.device)
        current.wait_event(is_back)
        if not tensor.is_cpu:
            tensor.record_stream(current)
        return tensor


@dataclass(frozen=True, kw_only=True)
class ActivationOffload:
    """Options for offloading the activations of microbatches until their backward.

    By default, tensors of an accelerator are copied into pinned host memory while the device computes. The copies back
    begin two microbatches before their backward. The device then holds `resident` bytes, and the activations of these
    two microbatches. Tensors on the CPU stay.

    Args:
        resident: Limit for the saved activations that stay on the device, in bytes per rank. Default: 0.
        store: Function that stores a tensor and returns a handle for `load`; replaces the copies into host memory.
        load: Function that returns the tensor of a handle from `store`.
        fetch: Function that begins to load the tensor of a handle from `store`, two microbatches ahead. None: no
            prefetch.

    Raises:
        ValueError: The number of bytes is negative, or only one of `store` and `load` is set.
    """

    resident: int = 0
    store: Callable[[Tensor], Any] | None = None
    load: Callable[[Any], Tensor] | None = None
    fetch: Callable[[Any], None] | None = None

    def __post_init__(self) -> None:
        if self.resident < 0:
            raise ValueError(f"resident is {self.resident} bytes; give 0 or more")
        if (self.store is None) != (self.load is None) or (self.fetch is not None and self.store is None):
            given = [name for name in ("store", "load", "fetch") if getattr(self, name) is not None]
            raise ValueError(f"only {given} of store, load and fetch is set; set store and load together, or neither")


class _Stored(NamedTuple):
    """Saved tensor that is offloaded."""

    value: Any


class Activations:
    """Saved activations of this rank's microbatches, within the limit of an `ActivationOffload`.

    Args:
        offload: Options; None: all activations stay.
        modules: Stages of this rank; their parameters and buffers stay.
    """

    def __init__(self, offload: ActivationOffload | None, modules: Iterable[nn.Module]) -> None:
        self._offload, self._modules = offload, tuple(modules)
        self._resident: dict[Key, dict[int, int]] = {}  # for each microbatch, the bytes at each address
        self._stored: dict[Key, list[Any]] = {}  # for each microbatch, what can begin to come back ahead
        self._order: list[Key] = []
        self._store: Callable[[Tensor], Any]
        self._load: Callable[[Any], Tensor]
        self._fetch: Callable[[Any], None] | None
        if offload is None or offload.store is None or offload.load is None:
            copies = PinnedStore()
            self._store, self._load, self._fetch = copies.store, copies.load, copies.fetch
        else:
            self._store, self._load, self._fetch = offload.store, offload.load, offload.fetch

    def begin(self, order: Iterable[Key]) -> None:
        """Set the order of the backwards of stages and microbatches, at the start of a step."""
        if self._offload is not None:
            self._order = list(order)

    def saving(self, key: Key) -> AbstractContextManager[object]:
        """Return a context for the forward of one stage and microbatch, which offloads saved activations."""
        if self._offload is None:
            return nullcontext()
        limit, resident = self._offload.resident, self._resident
        tensors = (tensor for module in self._modules for tensor in (*module.parameters(), *module.buffers()))
        # Parameters and buffers stay on the device anyway, so a copy of them would free nothing.
        fixed = {_address(tensor) for tensor in tensors}
        mine = resident[key] = {}
        stored = self._stored[key] = []

        def pack(saved: Tensor) -> Any:
            # An output that is kept itself would hold its own node, which holds this: a cycle that nobody collects.
            tensor = saved.detach()
            address = _address(tensor)
            size = tensor.untyped_storage().nbytes()
            # Several saved tensors may view one storage, which counts once.
            if address in fixed or address in mine:
                return tensor
            if sum(sum(sizes.values()) for sizes in resident.values()) + size <= limit:
                mine[address] = size
                return tensor
            value = self._store(tensor)
            if self._fetch is not None:
                stored.append(value)
            return _Stored(value)

        def unpack(saved: Any) -> Tensor:
            return self._load(saved.value) if isinstance(saved, _Stored) else saved

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def approach(self, key: Key) -> None:
        """Fetch the activations of the next backward, of that stage and microbatch, and of the two after it."""
        fetch = self._fetch
        if fetch is None or not self._order:
            return
        place = self._order.index(key)
        # Popping makes each fetch happen once, however often a window covers it.
        for near in self._order[place : place + AHEAD + 1]:
            for value in self._stored.pop(near, ()):
                fetch(value)

    def free_(self, received: Sequence[Tensor], output: Any) -> None:
        """Free the memory of a stage's received tensors, unless it is resident or part of the stage's output."""
        if self._offload is None:
            return
        if self._offload.store is None and all(tensor.is_cpu for tensor in received):
            return
        needed = {_address(tensor) for tensor in tensors_of(output)}.union(*self._resident.values())
        for tensor in received:
            if _address(tensor) not in needed:
                # Backward reads the copy that `saving` has stored. A caller may still reference the received tensor, so
                # its storage is freed instead of the tensor.
                tensor.untyped_storage().resize_(0)

    def done(self, key: Key) -> None:
        """Discard the activations of one stage and microbatch after its backward."""
        self._resident.pop(key, None)
        self._stored.pop(key, None)

    def reset(self) -> None:
        """Discard all microbatches."""
        self._resident.clear()
        self._stored.clear()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
