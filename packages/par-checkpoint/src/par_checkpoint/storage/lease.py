"""The lease of a save: a file beside its staging folder that names the saver and is rewritten while the saver lives.

No file lock is used. On a network file system, a lock shows whether a process lives only if all clients and the server
support it. Instead, these rules decide whether a saver lives:

- On the saver's machine: its process exists. A machine is identified by the random boot id of its kernel, and a process
  by its number and its start time.
- On another machine, or in a container with its own process numbers: the file is new enough. Its age is measured by the
  clock of the file system, as the difference to a file that is created now, so clocks of two machines are never
  compared. If the file looks old, this machine then watches it for a while by its monotonic clock, so a clock that
  jumps does not end a lease.

A saver that was stopped for so long that its lease was removed commits nothing.
"""

import errno
import json
import os
import socket
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .._errors import CheckpointError

_SIZE = 512  # bytes of the file, always: it is written over in place


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Process that holds a lease.

    Args:
        host: Name of its machine, for people.
        boot: Random id of its kernel's boot, and its PID namespace.
        pid: Number of the process.
        began: When the process began, as its kernel counts; "" where that cannot be told.
        beat: Number of times that the lease was written.
        time: Clock of the machine when the lease was written, for people.
    """

    host: str
    boot: str
    pid: int
    began: str
    beat: int = 0
    time: float = 0.0


class Lease:
    """A lease that this process holds, until it is released.

    Args:
        path: The file; it must not be there.
        seconds: Seconds without a sign of life after which others take the holder for dead.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._holder, self._beat = path, _this(), 0
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
        self._ended = threading.Event()
        # A file that is closed gives its number to the next one that any thread opens. A renewal that came after the
        # close would write over that one, such as a file of another thread's checkpoint.
        self._writing = threading.Lock()
        try:
            self._write()
        except BaseException:
            self.release()
            raise
        self._thread = threading.Thread(
            target=self._renew, args=(seconds / 6,), name="par-checkpoint-lease", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Raise CheckpointError if another process has taken this one for dead, and removed the lease."""
        try:
            ours, there = os.fstat(self._file), self._path.stat()
            is_held = (ours.st_dev, ours.st_ino) == (there.st_dev, there.st_ino)
        except OSError:
            is_held = False
        if not is_held:
            raise CheckpointError(
                f"{self._path} is gone: this process was stopped for so long that another one took its save for dead "
                "and swept it; save again"
            )

    def release(self) -> None:
        """End the lease and remove its file; a second call does nothing."""
        if not self._ended.is_set():
            self._ended.set()
            with (
                self._writing,
                suppress(OSError),
            ):  # some network file systems tell only now that another machine has removed it
                os.close(self._file)
            with suppress(FileNotFoundError):
                self._path.unlink()

    def _renew(self, every: float) -> None:
        """Write the file anew until the lease ends."""
        while not self._ended.wait(every):
            with suppress(OSError):  # it is gone: `check` tells so
                self._write()

    def _write(self) -> None:
        with self._writing:
            if self._ended.is_set():
                return
            self._beat += 1
            text = json.dumps({**vars(self._holder), "beat": self._beat, "time": time.time()})
            os.pwrite(self._file, text.encode().ljust(_SIZE), 0)
            os.fsync(self._file)


def is_held(path: Path, seconds: float) -> bool:
    """Return whether the holder of a lease is alive, or may be.

    Args:
        path: The lease's file; without a file, no process holds the lease.
        seconds: Seconds without a sign of life after which the holder is taken for dead. Half of them pass before that
            is said of a process of another machine.
    """
    try:
        holder, age = _read(path)
    except FileNotFoundError:
        return False
    here = _this()
    # An equal boot id means the same kernel, which shows whether the process still runs.
    if holder is not None and holder.boot == here.boot:
        return _began(holder.pid) == holder.began if here.began else _is_there(holder.pid)
    # An age below zero, after a clock was set back, decides nothing: then the file is watched.
    if 0 <= age < seconds:
        return True
    deadline = time.monotonic() + seconds / 2
    while time.monotonic() < deadline:
        time.sleep(min(seconds / 12, 1.0))
        try:
            now, age = _read(path)
        except FileNotFoundError:
            return False
        # A newer beat proves that the holder lives, whatever its clock says.
        if now != holder:
            return True
    return False


def holder_of(path: Path) -> str:
    """Describe the holder of a lease."""
    try:
        holder, _ = _said(path)
    except FileNotFoundError:
        holder = None
    return "another process" if holder is None else f"process {holder.pid} on {holder.host}"


def _read(path: Path) -> tuple[Holder | None, float]:
    """Read the holder in a lease, or None if the content is not valid yet, and its age in seconds."""
    holder, changed = _said(path)
    return holder, _now(path.parent) - changed


def _said(path: Path) -> tuple[Holder | None, float]:
    """Read the holder in a lease, or None if the content is not valid yet, and its modification time."""
    try:
        with path.open("rb") as file:  # a network file system looks anew at what is opened
            data, changed = file.read(_SIZE), os.fstat(file.fileno()).st_mtime
    except OSError as error:
        if error.errno == errno.ESTALE:  # another machine has removed what is open here
            raise FileNotFoundError(error.errno, str(error), str(path)) from error
        raise
    try:
        holder = Holder(**json.loads(data))
    except (ValueError, TypeError):
        holder = None
    return holder, changed


def _now(folder: Path) -> float:
    """Return the time of a folder's file system; this machine's time if the folder is not writable."""
    probe = folder / f".par_checkpoint-{uuid.uuid4().hex}"
    try:
        file = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)
    except OSError:
        return time.time()
    try:
        os.write(file, b" ")
        os.fsync(file)
        return os.fstat(file).st_mtime
    finally:
        os.close(file)
        probe.unlink()


def _this() -> Holder:
    """Return this process."""
    try:
        boot = (
            Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            + ":"
            # Containers of one machine have the same boot id, but count processes on their own.
            + str(Path("/proc/self/ns/pid").readlink())
        )
    except OSError:
        boot = f"{uuid.getnode():x}"
    return Holder(host=socket.gethostname(), boot=boot, pid=os.getpid(), began=_began(os.getpid()))


def _began(pid: int) -> str:
    """Return the start time of a process in its kernel's units, or "" if the process is gone or the time unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    # The start time is field 22. The fields are counted from behind the command, which may contain spaces.
    state, *fields = text.rpartition(")")[2].split()
    return "" if state in "ZX" else fields[18]  # a zombie writes nothing any more


def _is_there(pid: int) -> bool:
    """Return whether a process with this number exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
