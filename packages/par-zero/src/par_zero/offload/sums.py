"""Sums of gradients on a disk: written as soon as a chunk is reduced, and read by whoever steps them.

backward   reduce chunk k | write chunk k - 1, of which no sum stays in memory
           of a later microbatch: read what is there, add, write
step       each piece's is read with its state

Between backward and step `tensor.grad` is a tensor that lies in the file, in the dtype of the optimizer, so that norms,
clipping and users find it as ever.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..layout.chunk import Chunk
from .disk import Disk, DiskBuffer, DiskHandle
from .pieces import pages
from .pool import DiskBuffers

_ON_THEIR_WAY = 2
"""Number of chunks whose sums are in buffers at a time."""


@dataclass(eq=False, kw_only=True)
class DiskGradient:
    """Where the gradient of a piece lies in the file.

    Args:
        tensor: The optimizer's tensor.
        offset: Its first element among those that this rank has of the chunk's sum.
        start: The first byte in the file, of whole pages.
        view: The tensor that lies there.
    """

    tensor: nn.Parameter
    offset: int
    start: int
    view: torch.Tensor

    @property
    def size(self) -> int:
        """Bytes of the pages."""
        return pages(self.view.nbytes)

    @property
    def is_shown(self) -> bool:
        """Whether the optimizer's gradient is what lies there."""
        gradient = self.tensor.grad
        return gradient is not None and gradient.data_ptr() == self.view.data_ptr()


class DiskGradients:
    """Keeps sums of gradients on a disk.

    Args:
        disk: The file.
        places: For each chunk whose gradients lie there, those of its pieces, in their order.
        on_unwritten: Is told that sums cannot be written. They stay in memory, those of their chunk for good.
        on_unread: Is told that sums cannot be read. They are NaN then, for the other ranks go on.
    """

    def __init__(
        self,
        disk: Disk,
        places: Mapping[Chunk, Sequence[DiskGradient]],
        on_unwritten: Callable[[BaseException], None],
        on_unread: Callable[[BaseException], None],
    ) -> None:
        self._disk, self._places = disk, dict(places)
        self._on_unwritten, self._on_unread = on_unwritten, on_unread
        self._pool = DiskBuffers()
        self._were_given = bool(places)
        self._writing: dict[Chunk, tuple[DiskHandle, DiskBuffer]] = {}  # the oldest first
        self._left: dict[Chunk, list[torch.Tensor]] = {}  # what could not be written
        for chunk in self._places:
            chunk.sums = self

    @property
    def are_there(self) -> bool:
        """Whether any lay on the disk when the module was sharded, as all ranks know alike."""
        return self._were_given

    @property
    def stored_bytes(self) -> int:
        """Bytes of the file that have gradients, or have room for them."""
        return sum(each.size for places in self._places.values() for each in places)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that there are."""
        return self._pool.bytes

    def write(self, chunk: Chunk, total: torch.Tensor) -> None:
        """Begins to write what this rank has of a chunk's sum, which is free for other use when this returns."""
        self._make_room()
        places = self._places[chunk]
        buffer, handle, begin = self._pool.take(sum(each.size for each in places)), DiskHandle(), 0
        for each in places:
            count = each.view.numel()
            buffer.tensor(begin, each.view.dtype, count).copy_(total[each.offset : each.offset + count])
            handle += self._disk.write(each.start, buffer.bytes[begin : begin + each.size])
            begin += each.size
        self._writing[chunk] = handle, buffer

    def bind(self, chunk: Chunk) -> None:
        """Shows the optimizer its gradients, when they are written."""
        if chunk in self._writing:
            self._finish(chunk)
        places, left = self._places[chunk], self._left.pop(chunk, None)
        for each, gradient in zip(places, left or [each.view for each in places], strict=True):
            each.tensor.grad = gradient
        if left is not None:
            del self._places[chunk]
            chunk.keep_sums_in_memory()

    def add_earlier_(self, chunk: Chunk, total: torch.Tensor) -> None:
        """Adds the gradients that the optimizer holds of a chunk to this rank's share of the sum."""
        self._make_room()
        places = [each for each in self._places[chunk] if each.tensor.grad is not None]
        buffer, handle, begin = self._pool.take(sum(each.size for each in places)), DiskHandle(), 0
        values = []
        for each in places:
            gradient = each.tensor.grad
            if each.is_shown:
                handle += self._disk.read(each.start, buffer.bytes[begin : begin + each.size])
                gradient = buffer.tensor(begin, each.view.dtype, each.view.numel())
            values.append(gradient)
            begin += each.size
        error = handle.error()
        for each, value in zip(places, values, strict=True):
            if value is not None:
                total[each.offset : each.offset + value.numel()] += value.view(-1).to(total.dtype)
        if error is not None:
            total.fill_(torch.nan)
            self._on_unread(error)
        self._pool.give_back(buffer)

    def _make_room(self) -> None:
        """Waits for the oldest writes where there are as many as may be."""
        while len(self._writing) >= _ON_THEIR_WAY:
            self._finish(next(iter(self._writing)))

    def _finish(self, chunk: Chunk) -> None:
        """Waits for the writes of a chunk's sums."""
        handle, buffer = self._writing.pop(chunk)
        error = handle.error()
        if error is not None:
            begin, self._left[chunk] = 0, []
            for each in self._places[chunk]:
                self._left[chunk].append(buffer.tensor(begin, each.view.dtype, each.view.numel()).clone())
                begin += each.size
            self._on_unwritten(error)
        self._pool.give_back(buffer)
