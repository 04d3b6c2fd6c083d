"""How a save on a local disk, or one that all machines mount, takes the place of what was there.

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

Symbolic links are never followed here.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .._errors import CheckpointError
from .owned import Remnant, remnant_of


@dataclass(frozen=True, kw_only=True)
class Target:
    """The folder of a checkpoint, and the hidden folders of saves beside it.

    Args:
        path: The folder.
        at: Called with the name of each step of a commit.
        exchange: Whether to exchange folders in one step where the system can.
        patience: Seconds that a living saver gets between its two renames.
    """

    path: Path
    at: Callable[[str], None]
    exchange: bool
    patience: float

    def begin(self, nonce: str) -> int:
        """Makes a staging folder and locks it; another saver may sweep it before it is locked: then once more.

        Returns:
            The descriptor that holds the lock, see `unlock`.
        """
        staging = self.beside("tmp", nonce)
        while True:
            with contextlib.suppress(FileNotFoundError):
                staging.mkdir()
                self.at("created")
                lock = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
                self.at("opened")
                with contextlib.suppress(OSError):  # a file system without such locks
                    fcntl.flock(lock, fcntl.LOCK_EX)
                if staging.is_dir():
                    return lock
                os.close(lock)

    def commit(self, nonce: str, *, replaces: bool) -> None:
        """Puts a staging folder whose files are on the disk in the target's place.

        Args:
            nonce: The save's.
            replaces: Whether an old checkpoint is there.

        Raises:
            CheckpointError: Another process was first; what it wrote stays.
        """
        staging, old = self.beside("tmp", nonce), self.beside("old", nonce)
        for folder, _, _ in os.walk(staging):
            sync(Path(folder))
        self.at("synced-staging")
        if not replaces:
            self._move_in(staging)
        elif self.exchange and exchange(staging, self.path):
            self.at("exchanged")
            sync(self.path.parent)
            self.at("synced")
            erase(staging)  # the old one, by now
            self.at("removed")
        else:
            self.path.rename(old)
            try:
                self.at("renamed-old")
                self._move_in(staging)
            except BaseException:
                if not os.path.lexists(self.path):
                    old.rename(self.path)
                raise
            self.retire(old)
            self.at("removed")

    def recover(self) -> None:
        """Gives an old checkpoint its name back, if a saver died between its two renames.

        Raises:
            CheckpointError: A saver that lives does not go on, or the name cannot be given back.
        """
        deadline = time.monotonic() + self.patience
        while not os.path.lexists(self.path) and (
            olds := [folder for folder in self._remnants() if folder.kind == "old"]
        ):
            newest = max(olds, key=lambda old: _changed(self.beside("old", old.nonce)))
            with _claim(self.beside("tmp", newest.nonce)) as dead:
                if dead:
                    self._put_back(self.beside("old", newest.nonce))
            if not dead and time.monotonic() > deadline:
                raise CheckpointError(
                    f"another process is replacing {self.path}, but does not end: see to it, or retry"
                )
            time.sleep(0 if dead else 0.02)

    def sweep(self, *, dry_run: bool) -> list[str]:
        """Removes what dead saves left beside the target; returns the paths."""
        swept = []
        for remnant in self._remnants():
            path = self.beside(remnant.kind, remnant.nonce)
            with _claim(self.beside("tmp", remnant.nonce)) as dead:
                # The target is looked at only now: a saver that lived while the old one was listed may be done.
                if not dead or (remnant.kind == "old" and not os.path.lexists(self.path)):
                    continue
                if not dry_run:
                    (self.retire if remnant.kind == "old" else erase)(path)
                if dry_run or not os.path.lexists(path):
                    swept.append(str(path))
        return swept

    def retire(self, path: Path) -> None:
        """Removes a whole folder, the target or an old one beside it, by way of a name that is never read."""
        trash = self.beside("tmp", uuid.uuid4().hex)
        with contextlib.suppress(FileNotFoundError):  # another process sweeps as well
            path.rename(trash)
            self.at("retired")
            erase(trash)

    def beside(self, kind: str, nonce: str) -> Path:
        """The path of a save's folder beside the target; `kind` is "tmp" or "old"."""
        return self.path.with_name(Remnant(self.path.name, kind, nonce).name)

    def _move_in(self, staging: Path) -> None:
        """Renames the staging folder to the target, where nothing or an empty folder may be."""
        try:
            staging.rename(self.path)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise CheckpointError(f"another process wrote {self.path} in the meantime: save again") from error
        self.at("renamed-new")
        sync(self.path.parent)
        self.at("synced")

    def _put_back(self, old: Path) -> None:
        try:
            old.rename(self.path)
            sync(self.path.parent)
        except OSError as error:
            # Another reader did the same, or the saver's second rename came first.
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise CheckpointError(f"a save died; rename {old} to {self.path} to undo it ({error})") from error

    def _remnants(self) -> list[Remnant]:
        names = (entry.name for entry in scan(self.path.parent) if entry.is_dir(follow_symlinks=False))
        remnants = (remnant_of(name) for name in names)
        return [remnant for remnant in remnants if remnant is not None and remnant.target == self.path.name]


def unlock(lock: int) -> None:
    """Lets go of a staging folder. Closing alone would leave it locked by a forked child, such as a data loader's."""
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


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


def erase(path: Path) -> None:
    """Removes a folder that bears a staging name.

    What cannot be removed is left for the next sweep: some file systems keep files that are open elsewhere, and a save
    that is in its place has not failed.
    """
    shutil.rmtree(path, ignore_errors=True)


def sync(path: Path) -> None:
    """Brings a file, or a folder's list of names, to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems sync no folders
            raise
    finally:
        os.close(file)


def scan(folder: Path) -> list[os.DirEntry[str]]:
    """Lists a folder's entries; none if it is not there."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


@contextlib.contextmanager
def _claim(staging: Path) -> Iterator[bool]:
    """Keeps a staging folder locked; False if its saver lives. One that is not there has no living saver."""
    lock, dead = None, True
    with contextlib.suppress(FileNotFoundError):
        lock = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        with contextlib.suppress(OSError):  # a file system without such locks
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                dead = False
    try:
        yield dead
    finally:
        if lock is not None:
            os.close(lock)


def _changed(path: Path) -> int:
    """When a folder got its name, about; 0 if it is gone."""
    try:
        return path.lstat().st_ctime_ns
    except FileNotFoundError:
        return 0
