"""One run at a time in an output folder: a lock that lives exactly as long as the process that holds it."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ._errors import UserError
from ._files import RunFiles


@contextmanager
def lock_folder(files: RunFiles) -> Iterator[None]:
    """Keeps other runs out of the output folder. One process of a run takes the lock, before it looks what is there.

    The lock is the kernel's: it ends with its process, however that ends, and the file that stays behind locks nothing.
    Where the file system has no locks, nobody is kept out.

    Args:
        files: Of the run; the folder is there.

    Raises:
        UserError: Another run has the lock, or its file cannot be opened.
    """
    try:
        descriptor = os.open(files.lock, os.O_RDWR | os.O_CREAT, 0o666)  # for writing: so NFS wants it
    except OSError as error:
        raise UserError(
            f"cannot open {str(files.lock)!r}, which keeps two runs apart: {error.strerror}; name another folder with "
            f"--output"
        ) from None
    try:
        _take(descriptor, files)
        yield
    finally:
        os.close(descriptor)


def _take(descriptor: int, files: RunFiles) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 200, 0).decode(errors="replace")
        raise UserError(
            f"{str(files.folder)!r} is being written by another run{holder and f' ({holder})'}; name another folder "
            f"with --output, or wait"
        ) from None
    except OSError:  # a file system without such locks
        return
    with suppress(OSError):  # a full disk, or the file of another user: it locks all the same
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        os.fchmod(descriptor, files.folder.stat().st_mode & 0o666)  # who may write to the folder may lock it next
