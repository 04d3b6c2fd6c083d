"""Tensors in pinned host memory, copied there and back beside the computation of their device.

Copies out and copies back have a stream each, so that neither holds back the computation or the other. All memory is
the computing stream's: a tensor that is copied is held until that stream has waited for its copy, and the copy of one
that comes back waits for that stream.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class OnHost:
    """A tensor that `HostCopies` has copied out.

    Args:
        host: Its copy in pinned host memory, valid once `is_out` has come.
        device: Where it was and will be.
        is_out: The event at the end of the copy out.

    Attributes:
        coming: The tensor that comes back and the event at the copy's end, between `fetch` and `load`.
    """

    host: Tensor
    device: torch.device
    is_out: Any
    coming: tuple[Tensor, Any] | None = None


class HostCopies:
    """Copies tensors into pinned host memory, and back.

    Args:
        device_module: What makes streams and events, as torch.cuda does; None: the module of each tensor's device.
    """

    def __init__(self, device_module: Any = None) -> None:
        self._given = device_module
        self._streams: dict[torch.device, tuple[Any, Any]] = {}  # out and into
        self._coming: list[tuple[Tensor, Any]] = []

    def takes(self, tensor: Tensor) -> bool:
        """Whether a tensor is copied at all: those of the CPU are there already."""
        return self._given is not None or not tensor.is_cpu

    def store(self, tensor: Tensor) -> OnHost:
        """Begins to copy a tensor out. Its memory must stay until `wait` was called."""
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
        """Lets what is computed from now on wait for the end of the copy out."""
        self._module(stored.device).current_stream(stored.device).wait_event(stored.is_out)

    def fetch(self, stored: OnHost) -> None:
        """Begins to copy a tensor back, unless that has begun."""
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
        """The tensor on its device again; what is computed from now on waits for it."""
        self.fetch(stored)
        assert stored.coming is not None  # noqa: S101 - fetch has made it
        coming, stored.coming = stored.coming, None
        self._coming = [each for each in self._coming if each is not coming]
        tensor, is_there = coming
        self._module(stored.device).current_stream(stored.device).wait_event(is_there)
        return tensor

    def _module(self, device: torch.device) -> Any:
        return self._given if self._given is not None else torch.get_device_module(device)
