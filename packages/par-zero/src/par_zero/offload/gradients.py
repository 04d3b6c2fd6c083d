"""Reduced gradients on a disk: written when a chunk is reduced, and read by the step that needs them.

backward   reduce chunk k | write chunk k - 1, whose gradient leaves memory
           a later microbatch: read the earlier gradient, add it, write the sum
step       read the gradient of each piece with its state
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..layout.chunk import Chunk
from .disk import Disk, DiskHandle
from .errors import DiskErrors
from .pieces import pages
from .staging import StagingBuffer, StagingPool

_IN_FLIGHT = 2
"""Number of chunks whose gradients are written at a time: one buffer is filled while the other is written."""


@dataclass(eq=False, kw_only=True)
class DiskGradient:
    """The gradient of a piece in the file.

    Args:
        tensor: The optimizer's tensor.
        offset: Index of its first element in this rank's shard of the chunk's reduced gradient.
        start: First byte in the file, the beginning of a page.
        view: Tensor in the optimizer's dtype that shares memory with the file. Between backward and step it is
            `tensor.grad`, so that norms, clipping and user code need no special case.
    """

    tensor: nn.Parameter
    offset: int
    start: int
    view: torch.Tensor

    @property
    def size(self) -> int:
        """Bytes of its pages."""
        return pages(self.view.nbytes)

    def is_in_file(self, gradient: torch.Tensor | None) -> bool:
        """Return whether a gradient of the tensor is the one in the file."""
        return gradient is not None and gradient.data_ptr() == self.view.data_ptr()


class DiskGradients:
    """Store of reduced gradients on a disk. A chunk calls it as its `sums`.

    Args:
        disk: The file.
        of_chunk: Gradients of the pieces of each chunk, in their order.
        errors: Collects errors. Gradients that cannot be written stay in memory, and so do all later gradients of
            their chunk. Gradients that cannot be read are NaN, because the other ranks continue.
    """

    def __init__(self, disk: Disk, of_chunk: Mapping[Chunk, Sequence[DiskGradient]], errors: DiskErrors) -> None:
        self._disk, self._of_chunk, self._errors = disk, dict(of_chunk), errors
        self._pool = StagingPool()
        self._writes: dict[Chunk, tuple[DiskHandle, StagingBuffer]] = {}  # oldest first
        self._unwritten: dict[Chunk, list[torch.Tensor]] = {}
        self.were_given = bool(of_chunk)
        """Whether any gradient was on the disk when the module was sharded: the same on every rank, forever."""
        for chunk in self._of_chunk:
            chunk.sums = self

    @property
    def stored_bytes(self) -> int:
        """Bytes of the file that are reserved for gradients."""
        return sum(each.size for stored in self._of_chunk.values() for each in stored)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the staging buffers."""
        return self._pool.bytes

    def write(self, chunk: Chunk, total: torch.Tensor) -> None:
        """Start to write this rank's shard of a chunk's reduced gradient. `total` may be reused on return."""
        self._limit_writes()
        stored = self._of_chunk[chunk]
        buffer, handle, begin = self._pool.take(sum(each.size for each in stored)), DiskHandle(), 0
        for each in stored:
            count = each.view.numel()
            buffer.tensor(begin, each.view.dtype, count).copy_(total[each.offset : each.offset + count])
            handle += self._disk.write(each.start, buffer.bytes[begin : begin + each.size])
            begin += each.size
        self._writes[chunk] = handle, buffer

    def bind(self, chunk: Chunk) -> None:
        """Set the gradients of the optimizer's tensors, after their writes have ended."""
        if chunk in self._writes:
            self._end_write(chunk)
        stored, in_memory = self._of_chunk[chunk], self._unwritten.pop(chunk, None)
        for each, gradient in zip(stored, in_memory or [each.view for each in stored], strict=True):
            each.tensor.grad = gradient
        if in_memory is not None:
            del self._of_chunk[chunk]
            chunk.keep_sums_in_memory()

    def add_earlier_(self, chunk: Chunk, total: torch.Tensor) -> None:
        """Add the gradients that the optimizer's tensors have, from earlier microbatches, to a chunk's new ones."""
        self._limit_writes()
        stored = [each for each in self._of_chunk[chunk] if each.tensor.grad is not None]
        buffer, handle, begin = self._pool.take(sum(each.size for each in stored)), DiskHandle(), 0
        values = []
        for each in stored:
            gradient = each.tensor.grad
            if each.is_in_file(gradient):
                handle += self._disk.read(each.start, buffer.bytes[begin : begin + each.size])
                gradient = buffer.tensor(begin, each.view.dtype, each.view.numel())
            values.append(gradient)
            begin += each.size
        error = handle.error()
        for each, value in zip(stored, values, strict=True):
            if value is not None:
                total[each.offset : each.offset + value.numel()] += value.view(-1).to(total.dtype)
        if error is not None:
            total.fill_(torch.nan)
            self._errors.add_unread(error)
        self._pool.give_back(buffer)

    def _limit_writes(self) -> None:
        """Wait for the oldest writes until the next chunk's gradients may be in a buffer, too."""
        while len(self._writes) >= _IN_FLIGHT:
            self._end_write(next(iter(self._writes)))

    def _end_write(self, chunk: Chunk) -> None:
        """Wait for the writes of a chunk's gradients."""
        handle, buffer = self._writes.pop(chunk)
        error = handle.error()
        if error is not None:
            begin, self._unwritten[chunk] = 0, []
            for each in self._of_chunk[chunk]:
                self._unwritten[chunk].append(buffer.tensor(begin, each.view.dtype, each.view.numel()).clone())
                begin += each.size
            self._errors.add_unwritten(error)
        self._pool.give_back(buffer)
