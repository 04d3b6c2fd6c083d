"""Memory that is used again: what is freed and asked for anew, round by round, breaks up the heap, and it grows."""

import queue
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Buffer:
    """One piece of memory, as large as it ever had to be."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def of(self, size: int) -> torch.Tensor:
        """Its first bytes; what was in them is lost."""
        if self._memory.numel() < size:
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # gone before the larger one comes
            self._memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._memory[:size]


class Pool:
    """Pieces of memory of one size, as many as are used at a time. Threads may share it.

    Args:
        size: Bytes of each.
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
        """Frees what `take` gave."""
        self._free.put(memory)

    @contextmanager
    def lent(self) -> Iterator[torch.Tensor]:
        """A piece for a while."""
        memory = self.take()
        try:
            yield memory
        finally:
            self.give_back(memory)
