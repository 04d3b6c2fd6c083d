"""Copies between the memory of a device and pinned host memory, for which no host waits.

Copies out and copies back each have a stream, so that they delay neither the computation nor each other. All device
memory belongs to the stream that computes. That stream waits for a copy before the memory of the copy is used again.

`Tensor.record_stream` would also protect this memory. But then the memory is free only when the host has seen that the
copy has ended, so the peak would depend on how far the host is ahead of the device.
"""

from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """Tensor of a device that moves to pinned host memory, and back.

    The device's tensor exists until `release`, or until the last reference to this object is gone.

    Args:
        source: Tensor on the device.
        module: Module that makes streams and events for the device.
        streams: Stream of copies out, and stream of copies back.

    Attributes:
        source: Tensor on the device; None after its release.
        host: Copy in host memory; None before `send`.
        is_out: Event at the end of the copy out.
    """

    __slots__ = (
        *("__weakref__", "_device", "_is_back", "_module", "_owner", "_returning", "_streams"),
        *("host", "is_out", "source"),
    )

    def __init__(self, source: Tensor, module: Any, streams: tuple[Any, Any]) -> None:
        self.source: Tensor | None = source
        self.host: Tensor | None = None
        self.is_out: Any = None
        self._device, self._module, self._streams = source.device, module, streams
        self._owner = module.current_stream(source.device)  # stream to which the memory on the device belongs
        self._returning: Tensor | None = None
        self._is_back: Any = None

    def __del__(self) -> None:
        # A graph may be dropped while a copy is in flight, and the owner's next kernel may get the memory.
        if self.source is not None and self.is_out is not None:
            self._owner.wait_event(self.is_out)
        if self._returning is not None:
            self._owner.wait_event(self._is_back)

    @property
    def is_on_device(self) -> bool:
        """Whether the elements are on the device, or a copy back has begun."""
        return self.source is not None or self._returning is not None

    def send(self) -> None:
        """Start the copy to the host, unless it has started."""
        if self.source is None or self.host is not None:
            return
        out, _ = self._streams
        # Only the driver of an accelerator can pin memory. Without one, a device module of a test makes the copies.
        self.host = torch.empty(self.source.shape, dtype=self.source.dtype, pin_memory=torch.accelerator.is_available())
        # The tensor is complete only when the computing stream has reached this point.
        out.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(out):
            self.host.copy_(self.source, non_blocking=True)
        self.is_out = out.record_event()

    def release(self) -> None:
        """Drop the tensor on the device. The stream that owns its memory waits for the end of the copy out."""
        if self.source is not None:
            self.send()
            self._owner.wait_event(self.is_out)
            self.source = None

    def fetch(self) -> None:
        """Begin the copy back, unless the elements are on the device or the copy has begun."""
        if self.is_on_device:
            return
        assert self.host is not None  # noqa: S101 - `release` has sent it
        _, into = self._streams
        self._owner = self._module.current_stream(self._device)
        self._returning = torch.empty_like(self.host, device=self._device)
        into.wait_stream(self._owner)  # work that is enqueued there may still use the new tensor's memory
        into.wait_event(self.is_out)
        with self._module.stream(into):
            self._returning.copy_(self.host, non_blocking=True)
        self._is_back = into.record_event()

    def load(self) -> Tensor:
        """Return the tensor on its device; the current stream waits for a copy back."""
        if self.source is not None:
            return self.source
        self.fetch()
        tensor, self._returning = self._returning, None
        assert tensor is not None  # noqa: S101 - `fetch` has made it
        self._module.current_stream(self._device).wait_event(self._is_back)
        return tensor


class HostCopies:
    """Copies of tensors into pinned host memory and back, concurrent with the computation of their device.

    Args:
        device_module: Module that makes streams and events, such as torch.cuda. Default: the module of each tensor's
            device.
    """

    def __init__(self, device_module: Any = None) -> None:
        self._module = device_module
        self._streams: dict[torch.device, tuple[Any, Any]] = {}

    def takes(self, tensor: Tensor) -> bool:
        """Return whether a tensor can be copied; a CPU tensor is in host memory already."""
        return self._module is not None or not tensor.is_cpu

    def hold(self, tensor: Tensor) -> HostCopy:
        """Return a handle of a tensor, which stays on its device until `HostCopy.send`."""
        module, device = self._module or torch.get_device_module(tensor.device), tensor.device
        if device not in self._streams:
            self._streams[device] = module.Stream(device), module.Stream(device)
        return HostCopy(tensor, module, self._streams[device])

    def store(self, tensor: Tensor) -> HostCopy:
        """Begin to copy a tensor out."""
        copy = self.hold(tensor)
        copy.send()
        return copy


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device. The host does not wait for a copy to an accelerator."""
    # Without an accelerator the device has no memory, as that of a plan on fake tensors.
    if not tensor.is_cpu or device.type == "cpu" or not torch.accelerator.is_available():
        return tensor.to(device)
    # Out of memory that is not pinned, the driver would copy while the host waits.
    return tensor.pin_memory().to(device, non_blocking=True)


def number_on_device(number: float | Tensor, device: torch.device) -> Tensor:
    """Return a number, or a tensor of one element, as a float64 tensor on a device. The host does not wait."""
    if isinstance(number, Tensor):
        return copy_to_device(number.to(torch.float64), device)
    return torch.full((), number, dtype=torch.float64, device=device)  # a kernel, which has the number as argument


def copy_to_host(tensor: Tensor) -> tuple[Tensor, torch.Event]:
    """Begin to copy a tensor of an accelerator to the host.

    Returns:
        The copy, and the event after which the host may read it.
    """
    host = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
    return host, torch.accelerator.current_stream(tensor.device).record_event()
