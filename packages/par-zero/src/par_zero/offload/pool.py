"""Buffers of whole pages that are taken and given back."""

from .disk import DiskBuffer
from .pieces import pages


class DiskBuffers:
    """Lends buffers, and keeps those that were given back."""

    def __init__(self) -> None:
        self._free: list[DiskBuffer] = []
        self.bytes = 0
        """Bytes of all of them, lent or not."""

    def take(self, size: int) -> DiskBuffer:
        """A buffer of so many bytes or more, whose size is a multiple of a page."""
        fitting = [buffer for buffer in self._free if len(buffer.bytes) >= size]
        if fitting:
            chosen = min(fitting, key=lambda buffer: len(buffer.bytes))
            self._free.remove(chosen)
            return chosen
        if self._free:  # one is replaced, so there are never more than were lent at one time
            self.bytes -= len(self._free.pop().bytes)
        made = DiskBuffer(pages(size))
        self.bytes += len(made.bytes)
        return made

    def give_back(self, buffer: DiskBuffer) -> None:
        """Takes back a buffer that nothing reads or writes any more."""
        self._free.append(buffer)
