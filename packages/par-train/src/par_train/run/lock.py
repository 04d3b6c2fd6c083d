"""One run at a time in an output folder: a lock that lives exactly as long as the process that holds it.

The lock is the kernel's (flock), taken here by hand, although torch brings the filelock library along. Compared with
it: its older versions let a run that finds the lock taken empty the file (filelock's issue 591), and with it the note
that says who has the folder; where a file system has no flock, it falls back to a file that locks by being there, which
outlives a killed process and then keeps everybody out; and the file's mode, the note and its reading, which are most of
this module, stay with the caller. What flock is on NFS (Linux makes it a lock of the server, which wants the file open
for writing, and may report contention as "permission denied") takes two lines.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .._errors import UserError
from .files import RunFiles


class Lock:
    """A lock that this process has, and a note in its file, which stays when the lock ends.

    Args:
        descriptor: The open lock file.
        note: The note that the file has already.
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
def lock_folder(files: RunFiles, elsewhere: str = "name another folder") -> Iterator[Lock]:
    """Keeps other runs out of the output folder. One process of a run takes the lock, before it looks what is there.

    The lock is the kernel's: it ends with its process, however that ends, and the file that stays behind locks nothing.
    Where the file system has no locks, nobody is kept out.

    Args:
        files: The files of the run; their folder is made if it is not there.
        elsewhere: The remedy that the error names.

    Raises:
        UserError: Another run has the lock, or its file cannot be opened.
    """
    try:
        files.folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(files.lock, os.O_RDWR | os.O_CREAT, 0o666)  # for writing: so NFS wants it
    except OSError as error:
        raise UserError(
            f"cannot open {str(files.lock)!r}, which keeps two runs apart: {error.strerror}; {elsewhere}"
        ) from None
    try:
        _take(descriptor, files, elsewhere)
        yield Lock(descriptor, read_note(files))
    finally:
        os.close(descriptor)


def _take(descriptor: int, files: RunFiles, elsewhere: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # NFS reports a lock that another host has as a denied permission
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").partition("\n")[0]
        raise UserError(
            f"{str(files.folder)!r} is being written by another run{holder and f' ({holder})'}; {elsewhere}, or wait"
        ) from None
    except OSError:  # a file system without such locks
        return
    with suppress(OSError):  # the file of another user
        os.fchmod(descriptor, files.folder.stat().st_mode & 0o666)  # who may write to the folder may lock it next
