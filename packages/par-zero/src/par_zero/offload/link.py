"""The link between a device and its host: how gradients get to the host, and updated parameters to the device.

    compute   backward of chunk k | backward of chunk k - 1 |      forward of the first units
    out       gradient of k + 1   | gradient of k           | ...
    host      (a thread)                      update piece 1 | update piece 2 | ...
    into                                                     | piece 1        | piece 2 ...

On a CPU, device and host are one memory: nothing is copied but what a step rounds. On an accelerator each direction has
a stream of its own, and events order all accesses:

- A gradient may be copied out when its reduction has ended on the stream that computes. That stream may use the
  gradient's memory again after the copy, and the host may read the gradient after the copy.
- A parameter may be copied in when the stream that computes has no more use for the old value: after the call of
  `step`. A unit may be computed after the copy of its parameters. The host may write the source after the copy.

`record_stream` is not used: how long it holds memory depends on how far the host is ahead of the device.

`HostCopy` of par_groups moves a tensor out and back unchanged, and allocates both ends anew. Here the places are fixed
for all steps, the host updates values between the two directions, and what is copied in is rounded.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .._torch_private import READS_NO_VALUES, without_torch_functions
from ..layout.chunk import Chunk

_SLAB = 2**28
"""Bytes of a slab of pinned memory. torch rounds each up to a power of two, so one large tensor could waste half."""


class MemoryLink:
    """Link of a CPU to itself: device and host have the same memory."""

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the pinned buffers in which values are rounded."""
        return 0

    def on_device(self) -> AbstractContextManager[Any]:
        """Return a context in which a thread uses the link's device."""
        return nullcontext()

    def record(self) -> torch.Event | None:
        """Return an event after all work on the current stream so far. None: nothing needs to wait for it."""
        return None

    def begin_step(self, event: torch.Event | None) -> None:
        """Let the copies to parameters that follow wait for the last use of the old values.

        Args:
            event: Event of `record` after the program's last use.
        """

    def copy_in(self, chunk: Chunk, target: torch.Tensor, source: torch.Tensor) -> None:  # noqa: ARG002 - no event
        """Begin to copy updated values to parameters, rounded to their dtype.

        Args:
            chunk: Chunk of the parameters.
            target: Parameters that the module uses.
            source: Tensor that the optimizer has updated.
        """
        target.copy_(source)

    def fetch(self, chunk: Chunk, target: torch.Tensor) -> AbstractContextManager[Any]:
        """Begin to copy this rank's shard of a chunk from the host.

        Args:
            chunk: Chunk whose shard is on the host.
            target: Memory on the device. Earlier work on the current stream may still use it.

        Returns:
            Context in which work is queued behind the copy. The current stream waits for the copy in `wait_for`.
        """
        target.copy_(chunk.own)
        return nullcontext()

    def finish_copies_in(self, chunk: Chunk) -> None:
        """Let the host wait for the copies to a chunk's parameters, before it writes their sources."""

    def wait_for(self, chunks: Iterable[Chunk] | None = None) -> None:
        """Let the current stream wait for the copies to the parameters of some chunks, or of all."""

    def settle(self) -> None:
        """Let the host wait for all copies to parameters, before it writes their sources."""


