"""This rank's shards of parameters on a disk, read before their unit is gathered.

disk      read shard k + 1 ...
gather                          shard k
compute                                   unit k - 1
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..layout.chunk import Chunk
from .disk import Disk, DiskHandle
from .errors import DiskErrors
from .pieces import pages
from .staging import StagingBuffer, StagingPool


@dataclass(eq=False, kw_only=True)
class ShardRead:
    """A read of a shard that has begun.

    Args:
        buffer: Staging buffer that the shard is read into.
        handle: The reads.
        versions: Versions of the shard's tensors when the reads began; a write changes them.
    """

    buffer: StagingBuffer
    handle: DiskHandle
    versions: Sequence[int]


class DiskShards:
    """Reader of parameter shards on a disk.

    Only the unit that is gathered next is prefetched. Its shard goes through a staging buffer to its place in the
    unsharded unit, so the buffer is free again as soon as the all-gather begins.

    Args:
        disk: The file.
        starts: First byte in the file of this rank's shard, by chunk.
        is_stepping: Returns whether a step of any of some chunks is in progress, so that they must not be read yet.
        errors: Collects errors of reads. A shard that cannot be read is NaN, because the other ranks wait for it.
    """

    def __init__(
        self,
        disk: Disk,
        starts: Mapping[Chunk, int],
        is_stepping: Callable[[Sequence[Chunk]], bool],
        errors: DiskErrors,
    ) -> None:
        self._disk, self._starts = disk, dict(starts)
        self._is_stepping, self._errors = is_stepping, errors
        self._reads: dict[Chunk, ShardRead] = {}
        self._pool = StagingPool()
        self.were_given = bool(starts)
        """Whether any shard was on the disk when the module was sharded.

        Ranks communicate if it is set, so it must stay the same on every rank. `has` may change on one rank only, after
        its disk has failed.
        """

    def has(self, chunk: Chunk) -> bool:
        """Return whether a chunk's parameters are on the disk now."""
        return chunk in self._starts

    @property
    def stored_bytes(self) -> int:
        """Bytes of the file that hold parameters."""
        return sum(pages(chunk.own.nbytes) for chunk in self._starts)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the staging buffers."""
        return self._pool.total

    def prefetch(self, chunks: Sequence[Chunk]) -> None:
        """Start to read the shards of the unit that is gathered next."""
        on_disk = [chunk for chunk in chunks if chunk in self._starts]
        # A shard that is stepped would be read too early. Its own `fetch_` comes after a wait for the step.
        if on_disk and not self._is_stepping(on_disk):
            for other in [chunk for chunk in self._reads if chunk not in on_disk]:
                self._drop(other)  # the prediction was wrong; its buffers serve this unit
            for chunk in on_disk:
                if chunk not in self._reads:
                    self._begin(chunk)

    @torch.no_grad()
    def fetch_(self, chunk: Chunk, into: torch.Tensor) -> None:
        """Copy this rank's shard of a chunk to memory, from a prefetch if there is a valid one."""
        if chunk in self._reads and self._reads[chunk].versions != _versions(chunk):
            self._drop(chunk)  # somebody has written to the shard since
        if chunk not in self._reads:
            self._begin(chunk)
        read = self._reads[chunk]
        error = read.handle.error()
        # The other ranks are on their way to this all-gather, so an error here would leave them waiting.
        if error is None:
            into.copy_(read.buffer.tensor(0, into.dtype, into.numel()))
        else:
            into.fill_(torch.nan)
            self._errors.add_unread(error)
        self._drop(chunk)

    def drop_reads(self) -> None:
        """Discard all prefetched shards, because a step is about to change them."""
        for chunk in list(self._reads):
            self._drop(chunk)

    def remove(self, chunk: Chunk) -> None:
        """Stop reading a chunk, whose parameters are in memory for good from now on."""
        if chunk in self._reads:
            self._drop(chunk)
        del self._starts[chunk]

    def _begin(self, chunk: Chunk) -> None:
        size = pages(chunk.own.nbytes)
        buffer = self._pool.take(size)
        handle = self._disk.read(self._starts[chunk], buffer.bytes[:size])
        self._reads[chunk] = ShardRead(buffer=buffer, handle=handle, versions=_versions(chunk))

    def _drop(self, chunk: Chunk) -> None:
        read = self._reads.pop(chunk)
        read.handle.error()  # threads write to the buffer until the reads have ended
        self._pool.give_back(read.buffer)


def _versions(chunk: Chunk) -> list[int]:
    """Return versions that change when somebody other than a step writes to a chunk's parameters."""
    return [chunk.own._version, *(member.parameter._version for member in chunk.members)]
