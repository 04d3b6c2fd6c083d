"""Memory for a copy, in chunks. torch rounds pinned memory up to powers of two, so 17 GB in one piece would take 32."""

from collections.abc import Iterator, Sequence

import torch

from .._torch_private import empty_pinned_cache

CHUNK = 256 << 20
"""Bytes of a chunk. The last chunks are smaller, and a part that does not fit has a larger chunk of its own."""

_ALIGNMENT = 64  # bytes; a part begins at a multiple of it, as torch's own memory does


class Chunks:
    """Memory in chunks. Each part is contiguous in one chunk, and existing memory is reused.

    Args:
        pinned: Whether the memory is pinned, so that a GPU copies into it directly.
    """

    def __init__(self, *, pinned: bool) -> None:
        self.pinned = pinned
        self.memory: list[torch.Tensor] = []

    def split(self, sizes: Sequence[int]) -> Iterator[torch.Tensor]:
        """Yield parts of the given sizes in bytes, and allocate new chunks if the existing ones do not fit."""
        needed = chunk_sizes(sizes)
        if [chunk.numel() for chunk in self.memory[: len(needed)]] != needed:
            # The old chunks are freed first, or the host would need memory for both. `fill_` touches every page, so
            # that the copy, for which the trainer may wait, meets no page faults.
            self.memory.clear()
            self.memory += [
                torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self.pinned).fill_(1) for size in needed
            ]
        chunks = iter(self.memory)
        chunk, begin = None, 0
        for size in sizes:
            if chunk is None or begin + size > chunk.numel():
                chunk, begin = next(chunks), 0
            yield chunk[begin : begin + size]
            begin += _aligned(size)

    def release(self) -> None:
        """Return the memory to the system, once no caller holds a part of it."""
        self.memory.clear()
        if self.pinned:
            empty_pinned_cache()


def chunk_sizes(sizes: Sequence[int]) -> list[int]:
    """Return the sizes of the chunks that hold some parts one after the other. They are powers of two.

    Args:
        sizes: Bytes of each part, in order.
    """
    chunks: list[int] = []
    left, room = sum(map(_aligned, sizes)), -1
    for size in sizes:
        if size > room:
            # The largest power of two that the remaining parts fill, up to a chunk; more only for a part that is
            # larger.
            room = max(min(CHUNK, 1 << max(left.bit_length() - 1, 0)), 1 << max(size - 1, 0).bit_length())
            chunks.append(room)
        room -= _aligned(size)
        left -= _aligned(size)
    return chunks


def _aligned(size: int) -> int:
    """Round a size up to a multiple of the alignment."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
