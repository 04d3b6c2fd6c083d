"""Memory for a copy, in chunks: torch rounds pinned memory up to powers of two, and so 17 GB in one piece take 32."""

from collections.abc import Iterator, Sequence

import torch

from .._torch_private import empty_pinned_cache

CHUNK = 256 << 20
"""Bytes of a chunk; the last ones are smaller, and one for a larger part is as large as that."""

_ALIGNMENT = 64  # bytes, of a part, as torch's own memory is aligned


class Chunks:
    """Memory in chunks, in which parts lie, each in one piece. Existing memory is reused.

    Its pages exist, so that copies meet no page faults.

    Args:
        pinned: Whether copies from a GPU go there without a detour.
    """

    def __init__(self, *, pinned: bool) -> None:
        self.pinned = pinned
        self.memory: list[torch.Tensor] = []

    def split(self, sizes: Sequence[int]) -> Iterator[torch.Tensor]:
        """Gives parts of these sizes in bytes, and makes what memory they need beyond what is there."""
        needed = chunk_sizes(sizes)
        if [chunk.numel() for chunk in self.memory[: len(needed)]] != needed:
            self.memory.clear()  # gone before the new ones come
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
        """Gives the memory back to the system, once nobody holds parts of it."""
        self.memory.clear()
        if self.pinned:
            empty_pinned_cache()


def chunk_sizes(sizes: Sequence[int]) -> list[int]:
    """The sizes of the chunks in which parts of some sizes lie one after the other: powers of two, so none is rounded.

    Args:
        sizes: Bytes of each part, in their order.
    """
    chunks: list[int] = []
    left, room = sum(map(_aligned, sizes)), -1
    for size in sizes:
        if size > room:
            room = max(min(CHUNK, 1 << max(left.bit_length() - 1, 0)), 1 << max(size - 1, 0).bit_length())
            chunks.append(room)
        room -= _aligned(size)
        left -= _aligned(size)
    return chunks


def _aligned(size: int) -> int:
    """The next multiple of what parts are aligned to."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT
