"""Pool of flat buffers that chunks borrow one after the other."""

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import torch

from .meter import BUFFERS, Meter

_Buffer = TypeVar("_Buffer")


class BufferPool(Generic[_Buffer]):
    """The rule by which buffers are lent: tensors in a step, memory for a disk, and plain sizes in a ledger.

    Args:
        make: Function that makes a buffer of a number of bytes.
        size_of: Function that returns the bytes of a buffer.
        free: Buffers that exist already. Default: none.

    Attributes:
        free: Buffers that are not lent.
        total: Bytes of all buffers, lent or free.
    """

    def __init__(
        self, make: Callable[[int], _Buffer], size_of: Callable[[_Buffer], int], free: Iterable[_Buffer] = ()
    ) -> None:
        self._make, self._size_of = make, size_of
        self.free = list(free)
        self.total = sum(map(size_of, self.free))

    def take(self, size: int) -> _Buffer:
        """Return the smallest free buffer that is large enough, or else a new one."""
        self.free.sort(key=self._size_of)
        # The smallest sufficient buffer leaves the larger ones to larger chunks.
        for place, buffer in enumerate(self.free):
            if self._size_of(buffer) >= size:
                return self.free.pop(place)
        # The new buffer replaces a smaller one, so that the pool never has more buffers than were lent at one time. If
        # the small one stayed, sizes that grow from step to step would leave one useless buffer behind each time.
        self._drop(1)
        made = self._make(size)
        self.total += self._size_of(made)
        return made

    def give_back(self, buffer: _Buffer) -> None:
        """Take back a buffer that no code uses any more."""
        self.free.append(buffer)

    def lose(self, buffer: _Buffer) -> None:
        """Stop counting a lent buffer that does not come back."""
        self.total -= self._size_of(buffer)

    def keep(self, count: int) -> bool:
        """Drop all free buffers but the `count` largest. Return whether the pool had more."""
        more = len(self.free) > count
        if more:
            self.free.sort(key=self._size_of)
            self._drop(len(self.free) - count)
        return more

    def _drop(self, count: int) -> None:
        """Drop the first free buffers."""
        self.total -= sum(map(self._size_of, self.free[:count]))
        del self.free[:count]


class Buffers:
    """Pool of flat buffers. Newly allocated memory costs a page fault every 4 KiB, on CPUs up to a tenth of a step.

    Args:
        meter: Meter that counts the bytes of all buffers, lent or free.
    """

    def __init__(self, meter: Meter | None = None) -> None:
        self._pools: dict[torch.device, BufferPool[torch.Tensor]] = {}  # of bytes
        self._meter = meter or Meter()

    @property
    def free(self) -> tuple[torch.Tensor, ...]:
        """Buffers that are not lent."""
        return tuple(buffer for pool in self._pools.values() for buffer in pool.free)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each free buffer."""
        return tuple(map(torch.Tensor.numel, self.free))

    def take(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Take the smallest free buffer that is large enough, or else make one.

        Args:
            count: Number of elements.
            dtype: Dtype of the elements.
            device: Device of the buffer.

        Returns:
            (count) elements with arbitrary values.
        """
        size, pool = count * dtype.itemsize, self._pool_of(device)
        before = pool.total
        chosen = pool.take(size)
        self._meter.add(BUFFERS, pool.total - before)
        return chosen[:size].view(dtype)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take back a buffer that no code uses any more."""
        # The caller's view has an element count and a dtype of its own. The pool needs the full storage as bytes.
        full = torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(buffer.untyped_storage())
        self._pool_of(buffer.device).give_back(full)

    def keep(self, count: int) -> bool:
        """Free the memory of all free buffers but the `count` largest. Return whether the pool had more."""
        more = False
        for pool in self._pools.values():
            before = pool.total
            more |= pool.keep(count)
            self._meter.add(BUFFERS, pool.total - before)
        return more

    def _pool_of(self, device: torch.device) -> BufferPool[torch.Tensor]:
        if device not in self._pools:

            def make(size: int) -> torch.Tensor:
                return torch.empty(size, dtype=torch.uint8, device=device)

            self._pools[device] = BufferPool(make, torch.Tensor.numel)
        return self._pools[device]
