"""Staging buffers: page-aligned host memory through which data passes on its way to and from a disk."""

import mmap
from contextlib import suppress

import torch

from ..layout.buffers import BufferPool
from .pieces import PAGE, pages


class StagingBuffer:
    """Page-aligned host memory that reads and writes of a disk use without the kernel's page cache.

    Args:
        size: Number of bytes; at least one page is allocated.
    """

    def __init__(self, size: int) -> None:
        self._memory = mmap.mmap(-1, max(size, PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Huge pages, because the kernel looks up each page for each direct read and write. No pages for children:
        # if a process forks during a direct read, as data loaders do, many kernels put the bytes into the other
        # process's copy of the page. See open(2), O_DIRECT.
        for name in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, name):
                with suppress(OSError):  # the advice is optional, and some kernels reject it
                    self._memory.madvise(getattr(mmap, name))
        self.bytes = memoryview(self._memory)[:size]

    def tensor(self, start: int, dtype: torch.dtype, count: int) -> torch.Tensor:
        """Return a tensor of `count` elements that begins at byte `start` and shares the buffer's memory."""
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start)


class StagingPool(BufferPool[StagingBuffer]):
    """Pool of staging buffers. It never holds more buffers than were in use at one time."""

    def __init__(self) -> None:
        super().__init__(lambda size: StagingBuffer(pages(size)), lambda buffer: len(buffer.bytes))
