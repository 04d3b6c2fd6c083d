"""Copies of tensors into pinned host memory and back, concurrent with the computation of their device.

Copies out and copies back each have a stream, so that they delay neither the computation nor each other. All device
memory belongs to the computing stream. A tensor is held until that stream has waited for its copy out. A copy back
begins after the work that the stream holds at that time.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class OnHost:
    """Tensor that `HostCopies` has copied out.

    Args:
        host: Copy in pinned host memory, valid after the event `is_out`.
        device: Device of the tensor, before and after.
        is_out: Event at the end of the copy out.

    Attributes:
        coming: Tensor of the copy back and the event at the copy's end, between `fetch` and `load`.
    """

    host: Tensor
    device: torch.device
    is_out: Any
    coming: tuple[Tensor, Any] | None = None


class HostCopies:
    """Copies of tensors into pinned host memory and back.

    Args:
        device_module: Module that makes streams and events, such as torch.cuda. Default: the module of each tensor's
            device.
    """

    def __init__(self, device_module: Any = None) -> None:
        self._given = device_module
        self._streams: dict[torch.device, tuple[Any, Any]] = {}  # out and into
        self._coming: list[tuple[Tensor, Any]] = []

    def takes(self, tensor: Tensor) -> bool:
        """Return whether a tensor is copied; a CPU tensor is in host memory already."""
        return self._given is not None or not tensor.is_cpu

    def store(self, tensor: Tensor) -> OnHost:
        """Begin to copy a tensor out. The caller must hold its memory until `wait`."""
        module, device = self._module(tensor.device), tensor.device
        if device not in self._streams:
            self._streams[device] = module.Stream(device), module.Stream(device)
        out, _ = self._streams[device]
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=torch.accelerator.is_available())
        out.wait_stream(module.current_stream(device))
        with module.stream(out):
            host.copy_(tensor, non_blocking=True)
        return OnHost(host, device, out.record_event())

    def wait(self, stored: OnHost) -> None:
        """Make the current stream wait for the end of the copy out."""
        self._module(stored.device).current_stream(stored.device).wait_event(stored.is_out)

    def fetch(self, stored: OnHost) -> None:
        """Begin to copy a tensor back, unless the copy has begun."""
        if stored.coming is not None:
            return
        module, device = self._module(stored.device), stored.device
        _, into = self._streams[device]
        tensor = torch.empty_like(stored.host, device=device)
        into.wait_stream(module.current_stream(device))  # which may still use that memory for what lay there before
        into.wait_event(stored.is_out)
        with module.stream(into):
            tensor.copy_(stored.host, non_blocking=True)
        stored.coming = tensor, into.record_event()
        # If nobody asks for it, its memory must not be used for anything else before the copy has ended.
        self._coming = [each for each in self._coming if not each[1].query()]
        self._coming.append(stored.coming)

    def load(self, stored: OnHost) -> Tensor:
        """Return the tensor on its device; the current stream waits for the copy back."""
        self.fetch(stored)
        assert stored.coming is not None  # noqa: S101 - fetch has made it
        coming, stored.coming = stored.coming, None
        self._coming = [each for each in self._coming if each is not coming]
        tensor, is_there = coming
        self._module(stored.device).current_stream(stored.device).wait_event(is_there)
        return tensor

    def _module(self, device: torch.device) -> Any:
        return self._given if self._given is not None else torch.get_device_module(device)
