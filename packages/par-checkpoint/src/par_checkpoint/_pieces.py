"""Copying pieces between local tensors, blocks, and the buffers that ranks send each other."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from par_groups import Box

from ._bytes import copy_elements_
from ._claims import Held
from ._coverage import row_major
from ._entry import Entry, view_of
from ._plan import Piece

_ALIGNMENT = 8  # of a piece in a buffer that is sent, so that it can be viewed as its dtype


@dataclass(frozen=True, kw_only=True)
class Local:
    """What this rank holds, by the tensor's number: its boxes, and the local tensor they lie in.

    Args:
        tensors: All tensors of the checkpoint.
        parts: This rank's.
    """

    tensors: Sequence[Held]
    parts: Mapping[int, Sequence[tuple[Box, torch.Tensor]]]

    @classmethod
    def of(cls, entries: Iterable[Entry], tensors: Sequence[Held]) -> "Local":
        """Looks up the entries' tensors by key."""
        numbers = {held.key: number for number, held in enumerate(tensors)}
        parts: dict[int, list[tuple[Box, torch.Tensor]]] = {}
        for entry in entries:
            if entry.key in numbers:
                boxes = [(box, entry.local) for box in entry.sharding.boxes]
                parts.setdefault(numbers[entry.key], []).extend(boxes)
        return cls(tensors=tensors, parts=parts)

    def view(self, piece: Piece) -> torch.Tensor:
        """A piece as a view of the local tensor that holds it."""
        for box, local in self.parts[piece.tensor]:
            if all(
                a <= b and b + m <= a + n
                for a, n, b, m in zip(box.start, box.size, piece.start, piece.size, strict=True)
            ):
                return view_of(local, box, piece.start, piece.size)
        raise RuntimeError(f"no box of {self.tensors[piece.tensor].key!r} here holds {piece}")

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
            view = self.view(piece)
            plain = view.device.type == "cpu" and view.dtype == self.tensors[piece.tensor].dtype
            if piece.at != end or not plain or not view.is_contiguous() or self._reach(piece) != view.numel():
                return None
            runs.append(view.view(-1).view(torch.uint8))
            end += runs[-1].numel()
        if spare is not None and end < size:
            runs.append(spare[: size - end])
            end = size
        return runs if end == size else None

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
