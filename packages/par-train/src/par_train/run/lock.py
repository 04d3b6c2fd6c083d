"""The lock of an output folder, and the note in its file: how far a launch is. The process that holds it, ends it.

The lock is the kernel's flock. The filelock library, which torch installs, does not fit for three reasons. Its older
versions empty the file when another run holds the lock (filelock's issue 591), and with it the note. On a file system
without flock it locks by the existence of a file, which outlives a killed process and then blocks every run. The file's
mode and the note, most of this module, would stay here.

The launcher reads the note, and so do ranks that it starts again: torch's launcher keeps its id over such restarts.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from .._errors import UserError
from .files import RunFiles

BEGUN, NEAR, SAVED = "begun", "near", "saved"


class Lock:
    """A lock that this process holds, and a note in its file. The note outlives the lock.

    Args:
        descriptor: Descriptor of the open lock file.
        note: Note of the file so far.
    """

    def __init__(self, descriptor: int, note: str) -> None:
        self._descriptor = descriptor
        self.note(note)

    def note(self, note: str) -> None:
        """Write the holder of the lock, and the note in the second line, if the file system allows it."""
        text = f"process {os.getpid()} on {socket.gethostname()}\n{note}".encode()
        with suppress(OSError):  # a full disk, or another user's file: the lock works without the note
            os.pwrite(self._descriptor, text, 0)
            os.ftruncate(self._descriptor, len(text))


def read_note(files: RunFiles) -> str:
    """Return the note in the lock file of a run's folder; "" if it has none."""
    try:
        lines = files.lock.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    return lines[1] if len(lines) > 1 else ""


@contextmanager
def lock_folder(files: RunFiles, elsewhere: str = "name another folder") -> Iterator[Lock]:
    """Keep other runs out of the output folder. One process of a run takes the lock, before it reads the folder.

    The kernel ends the lock with its process, even if the process is killed; the remaining file locks nothing. On a
    file system without locks, this keeps no run out.

    Args:
        files: Files of the run; their folder is created if it does not exist.
        elsewhere: Fix that the error names.

    Raises:
        UserError: Another run has the lock, or its file cannot be opened.
    """
    try:
        files.folder.mkdir(parents=True, exist_ok=True)
        # The file is never removed: one run could hold the removed file while another run locks the new one.
        descriptor = os.open(files.lock, os.O_RDWR | os.O_CREAT, 0o666)  # for writing, because NFS requires it
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
    except (BlockingIOError, PermissionError):  # NFS reports it as a denied permission
        holder = os.pread(descriptor, 200, 0).decode(errors="replace").partition("\n")[0]
        raise UserError(
            f"{str(files.folder)!r} is being written by another run{holder and f' ({holder})'}; {elsewhere}, or wait"
        ) from None
    except OSError:  # a file system without such locks
        return
    with suppress(OSError):  # another user's file
        os.fchmod(descriptor, files.folder.stat().st_mode & 0o666)  # who may write there may lock it next


def is_restarted() -> bool:
    """Return whether torchrun has restarted this rank."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def note_of(state: str, launch: str | None = None) -> str:
    """Return the note for a launch that has reached a state.

    Args:
        state: `BEGUN` when the folder belongs to this launch, `NEAR` when its last checkpoint is only in the first
            tier, or `SAVED` when every tier has it.
        launch: Id of the launcher; default: the launch of this rank.
    """
    return f"{state} by job {os.environ.get('TORCHELASTIC_RUN_ID', 'unknown') if launch is None else launch}"


def has_begun(files: RunFiles) -> bool:
    """Return whether an earlier start of this rank's launch has begun a run in the folder."""
    return read_note(files) in map(note_of, (BEGUN, NEAR, SAVED))
