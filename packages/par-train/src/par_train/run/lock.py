"""One run at a time in an output folder: a lock that lives exactly as long as the process that holds it."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .._errors import UserError
from .files import RunFiles


class Lock:
    """A lock that is held, and a note in its file, which stays when the lock ends.

    Args:
        descriptor: Of the open file.
        note: What the file has noted already.
    """

    def __init__(self, descriptor: int, note: str) -> None:
        self._descriptor = descriptor
        self.note(note)

    def note(self, note: str) -> None:
        """Writes who holds the lock, and the note in the second line, where the file system lets it."""
        text = f"process {os.getpid()} on {socket.gethostname()}\n{note}".encode()
        with suppress(OSError):  # a full disk, or the file of another user: it locks all the same
            os.pwrite(self._descriptor, text, 0)
            os.ftruncate(self._descriptor, len(text))


def read_note(files: RunFiles) -> str:
    """The note in the lock file of a run's folder; empty if there is none."""
    try:
        lines = files.lock.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return lines[1] if len(lines) > 1 else ""


@contextmanager
def lock_folder(files: RunFiles) -> Iterator[Lock]:
    """Keeps other runs out of the output folder. One process of a run takes the lock, before it looks what is there.

    The lock is the kernel's: it ends with its process, however that ends, and the file that stays behind locks nothing.
    Where the file system has no locks, nobody is kept out.

    Args:
        files: Of the run; the folder is made if it is not there.

    Raises:
        UserError: Another run has the lock, or its file cannot be opened.
    """
    try:
        files.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(files.lock, os.O_RDWR | os.O_CREAT, 0o666)  # for writing: so NFS wants it
    except OSError as error:
        raise UserError(
            f"cannot open {str(files.lock)!r}, which keeps two runs apart: {error.strerror}; name another folder with "
            f"--output"
        ) from None
    try:
        _take(descriptor, files)
        yield Lock(descriptor, read_note(files))
    finally:
        os.close(descriptor)


def _take(descriptor: int, files: RunFiles) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").partition("\n")[0]
        raise UserError(
            f"{str(files.folder)!r} is being written by another run{holder and f' ({holder})'}; name another folder "
            f"with --output, or wait"
        ) from None
    except OSError:  # a file system without such locks
        return
    with suppress(OSError):  # the file of another user
        os.fchmod(descriptor, files.folder.stat().st_mode & 0o666)  # who may write to the folder may lock it next
