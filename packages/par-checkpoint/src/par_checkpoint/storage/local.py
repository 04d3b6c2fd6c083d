"""Folders on a file system of this machine, or one that all machines mount.

A save gathers its files in a staging folder `.<name>.tmp-<nonce>` beside the target. When all of them, and the folder
itself, are on the disk, the commit is one of these:

- Nothing is there: the staging folder is renamed to the target. One rename; before it nothing, after it all.
- Linux exchanges the old folder and the new one in one step. What then bears the staging name is the old one.
- Elsewhere the old folder becomes `.<name>.old-<nonce>`, then the staging folder becomes the target. Between the two
  there is no target, and the old one is whole: `recover` gives it its name back.

So at any kill the target is wholly the old or wholly the new, or it is absent and a whole `.old-*` is there. That one
stays whole because nothing is ever removed under such a name: it is renamed to a staging name first. A staging name
never counts, so a half-removed folder is never read.

The saver holds a lock on the staging folder. The kernel releases it when the process ends, and it follows the folder
through renames: a folder that can be locked has no living saver, and may be swept. Where `recover` sees no target, but
a saver that lives, it waits for the second rename. On a file system without such locks it does not wait; the saver's
second rename then fails on the folder that is there, so even there nothing is lost. But two savers to one path at a
time need the locks: without them, the later one sweeps the other's staging.

Symbolic links are read through, and never followed by anything that writes or removes.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from .._errors import CheckpointError, CorruptError
from ..format.manifest import MANIFEST
from .owned import Remnant, carried, check_name, check_replaceable, parents, remnant_of
from .write_back import WriteBack

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class LocalFolder:
    """See `Folder`.

    Args:
        path: The folder; a symbolic link at its end is not resolved.
        at: Called with the name of each step of a commit.
        exchange: Whether to exchange folders in one step where the system can.
        patience: Seconds that a living saver gets between its two renames, and a shared file system to show a folder.
    """

    positional = True

    def __init__(self, path: str, *, at: Callable[[str], None], exchange: bool = True, patience: float = 10.0) -> None:
        self.path = Path(os.path.abspath(path))  # noqa: PTH100 - resolves '..', but no links
        if not self.path.name:
            raise ValueError(f"{path!r} has no name: give a folder below it")
        self.url, self.at, self.exchange, self.patience = str(self.path), at, exchange, patience

    def recover(self) -> None:
        deadline = time.monotonic() + self.patience
        while not os.path.lexists(self.path) and (olds := [each for each in self._remnants() if each.kind == "old"]):
            newest = max(olds, key=lambda each: _changed(self.beside(each.kind, each.nonce)))
            with _claim(self.beside("tmp", newest.nonce)) as dead:
                if dead:
                    self._put_back(self.beside("old", newest.nonce))
            if not dead and time.monotonic() > deadline:
                raise CheckpointError(f"another process is replacing {self.url}, but does not end: see to it, or retry")
            time.sleep(0 if dead else 0.02)

    def version(self) -> str | None:
        try:
            file = os.open(self.path / MANIFEST, os.O_RDONLY)  # a network file system looks anew at what is opened
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            found = os.fstat(file)
        finally:
            os.close(file)
        return f"{found.st_dev}:{found.st_ino}:{found.st_mtime_ns}"

    def exists(self) -> bool:
        if self.path.is_symlink() or not self.path.is_dir():
            return os.path.lexists(self.path)
        return any(True for _ in self.path.iterdir())

    def sizes(self) -> dict[str, int]:
        if not self.path.is_dir():
            raise CheckpointError(f"there is no folder {self.url}: check the path")
        found = {}
        for folder in ("", "optimizer"):
            for entry in _scan(self.path / folder):
                if not entry.is_dir():
                    found[f"{folder}/{entry.name}".lstrip("/")] = _size(entry)
        return found

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        with contextlib.closing(self.open(name)) as source:
            data = bytearray((source.size if end is None else end) - begin)
            source.read_into(begin, memoryview(data))
        return bytes(data)

    def open(self, name: str) -> "LocalSource":
        return LocalSource(self.path / check_name(name))

    def folders(self) -> list[str]:
        return sorted(entry.name for entry in _scan(self.path) if entry.is_dir())

    def child(self, name: str) -> "LocalFolder":
        path = str(self.path / check_name(name))
        return LocalFolder(path, at=self.at, exchange=self.exchange, patience=self.patience)

    def stage(self, nonce: str) -> "LocalStaging":
        return LocalStaging(self, nonce)

    def check_target(self, *, overwrite: bool) -> None:
        if self.path.is_mount():
            raise CheckpointError(f"{self.url} is a mount point and cannot be swapped: save to a folder below it")
        if not self.exists():
            return
        if not overwrite:
            raise FileExistsError(f"{self.url!r} exists; pass overwrite=True to replace it, or choose another path")
        if self.path.is_symlink() or not self.path.is_dir():
            raise CheckpointError(f"{self.url} is a link or a file, which is never replaced: save to another path")
        names = self.files()
        check_replaceable(self.url, names, self.read(MANIFEST) if MANIFEST in names else None)

    def remove(self) -> None:
        if self.path.is_symlink():
            raise CheckpointError(f"{self.url} is a symbolic link, which is never followed: remove it by hand")
        self.retire(self.path)

    def sweep(self, *, dry_run: bool = False) -> list[str]:
        swept = []
        for each in self._remnants():
            path = self.beside(each.kind, each.nonce)
            with _claim(self.beside("tmp", each.nonce)) as dead:
                # The target is looked at only now: a saver that lived while the old one was listed may be done.
                if not dead or (each.kind == "old" and not os.path.lexists(self.path)):
                    continue
                if not dry_run:
                    (self.retire if each.kind == "old" else erase)(path)
                if dry_run or not os.path.lexists(path):
                    swept.append(str(path))
        return swept

    def beside(self, kind: str, nonce: str) -> Path:
        """The folder of a save beside this one."""
        return self.path.with_name(Remnant(self.path.name, kind, nonce).name)

    def files(self) -> list[str]:
        """The names of all files, however deep; links count as files, and are not followed."""
        return [
            str((Path(top) / name).relative_to(self.path))
            for top, folders, files in os.walk(self.path)
            for name in [*files, *(each for each in folders if (Path(top) / each).is_symlink())]
        ]

    def retire(self, path: Path) -> None:
        """Removes a whole folder, this one or an old one beside it, by way of a name that is never read."""
        trash = self.beside("tmp", uuid.uuid4().hex)
        with contextlib.suppress(FileNotFoundError):  # another process sweeps as well
            path.rename(trash)
            self.at("retired")
            erase(trash)

    def _remnants(self) -> list[Remnant]:
        entries = (entry for entry in _scan(self.path.parent) if entry.is_dir(follow_symlinks=False))
        found = (remnant_of(entry.name) for entry in entries)
        return [each for each in found if each is not None and each.target == self.path.name]

    def _put_back(self, old: Path) -> None:
        try:
            old.rename(self.path)
            _sync(self.path.parent)
        except OSError as error:
            # Another reader did the same, or the saver's second rename came first.
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise CheckpointError(f"a save died; rename {old} to {self.url} to undo it ({error})") from error


class LocalStaging:
    """See `Staging`."""

    positional = True

    def __init__(self, folder: LocalFolder, nonce: str) -> None:
        self._folder, self._nonce = folder, nonce
        self._path = folder.beside("tmp", nonce)
        self._lock: int | None = None

    def create(self, names: Iterable[str], needed: int) -> None:
        parent = self._folder.path.parent
        parent.mkdir(parents=True, exist_ok=True)
        self._folder.recover()
        self._folder.sweep()
        self._folder.at("swept")
        space = os.statvfs(parent)
        free = space.f_bavail * space.f_frsize
        if needed > free:
            raise CheckpointError(f"{needed:,} bytes are needed in {parent}, {free:,} are free: free some space")
        self._lock = self._make()
        for name in parents(names):
            (self._path / name).mkdir()
        self._folder.at("made")

    def attach(self) -> None:
        deadline = time.monotonic() + self._folder.patience
        while not self._path.is_dir():
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{self._path} is not visible on this rank: use a file system that all ranks share"
                )
            time.sleep(0.05)
            _scan(self._path.parent)  # makes a network file system look again

    def allocate(self, name: str, size: int) -> None:
        with contextlib.closing(self.writer(name)) as writer:
            writer.resize(size)

    def write(self, name: str, data: bytes) -> None:
        for each in parents([name]):
            (self._path / each).mkdir(exist_ok=True)
        with contextlib.closing(self.writer(name)) as writer:
            writer.resize(0)
            writer.write_at(0, memoryview(data))
            writer.finish()

    def writer(self, name: str) -> "LocalWriter":
        return LocalWriter(self._path / check_name(name))

    def publish(self, *, overwrite: bool) -> None:
        folder, replaces = self._folder, self._folder.exists()
        if replaces and not overwrite:
            raise CheckpointError(f"another process wrote {folder.url} in the meantime: save to another path")
        folder.check_target(overwrite=overwrite)
        if replaces:
            self._carry()
        for path, _, _ in os.walk(self._path):
            _sync(Path(path))
        folder.at("synced-staging")
        if not replaces:
            self._move_in()
        elif not (folder.exchange and self._exchange()):
            self._rename_twice()
        self.close()

    def discard(self) -> None:
        erase(self._path)
        self.close()

    def close(self) -> None:
        if self._lock is not None:
            # Closing alone would leave it locked by a forked child, such as a data loader's worker.
            with contextlib.suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None

    def _make(self) -> int:
        """Makes the folder and locks it. Another saver may sweep it before it is locked: then once more."""
        while True:
            with contextlib.suppress(FileNotFoundError):
                self._path.mkdir()
                self._folder.at("created")
                lock = os.open(self._path, _FOLDER)
                self._folder.at("opened")
                with contextlib.suppress(OSError):  # a file system without such locks
                    fcntl.flock(lock, fcntl.LOCK_EX)
                if self._path.is_dir():
                    return lock
                os.close(lock)

    def _carry(self) -> None:
        """Takes over what belongs beside the weights, and was not written anew."""
        old = self._folder.path
        for name in carried(self._folder.files(), os.listdir(self._path)):  # noqa: PTH208 - names, not paths
            try:
                os.link(old / name, self._path / name, follow_symlinks=False)
            except OSError:  # links are refused: no such file system, or another user's file
                shutil.copy2(old / name, self._path / name, follow_symlinks=False)
                if not (self._path / name).is_symlink():
                    _sync(self._path / name)
        self._folder.at("linked")

    def _move_in(self) -> None:
        folder = self._folder
        try:
            self._path.rename(folder.path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise CheckpointError(f"another process wrote {folder.url} in the meantime: save again") from error
        folder.at("renamed-new")
        _sync(folder.path.parent)
        folder.at("synced")

    def _exchange(self) -> bool:
        folder = self._folder
        if not exchange(self._path, folder.path):
            return False
        folder.at("exchanged")
        _sync(folder.path.parent)
        folder.at("synced")
        erase(self._path)
        folder.at("removed")
        return True

    def _rename_twice(self) -> None:
        folder, old = self._folder, self._folder.beside("old", self._nonce)
        folder.path.rename(old)
        try:
            folder.at("renamed-old")
            self._move_in()
        except BaseException:
            if not os.path.lexists(folder.path):
                old.rename(folder.path)
            raise
        folder.retire(old)
        folder.at("removed")


class LocalSource:
    """See `Source`. Threads may read at once."""

    stride = 1 << 19  # what was read is still in the core's cache for the checksum

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise CorruptError(f"{path} is missing: restore it, or load another checkpoint") from error
        self.size = os.fstat(self._fd).st_size

    def read_into(self, begin: int, view: memoryview) -> None:
        while len(view):
            count = os.preadv(self._fd, [view], begin)
            if count == 0:
                raise CorruptError(f"{self._path} ends at byte {self.size}, but byte {begin} is asked for: truncated?")
            begin, view = begin + count, view[count:]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LocalWriter:
    """See `Writer`. Threads and ranks may write at once."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        self._write_back = WriteBack(self._fd)

    def write_at(self, begin: int, view: memoryview) -> None:
        at, left = begin, view
        while len(left):
            count = os.pwrite(self._fd, left, at)
            at, left = at + count, left[count:]
        self._write_back.wrote(begin, len(view))

    def resize(self, size: int) -> None:
        """Makes the file that long; new bytes are zero."""
        os.ftruncate(self._fd, size)

    def finish(self) -> None:
        try:
            os.fsync(self._fd)
        finally:
            self.close()

    def close(self) -> None:
        """Closes it; again is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    abort = close


def erase(path: Path) -> None:
    """Removes a folder that bears a staging name.

    What cannot be removed is left for the next sweep: some file systems keep files that are open elsewhere, and a save
    that is in its place has not failed.
    """
    shutil.rmtree(path, ignore_errors=True)


def exchange(one: Path, other: Path) -> bool:
    """Exchanges the names of two folders in one step; False where the system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    here, both = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    rename.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    if rename(here, os.fsencode(one), here, os.fsencode(other), both) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM):  # EPERM: a container's filter
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


@contextlib.contextmanager
def _claim(staging: Path) -> Iterator[bool]:
    """Keeps a staging folder locked; False if its saver lives. One that is not there has no living saver."""
    lock = None
    with contextlib.suppress(FileNotFoundError):
        lock = os.open(staging, _FOLDER)
    try:
        yield lock is None or _try_lock(lock)
    finally:
        if lock is not None:
            os.close(lock)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without such locks
        return True
    return True


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    """What is in a folder; nothing if it is not there."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat().st_size
    except FileNotFoundError as error:
        raise CorruptError(f"{entry.path} is a link to a file that is missing: fetch it again") from error


def _changed(path: Path) -> int:
    """When a folder got its name, about; 0 if it is gone."""
    try:
        return path.lstat().st_ctime_ns
    except FileNotFoundError:
        return 0


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems sync no folders
            raise
    finally:
        os.close(file)
