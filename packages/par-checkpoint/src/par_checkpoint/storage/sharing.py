"""Rules by which the clients of a file system may write one file concurrently, by type of the file system."""

import ctypes
import os
import sys
from enum import IntEnum
from pathlib import Path


class Sharing(IntEnum):
    """Ways in which clients may write one file, the least restricted first."""

    RANGES = 0
    """Every process writes any bytes of it: the kernel of one machine has all of it."""

    STRIPES = 1
    """Every process writes, but clients that meet in one stripe of 1 MiB wait for each other's locks."""

    FILES = 2
    """One client at a time: others may not see what it has written, or undo it with a page that they keep."""


ALIGNMENT = {Sharing.RANGES: 1, Sharing.STRIPES: 1 << 20, Sharing.FILES: 4096}
"""Bytes at whose multiples the parts of two clients meet, where they write one file all the same."""

_LOCAL = {
    0xEF53,  # ext2 to ext4
    0x58465342,  # XFS
    0x9123683E,  # Btrfs
    0xF2F52010,  # F2FS
    0x2FC12FC1,  # ZFS
    0xCA451A4E,  # bcachefs
    0x3153464A,  # JFS
    0x01021994,  # tmpfs
    0x858458F6,  # ramfs
    0x794C7630,  # overlayfs
}
_STRIPED = {
    0x0BD00BD0,  # Lustre
    0x47504653,  # GPFS, Storage Scale
}


def sharing_of(path: Path) -> Sharing:
    """Return how several clients may write files in a folder.

    Unknown file systems, NFS, SMB and FUSE: one client per file.

    Args:
        path: Folder; if it does not exist, its nearest existing parent counts.
    """
    # The folder may not exist yet. Its nearest parent is on the same file system.
    while not path.exists() and path != path.parent:
        path = path.parent
    kind = _magic(path)
    if kind in _LOCAL:
        return Sharing.RANGES
    return Sharing.STRIPES if kind in _STRIPED else Sharing.FILES


def _magic(path: Path) -> int:
    """Return the number by which Linux identifies the type of a file system; 0 on other systems."""
    if sys.platform != "linux":
        return 0
    fields = (ctypes.c_long * 32)()  # `struct statfs`, whose first field is the kind
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(path), fields) != 0:
        return 0
    return fields[0] & 0xFFFFFFFF
