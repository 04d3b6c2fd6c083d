"""Durable writes."""

import errno
import os
from pathlib import Path


def sync_to_disk(path: Path) -> None:
    """Flush a file, or a directory's entries, to the disk.

    Args:
        path: The file or directory.

    Raises:
        OSError: The disk is full or failed.
    """
    # A directory can only be opened for reading, and fsync accepts such a descriptor for files, too.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync a directory
            raise
    finally:
        os.close(descriptor)