class DeviceLink(MemoryLink):
    """Link between an accelerator and its host, with one stream for each direction.

    Args:
        device: The accelerator.
        depth: Number of pinned buffers in which values are rounded, each for one piece.
    """

    def __init__(self, device: torch.device, depth: int) -> None:
        self._module = torch.get_device_module(device)
        self._device = device
        self.out, self.into = torch.Stream(device), torch.Stream(device)
        self._buffers: deque[tuple[torch.Tensor, torch.Event | None]] = deque()
        self._depth = depth
        self._copied_in: dict[Chunk, torch.Event] = {}
        # A program may drop the model while the last step still copies. Its memory then serves the next tensors.
        dropped = weakref.finalize(self, _wait_for_copies, device, (self.out, self.into))
        dropped.atexit = False

    @property
    def buffer_bytes(self) -> int:
        """See `MemoryLink`."""
        # A copy, since the thread of a late step adds and takes buffers while `residency` counts.
        return sum(buffer.nbytes for buffer, _ in tuple(self._buffers))

    def on_device(self) -> AbstractContextManager[Any]:
        """See `MemoryLink`."""
        return self._module.device(self._device)  # type: ignore[no-any-return]

    def record(self) -> torch.Event | None:
        """See `MemoryLink`."""
        return self._current().record_event()

    def begin_step(self, event: torch.Event | None) -> None:
        """See `MemoryLink`."""
        # The thread that copies calls this, between the copies of two chunks. The program may record the events of many
        # chunks before the thread copies the first one, which must wait for its own event only.
        if event is not None:
            self.into.wait_event(event)

    def copy_in(self, chunk: Chunk, target: torch.Tensor, source: torch.Tensor) -> None:
        """See `MemoryLink`."""
        if target.is_cpu:  # the shard that units fetch
            target.copy_(source)
            return
        # A pinned source in the right dtype needs no buffer: the host does not write it before `finish_copies_in`.
        in_place = source.dtype == target.dtype and source.is_pinned()
        rounded = source if in_place else self._rounded(source, target.dtype)
        with self._module.stream(self.into):
            target.copy_(rounded, non_blocking=True)
            event = self.into.record_event()
        if not in_place:
            self._buffers[-1] = self._buffers[-1][0], event
        self._copied_in[chunk] = event

    def _rounded(self, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a source in another dtype, in the last buffer of the ring."""
        size = source.numel() * dtype.itemsize
        buffer: torch.Tensor | None = None
        if len(self._buffers) >= self._depth:
            buffer, event = self._buffers.popleft()
            if event is not None:
                # Only the worker waits here, until the oldest buffer was copied to the device.
                event.synchronize()
        if buffer is None or buffer.nbytes < size:
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._buffers.append((buffer, None))
        rounded = buffer[:size].view(dtype)
        rounded.copy_(source)
        return rounded

    def fetch(self, chunk: Chunk, target: torch.Tensor) -> AbstractContextManager[Any]:
        """See `MemoryLink`."""
        self.begin_step(self.record())
        self.copy_in(chunk, target, chunk.own)
        return self._module.stream(self.into)  # type: ignore[no-any-return]

    def finish_copies_in(self, chunk: Chunk) -> None:
        """See `MemoryLink`."""
        if (event := self._copied_in.get(chunk)) is not None:
            event.synchronize()

    def wait_for(self, chunks: Iterable[Chunk] | None = None) -> None:
        """See `MemoryLink`."""
        for chunk in list(self._copied_in) if chunks is None else chunks:
            if (event := self._copied_in.get(chunk)) is not None:
                self._current().wait_event(event)

    def copy_out(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Event]:
        """Begin to copy tensors to pinned memory, after all work on the current stream so far.

        The caller keeps the tensors until a stream that writes their memory has waited for the last event.

        Args:
            pairs: Pinned target and source of each copy.

        Returns:
            Event after each copy.
        """
        self.out.wait_event(self._current().record_event())
        events = []
        with self._module.stream(self.out):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                events.append(self.out.record_event())
        return events

    def wait_event(self, event: torch.Event) -> None:
        """Let the current stream wait for an event of the link."""
        self._current().wait_event(event)

    def settle(self) -> None:
        """See `MemoryLink`."""
        # Gradients on their way out wait for themselves, at their first use.
        self.into.synchronize()

    def _current(self) -> torch.Stream:
        return torch.accelerator.current_stream(self._device)


def _wait_for_copies(device: torch.device, streams: Iterable[torch.Stream]) -> None:
    """Let the current stream wait for all copies of some streams."""
    for stream in streams:
        torch.accelerator.current_stream(device).wait_stream(stream)


class HostReads:
    """Copies of an optimizer's own tensors to the host, such as a gradient scale that was computed on the device."""

    def __init__(self) -> None:
        self._event: torch.Event | None = None

    @property
    def has_begun(self) -> bool:
        """Whether any tensor came from a device."""
        return self._event is not None

    def begin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Begin to copy a tensor to the host's memory, and return the copy, which is not to be used before `wait`."""
        if tensor.is_cpu:
            return tensor.clone()
        copy = torch.empty_like(tensor, device="cpu", pin_memory=True)
        # A few bytes, on the stream that computes: it may write the tensor's memory at once, as after the step.
        copy.copy_(tensor, non_blocking=True)
        self._event = torch.accelerator.current_stream(tensor.device).record_event()
        return copy

    def wait(self) -> None:
        """Let the host wait for the copies."""
        if self._event is not None:
            self._event.synchronize()


def link_of(device: torch.device, depth: int) -> MemoryLink:
    """Return the link between a device and its host."""
    return MemoryLink() if device.type == "cpu" else DeviceLink(device, depth)


def pinned_size(size: int) -> int:
    """Return the bytes of pinned memory that a tensor of `size` bytes takes."""
    # Vectorized kernels take other steps for tensors that begin in the middle of a cache line.
    return -(-size // 64) * 64


class PinnedSlabs:
    """Pinned memory in few large pieces, from which small tensors are cut.

    Args:
        sizes: Bytes of each tensor that will be taken.
    """

    def __init__(self, sizes: Iterable[int]) -> None:
        self._left = sum(map(pinned_size, sizes))
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self.bytes = 0
        """Bytes of all slabs."""

    def take(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """Return a tensor of pinned memory that no other tensor uses."""
        size = pinned_size(count * dtype.itemsize)
        if self._used + size > self._slab.nbytes:
            self._slab = torch.empty(max(size, min(_SLAB, self._left)), dtype=torch.uint8, pin_memory=True)
            self._used = 0
            self.bytes += self._slab.nbytes
        start, self._used = self._used, self._used + size
        self._left = max(0, self._left - size)
        # A tensor of its own instead of a view, so that each has a version of its own.
        tensor = torch.empty(0, dtype=dtype)
        offset = (self._slab.storage_offset() + start) // dtype.itemsize
        tensor.set_(self._slab.untyped_storage(), offset, (count,))  # type: ignore[call-overload]
        return tensor


class GradientInFlight(torch.Tensor):
    """A gradient on its way to the host: the first operation on its values waits for the copy.

    A step passes it to its thread, and then nothing waits in the program. A gradient norm or a log waits, on the host.
    """

    arrive: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Wait for the gradients that an operation takes, then run it."""
        if func in READS_NO_VALUES:
            with without_torch_functions():
                return func(*args, **(kwargs or {}))
        _arrive_all([*args, *(kwargs or {}).values()])
        return func(*args, **(kwargs or {}))


def _arrive_all(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, GradientInFlight):
            value.arrive()
        elif isinstance(value, list | tuple):
            _arrive_all(value)
