"""Copying pieces between local tensors, blocks, and the buffers that ranks send each other."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from par_groups import Box

from ..format.bytes import copy_elements_
from ..plan.claims import Held
from ..plan.coverage import row_major
from ..plan.entry import Entry, view_of
from ..plan.plan import Piece

_ALIGNMENT = 8  # of a piece in a buffer that is sent, so that it can be viewed as its dtype


@dataclass(frozen=True, kw_only=True)
class Part:
    """One box that this rank holds.

    Args:
        box: The box.
        local: The local tensor that it lies in.
        flat: The local tensor's bytes, where they are those of the files: contiguous, on the CPU, of the same dtype.
        steady: As of the entry.
    """

    box: Box
    local: torch.Tensor
    flat: torch.Tensor | None
    steady: torch.Tensor | None

    def holds(self, piece: Piece) -> bool:
        """Whether a piece lies in the box."""
        box = self.box
        return all(
            a <= b and b + m <= a + n for a, n, b, m in zip(box.start, box.size, piece.start, piece.size, strict=True)
        )


@dataclass(frozen=True, kw_only=True)
class Local:
    """What this rank holds, by the tensor's number.

    Args:
        tensors: All tensors of the checkpoint.
        parts: This rank's.
    """

    tensors: Sequence[Held]
    parts: Mapping[int, Sequence[Part]]

    @classmethod
    def of(cls, entries: Iterable[Entry], tensors: Sequence[Held]) -> "Local":
        """Looks up the entries' tensors by key."""
        numbers = {held.key: number for number, held in enumerate(tensors)}
        parts: dict[int, list[Part]] = {}
        for entry in entries:
            if entry.key in numbers:
                flat = _flat(entry.local, entry.dtype)
                parts.setdefault(numbers[entry.key], []).extend(
                    Part(box=box, local=entry.local, flat=flat, steady=entry.steady) for box in entry.sharding.boxes
                )
        return cls(tensors=tensors, parts=parts)

    def view(self, piece: Piece) -> torch.Tensor:
        """A piece as a view of the local tensor that holds it."""
        part = self._part(piece)
        return view_of(part.local, part.box, piece.start, piece.size)

    def direct(
        self, pieces: Iterable[Piece], size: int, spare: torch.Tensor | None = None
    ) -> list[torch.Tensor] | None:
        """A block's bytes where they lie in the local tensors, run by run; None if they do not.

        Args:
            pieces: Those that this rank has of the block.
            size: Bytes of the block.
            spare: Takes the place of what this rank does not have; None: it must have all.
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

    def _run(self, piece: Piece) -> torch.Tensor | None:
        """The bytes of a piece, if they lie in its local tensor as they do in the whole one, without a gap."""
        part = self._part(piece)
        stride, held = part.box.stride, self.tensors[piece.tensor]
        if part.flat is None or not _is_run(piece.size, stride) or not _is_run(piece.size, row_major(held.shape)):
            return None
        inside = zip(piece.start, part.box.start, stride, strict=True)
        first = (part.box.offset + sum((i - start) * step for i, start, step in inside)) * held.dtype.itemsize
        return part.flat[first : first + self._bytes(piece)]

    def _part(self, piece: Piece) -> Part:
        for part in self.parts[piece.tensor]:
            if part.holds(piece):
                return part
        raise RuntimeError(f"no box of {self.tensors[piece.tensor].key!r} here holds {piece}; a bug of par-checkpoint")

    def in_block(self, piece: Piece, block: torch.Tensor) -> torch.Tensor:
        """A piece as a view of the block's bytes, in which it lies with the strides of the whole tensor."""
        held = self.tensors[piece.tensor]
        typed = block[piece.at : piece.at + self._reach(piece) * held.dtype.itemsize].view(held.dtype)
        return typed.as_strided(piece.size, row_major(held.shape), typed.storage_offset())

    def packed(self, pieces: Sequence[Piece], buffer: torch.Tensor) -> list[torch.Tensor]:
        """The pieces as views of a buffer in which they lie one after the other."""
        views, begin = [], 0
        for piece in pieces:
            size = self._bytes(piece)
            views.append(buffer[begin : begin + size].view(self.tensors[piece.tensor].dtype).view(piece.size))
            begin += -(-size // _ALIGNMENT) * _ALIGNMENT
        return views

    def packed_size(self, pieces: Sequence[Piece]) -> int:
        """Bytes of such a buffer."""
        return sum(-(-self._bytes(piece) // _ALIGNMENT) * _ALIGNMENT for piece in pieces)

    def to_block_(self, pieces: Iterable[Piece], block: torch.Tensor) -> None:
        """Copies pieces from the local tensors into a block."""
        for piece in pieces:
            copy_elements_(self.in_block(piece, block), self.view(piece))

    def from_block_(self, pieces: Iterable[Piece], block: torch.Tensor) -> None:
        """Copies pieces from a block into the local tensors."""
        for piece in pieces:
            copy_elements_(self.view(piece), self.in_block(piece, block))

    def _reach(self, piece: Piece) -> int:
        """Elements from its first to its last in the whole tensor, both included."""
        strides = row_major(self.tensors[piece.tensor].shape)
        return sum((n - 1) * stride for n, stride in zip(piece.size, strides, strict=True)) + 1

    def _bytes(self, piece: Piece) -> int:
        return self.tensors[piece.tensor].dtype.itemsize * math.prod(piece.size)


def _flat(local: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    plain = local.device.type == "cpu" and local.dtype == dtype and local.is_contiguous()
    return local.view(-1).view(torch.uint8) if plain else None


def _is_run(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements of these strides follow each other, last dim first."""
    expected = 1
    for length, step in zip(reversed(size), reversed(stride), strict=True):
        if length != 1 and step != expected:
            return False
        expected *= length
    return True
