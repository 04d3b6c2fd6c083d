"""This rank's shares of units on a disk, read before the units are gathered.

disk      read share k + 1 ...
gather                          share k
compute                                   unit k - 1

One unit is read ahead: that which is gathered next, as far as anybody knows. Its share goes into buffers of whole pages
past the kernel's cache, and from there to its own place among all shares, so that a buffer is free as soon as its unit
is gathered.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..layout.chunk import Chunk
from .disk import Disk, DiskBuffer, DiskHandle
from .pieces import pages
from .pool import DiskBuffers


@dataclass(eq=False, kw_only=True)
class _Ahead:
    """A share that is read.

    Args:
        buffer: Where it goes.
        handle: The reads.
        versions: What shows whether somebody has written to it since.
    """

    buffer: DiskBuffer
    handle: DiskHandle
    versions: Sequence[int]


class DiskShards:
    """Reads shares of chunks from a disk.

    Args:
        disk: The file.
        places: For each chunk whose parameters lie there, the first byte of this rank's share.
        is_stepping: Tells of some chunks whether a step of any of them is under way, so that they may not be read yet.
        on_error: Is told that a share cannot be read. Then it is NaN, for the other ranks wait for it.
    """

    def __init__(
        self,
        disk: Disk,
        places: Mapping[Chunk, int],
        is_stepping: Callable[[Sequence[Chunk]], bool],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self._disk, self._places = disk, dict(places)
        self._is_stepping, self._on_error = is_stepping, on_error
        self._were_given = bool(places)
        self._ahead: dict[Chunk, _Ahead] = {}
        self._pool = DiskBuffers()

    def has(self, chunk: Chunk) -> bool:
        """Whether a chunk's parameters lie on the disk."""
        return chunk in self._places

    @property
    def are_there(self) -> bool:
        """Whether any did when the module was sharded.

        All ranks know that alike and meet by it. Later a rank whose disk fails may have all of them in memory.
        """
        return self._were_given

    @property
    def stored_bytes(self) -> int:
        """Bytes of the file that have parameters."""
        return sum(pages(chunk.own.nbytes) for chunk in self._places)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers that there are."""
        return self._pool.bytes

    def start(self, chunk: Chunk, element: int) -> int | None:
        """Where an element of this rank's share lies in the file: its first byte; None: it lies elsewhere."""
        low, _ = chunk.share
        place = self._places.get(chunk)
        return None if place is None else place + (element - low) * chunk.own.element_size()

    def expect(self, chunks: Sequence[Chunk]) -> None:
        """Begins to read the shares of a unit that is gathered next."""
        on_disk = [chunk for chunk in chunks if chunk in self._places]
        if on_disk and not self._is_stepping(on_disk):
            for other in [chunk for chunk in self._ahead if chunk not in on_disk]:
                self._forget(other)
            for chunk in on_disk:
                if chunk not in self._ahead:
                    self._begin(chunk)

    @torch.no_grad()
    def fetch_(self, chunk: Chunk, into: torch.Tensor) -> None:
        """Brings this rank's share of a chunk to memory, which was read ahead or is read now."""
        if chunk not in self._ahead:
            self._begin(chunk)
        elif self._ahead[chunk].versions != _versions(chunk):
            self._forget(chunk)
            self._begin(chunk)
        ahead = self._ahead[chunk]
        error = ahead.handle.error()
        if error is None:
            into.copy_(ahead.buffer.tensor(0, into.dtype, into.numel()))
        else:
            into.fill_(torch.nan)
            self._on_error(error)
        self._forget(chunk)

    def drop(self) -> None:
        """Forgets what was read ahead, as it may be out of date soon."""
        for chunk in list(self._ahead):
            self._forget(chunk)

    def leave(self, chunk: Chunk) -> None:
        """A chunk's parameters lie in memory from now on."""
        if chunk in self._ahead:
            self._forget(chunk)
        del self._places[chunk]

    def _begin(self, chunk: Chunk) -> None:
        size = pages(chunk.own.nbytes)
        buffer = self._pool.take(size)
        handle = self._disk.read(self._places[chunk], buffer.bytes[:size])
        self._ahead[chunk] = _Ahead(buffer=buffer, handle=handle, versions=_versions(chunk))

    def _forget(self, chunk: Chunk) -> None:
        ahead = self._ahead.pop(chunk)
        ahead.handle.error()  # what is under way uses the buffer
        self._pool.give_back(ahead.buffer)


def _versions(chunk: Chunk) -> list[int]:
    """What shows whether somebody has written to a chunk's parameters, other than a step."""
    return [chunk.own._version, *(member.parameter._version for member in chunk.members)]
