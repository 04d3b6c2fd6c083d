"""Pool of flat buffers that chunks borrow one after the other."""

from collections.abc import Sequence

import torch

from .meter import BUFFERS, Meter


def buffer_elements(chunks: Sequence[int], inflight: int, *, kept: int | None = None) -> int:
    """Return the largest number of elements of the buffers that reductions of some chunks need at a time.

    If no chunk is larger than an earlier one, each buffer keeps the size of the chunk that it was made for. Otherwise a
    small chunk may use the largest buffer when the largest chunk needs one, and after a few passes all buffers are as
    large as the largest chunk. But in one pass a chunk makes at most one buffer, and none if it gets a kept buffer.

    Args:
        chunks: Number of elements of each chunk, in the order of their reductions.
        inflight: Number of chunks whose reductions are in flight at a time.
        kept: Number of buffers that are kept between passes, if the order of chunks may change. None: the order never
            changes.
    """
    by_size = sorted(chunks, reverse=True)
    if kept is None and list(chunks) == by_size:
        return sum(chunks[:inflight])
    lent = by_size[:1] * min(inflight, len(chunks))
    if kept is None:
        return sum(lent)
    return min(sum(lent), sum(by_size[:1] * min(kept, len(chunks)) + by_size[: max(0, len(chunks) - kept)]))


class Buffers:
    """Pool of flat buffers. Newly allocated memory costs a page fault every 4 KiB, on CPUs up to a tenth of a step.

    Args:
        meter: Meter that counts the bytes of all buffers, lent or free.
    """

    def __init__(self, meter: Meter | None = None) -> None:
        self._free: list[torch.Tensor] = []  # of bytes
        self._meter = meter or Meter()

    @property
    def free(self) -> tuple[torch.Tensor, ...]:
        """Buffers that are not lent."""
        return tuple(self._free)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each free buffer."""
        return tuple(buffer.untyped_storage().nbytes() for buffer in self._free)

    def take(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Take the smallest free buffer that is large enough, or else make one.

        Args:
            count: Number of elements.
            dtype: Dtype of the elements.
            device: Device of the buffer.

        Returns:
            (count) elements with arbitrary values.
        """
        size = count * dtype.itemsize
        # The smallest sufficient buffer leaves the larger ones to larger chunks.
        free = sorted((buffer for buffer in self._free if buffer.device == device), key=torch.Tensor.numel)
        chosen = next((buffer for buffer in free if buffer.numel() >= size), None)
        if chosen is None:
            # The new buffer replaces a smaller one, so that the pool never has more buffers than were lent at one time.
            self._drop(free[:1])
            chosen = torch.empty(size, dtype=torch.uint8, device=device)
            self._meter.add(BUFFERS, size)
        else:
            self._forget([chosen])
        return chosen[:size].view(dtype)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take back a buffer that no code uses any more."""
        storage = buffer.untyped_storage()
        # The caller's view has an element count and a dtype of its own. The pool needs the full storage as bytes.
        self._free.append(torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(storage))

    def keep(self, count: int) -> bool:
        """Free the memory of all free buffers but the `count` largest. Return whether the pool had more."""
        more = len(self._free) > count
        if more:
            self._drop(sorted(self._free, key=torch.Tensor.numel)[:-count])
        return more

    def _drop(self, buffers: list[torch.Tensor]) -> None:
        """Free the memory of free buffers."""
        self._forget(buffers)
        self._meter.add(BUFFERS, -sum(buffer.untyped_storage().nbytes() for buffer in buffers))

    def _forget(self, buffers: list[torch.Tensor]) -> None:
        self._free = [free for free in self._free if not any(free is buffer for buffer in buffers)]
