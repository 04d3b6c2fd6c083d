"""Staging buffers: page-aligned host memory through which data passes on its way to and from a disk."""

import mmap
from contextlib import suppress

import torch

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


class StagingPool:
    """Pool of staging buffers. It never holds more buffers than were in use at one time.

    Attributes:
        bytes: Bytes of all buffers, in use or free.
    """

    def __init__(self) -> None:
        self._free: list[StagingBuffer] = []
        self.bytes = 0

    def take(self, size: int) -> StagingBuffer:
        """Return a buffer of at least `size` bytes, and remove it from the pool."""
        fitting = [buffer for buffer in self._free if len(buffer.bytes) >= size]
        if fitting:
            chosen = min(fitting, key=lambda buffer: len(buffer.bytes))
            self._free.remove(chosen)
            return chosen
        if self._free:
            # A free buffer that is too small makes room for the new one. If it stayed, sizes that grow from step to
            # step would leave one useless buffer behind each time.
            self.lose(self._free.pop())
        made = StagingBuffer(pages(size))
        self.bytes += len(made.bytes)
        return made

    def give_back(self, buffer: StagingBuffer) -> None:
        """Put back a buffer after all of its reads and writes have ended."""
        self._free.append(buffer)

    def lose(self, buffer: StagingBuffer) -> None:
        """Stop counting a buffer that does not return to the pool."""
        self.bytes -= len(buffer.bytes)
