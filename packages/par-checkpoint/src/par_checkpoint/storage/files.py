"""Interfaces of files to read and to write, on disks and in object stores."""

from typing import Protocol

REACH = 64 << 20
"""Bytes of one request that reads from a store, at most."""

IN_FLIGHT = 16
"""Requests of one rank to a store that are under way at a time, at most."""


class FileSource(Protocol):
    """A file that is being read."""

    size: int
    stride: int
    """Bytes to read at a time, where something is done with them right after."""

    def ranged(self, begin: int, end: int) -> "FileSource":
        """Open the file once more, to read its bytes begin .. end - 1 in order; the caller closes it."""

    def read_into(self, begin: int, view: memoryview) -> None:
        """Fill the view with the bytes from `begin` on; raise CorruptError if the file ends before."""

    def close(self) -> None:
        """Close the file; a second call does nothing."""


class Writer(Protocol):
    """A file that is being written."""

    def write_at(self, begin: int, view: memoryview) -> None:
        """Write all of the view at byte `begin`; where the staging is not positional, that must be the current end."""

    def finish(self) -> None:
        """Bring the bytes to the disk, and close."""

    def abort(self) -> None:
        """Close without syncing the bytes; after `finish` it does nothing."""
