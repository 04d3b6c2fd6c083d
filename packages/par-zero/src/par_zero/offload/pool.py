"""Page-aligned host buffers that reads and writes of a disk reuse."""

from .disk import DiskBuffer
from .pieces import pages


class DiskBuffers:
    """Pool of page-aligned buffers. It never holds more buffers than were in use at one time."""

    def __init__(self) -> None:
        self._free: list[DiskBuffer] = []
        self.bytes = 0
        """Bytes of all buffers, in use or free."""

    def take(self, size: int) -> DiskBuffer:
        """Return a buffer of at least `size` bytes, and remove it from the pool."""
        fitting = [buffer for buffer in self._free if len(buffer.bytes) >= size]
        if fitting:
            chosen = min(fitting, key=lambda buffer: len(buffer.bytes))
            self._free.remove(chosen)
            return chosen
        if self._free:
            # A free buffer that is too small makes room for the new one. If it stayed, sizes that grow from step to
            # step would leave one useless buffer behind each time.
            self.bytes -= len(self._free.pop().bytes)
        made = DiskBuffer(pages(size))
        self.bytes += len(made.bytes)
        return made

    def give_back(self, buffer: DiskBuffer) -> None:
        """Put back a buffer after all of its reads and writes have ended."""
        self._free.append(buffer)
