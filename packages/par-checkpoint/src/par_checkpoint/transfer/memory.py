"""Memory of one rank: views of local tensors, of blocks and of message buffers, and copies between them."""

import math
import queue
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from par_groups import Box, GlobalTensor

from ..format.bytes import copy_elements_
from ..plan.claims import LocalTensor
from ..plan.coverage import row_major
from ..plan.tasks import BlockPiece

_ALIGNMENT = 16  # bytes; a piece in a message begins at a multiple of it, so that it can be viewed as any dtype


class Piece(Protocol):
    """A rectangle of a tensor."""

    @property
    def tensor(self) -> int:
        """Number of the tensor."""

    @property
    def start(self) -> Sequence[int]:
        """Global index of the first element."""

    @property
    def size(self) -> Sequence[int]:
        """Extent on each dim."""


class MemoryPool:
    """Reusable buffers of one size. The pool grows to the number of buffers in use at a time, and threads may share it.

    Memory that is freed and allocated again in each round would fragment the heap, and the heap would grow.

    Args:
        size: Bytes of each buffer.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()

    def take(self) -> torch.Tensor:
        """Return a free buffer, or a new one."""
        try:
            return self._free.get_nowait()
        except queue.Empty:
            return torch.empty(self._size, dtype=torch.uint8, device="cpu")

    def give_back(self, memory: torch.Tensor) -> None:
        """Return a buffer from `take` to the pool."""
        self._free.put(memory)

    @contextmanager
    def lent(self) -> Iterator[torch.Tensor]:
        """Yield a buffer, and return it to the pool at the end of the context."""
        memory = self.take()
        try:
            yield memory
        finally:
            self.give_back(memory)


@dataclass(frozen=True, kw_only=True)
class LocalBox:
    """One box that this rank holds.

    Args:
        box: The box.
        local: The local tensor that contains the box.
        flat: Bytes of the local tensor if it is contiguous, on the CPU and of the dtype on disk; else None.
        steady: The trainer's tensor if only optimizer steps change it; else None.
    """

    box: Box
    local: torch.Tensor
    flat: torch.Tensor | None
    steady: torch.Tensor | None

    def holds(self, piece: Piece) -> bool:
        """Return whether the box contains a piece."""
        box = self.box
        return all(
            a <= b and b + m <= a + n for a, n, b, m in zip(box.start, box.size, piece.start, piece.size, strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class LocalState:
    """Tensors of the checkpoint that this rank holds.

    Args:
        tensors: All tensors of the checkpoint.
        parts: This rank's boxes of each tensor, by the tensor's number.
    """

    tensors: Sequence[GlobalTensor]
    parts: Mapping[int, Sequence[LocalBox]]

    @classmethod
    def of(cls, entries: Iterable[LocalTensor], tensors: Sequence[GlobalTensor]) -> "LocalState":
        """Return the local state of a rank with these entries, without entries of other tensors."""
        numbers = {tensor.key: number for number, tensor in enumerate(tensors)}
        parts: dict[int, list[LocalBox]] = {}
        for entry in entries:
            if entry.key in numbers:
                local = entry.local
                # Only such a tensor has the bytes of the file in memory, so that blocks are read into it, or written
                # from it, directly.
                is_plain = local.device.type == "cpu" and local.dtype == entry.dtype and local.is_contiguous()
                flat = local.view(-1).view(torch.uint8) if is_plain else None
                parts.setdefault(numbers[entry.key], []).extend(
                    LocalBox(box=box, local=local, flat=flat, steady=entry.steady) for box in entry.sharding.boxes
                )
        return cls(tensors=tensors, parts=parts)

    def wait_for_streams(self) -> None:
        """Wait for all work that the calling thread has enqueued on the accelerators of the local tensors."""
        # The threads that copy use their device's default stream, which is not ordered after the trainer's. Without
        # this wait, a save would read weights that a kernel of the optimizer is still writing.
        for device in self.accelerators():
            torch.accelerator.current_stream(device).synchronize()

    def accelerators(self) -> list[torch.device]:
        """Return the devices with streams, on which local tensors are."""
        devices = {part.local.device for parts in self.parts.values() for part in parts}
        return sorted((device for device in devices if device.type not in ("cpu", "meta")), key=str)

    def view(self, piece: Piece) -> torch.Tensor:
        """Return a piece as a view of the local tensor that holds it."""
        part = self._part(piece)
        view = part.box.of(part.local)
        for dim, (first, length) in enumerate(zip(piece.start, piece.size, strict=True)):
            view = view.narrow(dim, first - part.box.start[dim], length)
        return view

    def direct(
        self, pieces: Iterable[BlockPiece], size: int, spare: torch.Tensor | None = None
    ) -> list[torch.Tensor] | None:
        """Return the bytes of a block as views of the local tensors, or None if a piece is not contiguous there.

        The views save a copy through a buffer: a file is read into them, or written from them.

        Args:
            pieces: The pieces of the block that this rank holds.
            size: Bytes of the block.
            spare: Memory that stands in for bytes that this rank does not hold; None: the rank must hold the full
                block.
        """
        runs: list[torch.Tensor] = []
        end = 0
        for piece in sorted(pieces, key=lambda piece: piece.at):
            # A checksum covers the full block, so the bytes between two pieces are read, too. They go to spare memory.
            if spare is not None and piece.at > end:
                runs.append(spare[: piece.at - end])
                end = piece.at
            run = self._run(piece) if piece.at == end else None
            if run is None:
                return None
            runs.append(run)
            end += run.numel()
        if spare is not None and end < size:
            runs.append(spare[: size - end])
            end = size
        return runs if end == size else None

    def _run(self, piece: BlockPiece) -> torch.Tensor | None:
        """Return the bytes of a piece if they are contiguous both in the local tensor and in the global one."""
        return self.place([piece]) if _is_run(piece.size, row_major(self.tensors[piece.tensor].shape)) else None

    def place(self, pieces: Sequence[Piece]) -> torch.Tensor | None:
        """Return the bytes of a single piece if they are contiguous in its local tensor; else None."""
        if len(pieces) != 1:
            return None
        [piece] = pieces
        part = self._part(piece)
        stride, tensor = part.box.stride, self.tensors[piece.tensor]
        if part.flat is None or not _is_run(piece.size, stride):
            return None
        inside = zip(piece.start, part.box.start, stride, strict=True)
        first = (part.box.offset + sum((i - start) * step for i, start, step in inside)) * tensor.dtype.itemsize
        return part.flat[first : first + math.prod(piece.size) * tensor.dtype.itemsize]

    def _part(self, piece: Piece) -> LocalBox:
        """Return the box of this rank that holds a piece."""
        for part in self.parts[piece.tensor]:
            if part.holds(piece):
                return part
        raise RuntimeError(f"no box of {self.tensors[piece.tensor].key!r} here holds {piece}; a bug of par-checkpoint")

    def in_block(self, piece: BlockPiece, block: torch.Tensor) -> torch.Tensor:
        """Return a piece as a strided view of a block's bytes."""
        tensor = self.tensors[piece.tensor]
        width, strides = tensor.dtype.itemsize, row_major(tensor.shape)
        # A file stores the global tensor in row-major order, so the piece has the global strides inside the block. The
        # slice ends with the piece's last element, because a slice up to a full row could exceed the block.
        reach = sum((n - 1) * stride for n, stride in zip(piece.size, strides, strict=True)) + 1
        typed = block[piece.at : piece.at + reach * width].view(tensor.dtype)
        return typed.as_strided(piece.size, strides, typed.storage_offset())

    def packed(self, pieces: Sequence[BlockPiece], buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return the pieces as views of a buffer that stores them one after the other."""
        return list(unpacked(((self.tensors[piece.tensor].dtype, piece.size) for piece in pieces), buffer))

    def packed_size(self, pieces: Sequence[BlockPiece]) -> int:
        """Return the bytes of a buffer that stores pieces one after the other."""
        return sum(padded(self.tensors[piece.tensor].dtype.itemsize * piece.count) for piece in pieces)

    def to_block_(self, pieces: Iterable[BlockPiece], block: torch.Tensor) -> None:
        """Copy pieces from the local tensors into a block."""
        for piece in pieces:
            copy_elements_(self.in_block(piece, block), self.view(piece))

    def from_block_(self, pieces: Iterable[BlockPiece], block: torch.Tensor) -> None:
        """Copy pieces from a block into the local tensors."""
        for piece in pieces:
            copy_elements_(self.view(piece), self.in_block(piece, block))


def padded(size: int) -> int:
    """Return the bytes from the beginning of a piece of some size in a message to the beginning of the next piece."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def unpacked(pieces: Iterable[tuple[torch.dtype, Sequence[int]]], buffer: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the pieces of a message as views of its buffer.

    Args:
        pieces: Dtype and shape of each piece.
        buffer: Bytes of the message, which stores the pieces one after the other.
    """
    begin = 0
    for dtype, shape in pieces:
        size = math.prod(shape) * dtype.itemsize
        yield buffer[begin : begin + size].view(dtype).view(shape)
        begin += padded(size)


def _is_run(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether the elements of a rectangle are contiguous in memory, in row-major order."""
    expected = 1
    for length, step in zip(reversed(size), reversed(stride), strict=True):
        if length != 1 and step != expected:  # the stride of a dim of length 1 is never used
            return False
        expected *= length
    return True
