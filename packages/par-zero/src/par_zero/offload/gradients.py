"""Reduced gradients on a disk: written when a chunk is reduced, and read by the step that needs them.

backward   reduce chunk k | write chunk k - 1, whose gradient leaves memory
           a later microbatch: read the earlier gradient, add it, write the sum
step       read the gradient of each piece with its state
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from ..layout.chunk import Chunk
from .disk import Disk, DiskHandle
from .errors import DiskErrors
from .piece import DiskPiece
from .staging import StagingBuffer, StagingPool

_IN_FLIGHT = 2
"""Number of chunks whose gradients are written at a time: one buffer is filled while the other is written."""


class DiskGradients:
    """Store of reduced gradients on a disk, see `GradientStore`.

    Args:
        disk: The file.
        pieces: Pieces by chunk, for chunks whose gradients are on the disk.
        errors: Collects errors. Gradients that cannot be written stay in memory, and so do all later gradients of
            their chunk. Gradients that cannot be read are NaN, because the other ranks continue.
    """

    def __init__(self, disk: Disk, pieces: Mapping[Chunk, Sequence[DiskPiece]], errors: DiskErrors) -> None:
        self._disk, self._pieces, self._errors = disk, dict(pieces), errors
        self._pool = StagingPool()
        self._writes: dict[Chunk, tuple[DiskHandle, StagingBuffer]] = {}  # oldest first
        self._unwritten: dict[Chunk, list[torch.Tensor]] = {}
        self.were_given = bool(pieces)
        """Whether any gradient was on the disk when the module was sharded: the same on every rank, forever."""

    @property
    def chunks(self) -> Iterable[Chunk]:
        """The chunks whose gradients are on the disk."""
        return self._pieces

    @property
    def stored_bytes(self) -> int:
        """Bytes of the file that are reserved for gradients."""
        return sum(piece.block.gradient_size for pieces in self._pieces.values() for piece in pieces)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the staging buffers."""
        return self._pool.total

    def write(self, chunk: Chunk, total: torch.Tensor) -> None:
        """Start to write this rank's shard of a chunk's reduced gradient. `total` may be reused on return."""
        self._limit_writes()
        pieces = self._pieces[chunk]
        buffer, handle = self._pool.take(sum(piece.block.gradient_size for piece in pieces)), DiskHandle()
        for piece, values, memory in self._split(buffer, pieces):
            values.copy_(total[piece.offset : piece.offset + values.numel()])
            handle += self._disk.write(piece.block.start + piece.block.size, memory)
        self._writes[chunk] = handle, buffer

    def bind(self, chunk: Chunk) -> bool:
        """Set the gradients of the optimizer's tensors, after their writes have ended.

        Returns:
            Whether they were written, and those of later passes can be, too.
        """
        if chunk in self._writes:
            self._end_write(chunk)
        pieces, in_memory = self._pieces[chunk], self._unwritten.pop(chunk, None)
        for number, piece in enumerate(pieces):
            piece.tensor.grad = piece.gradient if in_memory is None else in_memory[number]
        if in_memory is not None:  # a disk that has failed once is not tried again
            del self._pieces[chunk]
        return in_memory is None

    def add_earlier_(self, chunk: Chunk, total: torch.Tensor) -> None:
        """Add the gradients that the optimizer's tensors have, from earlier microbatches, to a chunk's new ones."""
        self._limit_writes()
        pieces = [piece for piece in self._pieces[chunk] if piece.tensor.grad is not None]
        buffer, handle = self._pool.take(sum(piece.block.gradient_size for piece in pieces)), DiskHandle()
        found = []
        for piece, values, memory in self._split(buffer, pieces):
            in_file = piece.is_in_file(piece.tensor.grad)
            if in_file:  # else the program has set a gradient of its own
                handle += self._disk.read(piece.block.start + piece.block.size, memory)
            found.append((piece, values if in_file else piece.tensor.grad))
        # Memory that nothing was read into is added, too: NaN replaces the sum below.
        error = handle.error()
        for piece, gradient in found:
            if gradient is not None:
                total[piece.offset : piece.offset + gradient.numel()] += gradient.view(-1).to(total.dtype)
        if error is not None:
            total.fill_(torch.nan)
            self._errors.add_unread(error)
        self._pool.give_back(buffer)

    def _split(
        self, buffer: StagingBuffer, pieces: Sequence[DiskPiece]
    ) -> Iterator[tuple[DiskPiece, torch.Tensor, memoryview]]:
        """Yield pieces with their gradient in a buffer, as a tensor and as full pages."""
        begin = 0
        for piece in pieces:
            size, gradient = piece.block.gradient_size, piece.block.gradient
            if gradient is not None:
                yield piece, buffer.tensor(begin, gradient.dtype, gradient.count), buffer.bytes[begin : begin + size]
            begin += size

    def _limit_writes(self) -> None:
        """Wait for the oldest writes until the next chunk's gradients may be in a buffer, too."""
        while len(self._writes) >= _IN_FLIGHT:
            self._end_write(next(iter(self._writes)))

    def _end_write(self, chunk: Chunk) -> None:
        """Wait for the writes of a chunk's gradients."""
        handle, buffer = self._writes.pop(chunk)
        error = handle.error()
        if error is not None:
            # Clones, because the buffer returns to the pool and the program may keep gradients for long.
            self._unwritten[chunk] = [values.clone() for _, values, _ in self._split(buffer, self._pieces[chunk])]
            self._errors.add_unwritten(error)
        self._pool.give_back(buffer)
