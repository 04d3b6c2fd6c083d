"""The memory of one rank: local tensors, blocks, and buffers that ranks send each other, and copies between them."""

import queue
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from par_groups import Box

from ..format.bytes import copy_elements_
from ..plan.claims import GlobalTensor, LocalTensor, row_major
from ..plan.tasks import BlockPiece

_ALIGNMENT = 8  # of a piece in a buffer that is sent, so that it can be viewed as its dtype


class MemoryPool:
    """Pieces of memory of one size, as many as are used at a time. Threads may share it.

    Memory that is freed and allocated again in each round would fragment the heap, and the heap would grow.

    Args:
        size: Bytes of each piece.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()

    def take(self) -> torch.Tensor:
        """A free piece, or a new one."""
        try:
            return self._free.get_nowait()
        except queue.Empty:
            return torch.empty(self._size, dtype=torch.uint8, device="cpu")

    def give_back(self, memory: torch.Tensor) -> None:
        """Frees a piece that `take` gave."""
        self._free.put(memory)

    @contextmanager
    def lent(self) -> Iterator[torch.Tensor]:
        """A piece for as long as the context lasts."""
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
        local: The local tensor that the box lies in.
        flat: The local tensor's bytes, where they are those of the files: contiguous, on the CPU, of the same dtype.
        steady: The trainer's tensor, if it changes in an optimizer's steps alone; else None.
    """

    box: Box
    local: torch.Tensor
    flat: torch.Tensor | None
    steady: torch.Tensor | None

    def holds(self, piece: BlockPiece) -> bool:
        """Whether a piece lies in the box."""
        box = self.box
        return all(
            a <= b and b + m <= a + n for a, n, b, m in zip(box.start, box.size, piece.start, piece.size, strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class LocalState:
    """Tensors of the checkpoint that this rank holds.

    Args:
        tensors: All tensors of the checkpoint.
        parts: By number of a tensor: this rank's boxes of it.
    """

    tensors: Sequence[GlobalTensor]
    parts: Mapping[int, Sequence[LocalBox]]

    @classmethod
    def of(cls, entries: Iterable[LocalTensor], tensors: Sequence[GlobalTensor]) -> "LocalState":
        """What a rank with these entries holds; entries of other tensors do not count."""
        numbers = {tensor.key: number for number, tensor in enumerate(tensors)}
        parts: dict[int, list[LocalBox]] = {}
        for entry in entries:
            if entry.key in numbers:
                local = entry.local
                is_plain = local.device.type == "cpu" and local.dtype == entry.dtype and local.is_contiguous()
                flat = local.view(-1).view(torch.uint8) if is_plain else None
                parts.setdefault(numbers[entry.key], []).extend(
                    LocalBox(box=box, local=local, flat=flat, steady=entry.steady) for box in entry.sharding.boxes
                )
        return cls(tensors=tensors, parts=parts)

    def wait_for_streams(self) -> None:
        """Waits for all that the calling thread has enqueued on the GPUs that hold something.

        Threads that copy have streams of their own, which would not: a trainer may have others than the usual one.
        """
        for device in sorted({str(part.local.device) for parts in self.parts.values() for part in parts}):
            if device.startswith("cuda"):
                torch.cuda.current_stream(device).synchronize()

    def view(self, piece: BlockPiece) -> torch.Tensor:
        """A piece as a view of the local tensor that holds it."""
        part = self._part(piece)
        view = part.box.of(part.local)
        for dim, (first, length) in enumerate(zip(piece.start, piece.size, strict=True)):
            view = view.narrow(dim, first - part.box.start[dim], length)
        return view

    def direct(
        self, pieces: Iterable[BlockPiece], size: int, spare: torch.Tensor | None = None
    ) -> list[torch.Tensor] | None:
        """The bytes of a block where they lie in the local tensors, run by run; None if they do not lie in runs.

        Args:
            pieces: The pieces of the block that this rank has.
            size: Bytes of the block.
            spare: Memory that takes the place of what this rank does not have; None: it must have all of the block.
        """
        runs: list[torch.Tensor] = []
        end = 0
        for piece in sorted(pieces, key=lambda piece: piece.at):
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
        """The bytes of a piece, if they lie in its local tensor as they do in the whole one, without a gap."""
        return self.place([piece]) if _is_run(piece.size, row_major(self.tensors[piece.tensor].shape)) else None

    def place(self, pieces: Sequence[BlockPiece]) -> torch.Tensor | None:
        """The bytes of a single piece where they lie in its local tensor as they do in a buffer; else None."""
        if len(pieces) != 1:
            return None
        [piece] = pieces
        part = self._part(piece)
        stride, tensor = part.box.stride, self.tensors[piece.tensor]
        if part.flat is None or not _is_run(piece.size, stride):
            return None
        inside = zip(piece.start, part.box.start, stride, strict=True)
        first = (part.box.offset + sum((i - start) * step for i, start, step in inside)) * tensor.dtype.itemsize
        return part.flat[first : first + self._bytes(piece)]

    def _part(self, piece: BlockPiece) -> LocalBox:
        """The box of this rank that holds a piece."""
        for part in self.parts[piece.tensor]:
            if part.holds(piece):
                return part
        raise RuntimeError(f"no box of {self.tensors[piece.tensor].key!r} here holds {piece}; a bug of par-checkpoint")

    def in_block(self, piece: BlockPiece, block: torch.Tensor) -> torch.Tensor:
        """A piece as a view of the block's bytes, in which it lies with the strides of the whole tensor."""
        tensor = self.tensors[piece.tensor]
        width, strides = tensor.dtype.itemsize, row_major(tensor.shape)
        reach = sum((n - 1) * stride for n, stride in zip(piece.size, strides, strict=True)) + 1  # its last element
        typed = block[piece.at : piece.at + reach * width].view(tensor.dtype)
        return typed.as_strided(piece.size, strides, typed.storage_offset())

    def packed(self, pieces: Sequence[BlockPiece], buffer: torch.Tensor) -> list[torch.Tensor]:
        """The pieces as views of a buffer in which they lie one after the other."""
        views, begin = [], 0
        for piece in pieces:
            size = self._bytes(piece)
            views.append(buffer[begin : begin + size].view(self.tensors[piece.tensor].dtype).view(piece.size))
            begin += -(-size // _ALIGNMENT) * _ALIGNMENT
        return views

    def packed_size(self, pieces: Sequence[BlockPiece]) -> int:
        """Bytes of a buffer in which pieces lie one after the other."""
        return sum(-(-self._bytes(piece) // _ALIGNMENT) * _ALIGNMENT for piece in pieces)

    def to_block_(self, pieces: Iterable[BlockPiece], block: torch.Tensor) -> None:
        """Copies pieces from the local tensors into a block."""
        for piece in pieces:
            copy_elements_(self.in_block(piece, block), self.view(piece))

    def from_block_(self, pieces: Iterable[BlockPiece], block: torch.Tensor) -> None:
        """Copies pieces from a block into the local tensors."""
        for piece in pieces:
            copy_elements_(self.view(piece), self.in_block(piece, block))

    def _bytes(self, piece: BlockPiece) -> int:
        """Bytes of a piece's elements."""
        return self.tensors[piece.tensor].dtype.itemsize * piece.count


def _is_run(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the elements of a rectangle follow each other in memory, in row-major order and without a gap."""
    expected = 1
    for length, step in zip(reversed(size), reversed(stride), strict=True):
        if length != 1 and step != expected:
            return False
        expected *= length
    return True
