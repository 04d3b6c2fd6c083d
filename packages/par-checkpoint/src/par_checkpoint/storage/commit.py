"""How a save on a local disk, or one that all machines mount, takes the place of what was there.

A save gathers its files in a staging folder `.<name>.tmp-<nonce>` beside the target. When all of them, and the folder
itself, are on the disk, the commit is one of these:

- Nothing is there: the staging folder is renamed to the target. One rename; before it nothing, after it all.
- Linux exchanges the old folder and the new one in one step. The old folder then has the staging name.
- Elsewhere the old folder becomes `.<name>.old-<nonce>`, then the staging folder becomes the target. Between the two
  there is no target, and the old one is whole: `recover` gives it its name back.

So after any kill the target is the complete old or the complete new folder, or it is absent and a complete `.old-*`
exists. Nothing is ever removed under such a name. The folder is renamed to a staging name first. A staging name never
counts, so a half-removed folder is never read.

The saver holds a lease, `.<name>.lease-<nonce>`, from before there is a staging folder until it is gone (see `lease`):
what has no lease that is held has no living saver, and may be swept. If `recover` sees no target but a living saver, it
waits for the second rename.

Only savers rename. A reader that finds no target reads the old one where it is, and starts again should it vanish.

Other machines' savers commit at any moment, and what this one knows of names may be old by seconds. So what is there is
never removed because of a look alone: a rename finds out whether a name is taken, and a saver that is too late looks
again.

Symbolic links are never followed here.
"""

import contextlib
import ctypes
import errno
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from .._errors import CheckpointError
from .lease import Lease, holder_of, is_held
from .owned import Remnant, remnant_of

GONE = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
"""What systems say of a file that is not there, or that another machine has removed while it was open."""


UNREADABLE = (*GONE, errno.ELOOP, errno.EISDIR, errno.ENAMETOOLONG)
"""What systems say besides of a name under which there can be no file to read: links in a circle, folders."""


class OutrunError(CheckpointError):
    """Another saver was first: nothing of this one has been put in place."""


@dataclass(frozen=True, kw_only=True)
class CommitTarget:
    """The folder of a checkpoint, and the hidden folders of saves beside it.

    Args:
        path: The folder.
        at: Called with the name of each step of a commit.
        exchange: Whether to exchange folders in one step where the system can.
        patience: Seconds that a living saver gets between its two renames.
        lease: Seconds without a sign of life after which a saver of another machine is taken for dead.
    """

    path: Path
    at: Callable[[str], None]
    exchange: bool
    patience: float
    lease: float

    def begin(self, nonce: str) -> Lease:
        """Takes a lease, and makes a staging folder.

        Returns:
            The lease, to be released when the save has ended.
        """
        lease = Lease(self.beside("lease", nonce), self.lease)
        try:
            self.at("leased")
            self.beside("tmp", nonce).mkdir()
        except BaseException:
            lease.release()
            raise
        self.at("created")
        return lease

    def commit(self, nonce: str, *, replaces: bool) -> None:
        """Puts a staging folder whose files are on the disk in the target's place.

        Args:
            nonce: The save's.
            replaces: Whether an old checkpoint is there.

        Raises:
            OutrunError: Another process was first; what it wrote stays.
        """
        staging, old = self.beside("tmp", nonce), self.beside("old", nonce)
        for folder, _, _ in os.walk(staging):
            sync(Path(folder))
        self.at("synced-staging")
        if not replaces:
            self._move_in(staging)
        elif self._exchange(staging):
            self.at("exchanged")
            sync(self.path.parent)
            self.at("synced")
            erase(staging)  # the old one, by now
            self.at("removed")
        else:
            with self._others_may_be_first():
                self.path.rename(old)
            try:
                self.at("renamed-old")
                self._move_in(staging)
            except BaseException as error:
                if not self._put_back(old) and isinstance(error, OutrunError):
                    self.retire(old)
                raise
            self.retire(old)
            self.at("removed")

    def recover(self) -> None:
        """Gives an old checkpoint its name back, if a saver died between its two renames. Only savers call it.

        Raises:
            CheckpointError: A saver that lives does not go on, or the name cannot be given back.
        """
        deadline = time.monotonic() + self.patience
        self._look_anew()
        while (newest := self._newest_old()) is not None:
            lease = self.beside("lease", newest.nonce)
            if not is_held(lease, self.lease):
                self._put_back(self.beside("old", newest.nonce))
                return  # or the name is taken, whatever this machine still knows of it
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{holder_of(lease)} is replacing {self.path}, but does not end: see to it, or retry"
                )
            time.sleep(0.02)

    def seen(self) -> Path:
        """Return the folder to read: the target or, between a saver's two renames, the old folder."""
        newest = self._newest_old()
        return self.path if newest is None else self.beside("old", newest.nonce)

    def _newest_old(self) -> Remnant | None:
        """Return the old folder that the last saver has renamed, if no folder has the checkpoint's name."""
        if os.path.lexists(self.path):
            return None
        olds = [folder for folder in self._remnants() if folder.kind == "old"]
        return max(olds, key=lambda old: _changed(self.beside("old", old.nonce)), default=None)

    def sweep(self, *, dry_run: bool) -> list[str]:
        """Removes what dead saves left beside the target; returns the paths of folders."""
        swept = []
        if not dry_run:
            self._look_anew()
        for remnant in self._remnants():
            path, lease = self.beside(remnant.kind, remnant.nonce), self.beside("lease", remnant.nonce)
            # The target is looked at only then: a saver that lived while the old one was listed may be done.
            if is_held(lease, self.lease) or (remnant.kind == "old" and not os.path.lexists(self.path)):
                continue
            if remnant.kind == "old" and not dry_run and self._put_back(path):
                continue  # nothing has the name: what was seen under it is older than the last saver's death
            if not dry_run:
                (self.retire if remnant.kind == "old" else erase)(path)
            if dry_run or not os.path.lexists(path):
                swept.append(str(path))
        if not dry_run:
            left = {remnant.nonce for remnant in self._remnants()}
            for nonce in self._leases() - left:
                if not is_held(self.beside("lease", nonce), self.lease):
                    self.beside("lease", nonce).unlink(missing_ok=True)
        return swept

    def retire(self, path: Path) -> None:
        """Rename a complete folder, the target or an old one, to a name that is never read, and remove it."""
        trash = self.beside("tmp", uuid.uuid4().hex)
        with contextlib.suppress(FileNotFoundError):  # another process sweeps as well
            path.rename(trash)
            self.at("retired")
            erase(trash)

    def beside(self, kind: str, nonce: str) -> Path:
        """The path of a save's folder or lease beside the target; `kind` is "tmp", "old" or "lease"."""
        return self.path.with_name(Remnant(self.path.name, kind, nonce).name)

    def _exchange(self, staging: Path) -> bool:
        """Exchanges the staging folder and the target; False where that is not asked for, or the system cannot."""
        with self._others_may_be_first():
            return self.exchange and exchange(staging, self.path)

    def _move_in(self, staging: Path) -> None:
        """Renames the staging folder to the target, where nothing or an empty folder may be."""
        with self._others_may_be_first():
            staging.rename(self.path)
        self.at("renamed-new")
        sync(self.path.parent)
        self.at("synced")

    @contextlib.contextmanager
    def _others_may_be_first(self) -> Iterator[None]:
        """Raise OutrunError if a rename fails because another saver has changed the names."""
        try:
            yield
        except OSError as error:
            if error.errno not in (*GONE, *_TAKEN):
                raise
            raise OutrunError(f"another process wrote {self.path} in the meantime: save again") from error

    def _look_anew(self) -> None:
        """Has a network file system list the folder above as it is now, where this process may change it.

        NFS lists from memory for half a minute, unless a change of its own tells that others have changed it, too. The
        probe bears the name of a lease: should this process die here, it is swept as one.
        """
        probe = self.beside("lease", uuid.uuid4().hex)
        with contextlib.suppress(OSError):
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
            probe.unlink()

    def _put_back(self, old: Path) -> bool:
        """Gives an old checkpoint its name back; False where the name is taken, or where another saver did it."""
        try:
            old.rename(self.path)
        except OSError as error:
            if error.errno not in (*GONE, *_TAKEN):
                raise CheckpointError(f"a save died; rename {old} to {self.path} to undo it ({error})") from error
            return False
        sync(self.path.parent)
        return True

    def _remnants(self) -> list[Remnant]:
        names = (entry.name for entry in scan(self.path.parent) if entry.is_dir(follow_symlinks=False))
        remnants = (remnant_of(name) for name in names)
        return [remnant for remnant in remnants if remnant is not None and remnant.target == self.path.name]

    def _leases(self) -> set[str]:
        """The nonces of all leases beside the target."""
        prefix = f".{self.path.name}.lease-"
        return {entry.name.removeprefix(prefix) for entry in scan(self.path.parent) if entry.name.startswith(prefix)}


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

    Files that cannot be removed stay until the next sweep. Some file systems keep files that another process has open,
    and a save that is committed has not failed.
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
    except OSError as error:
        if error.errno not in UNREADABLE:
            raise
        return []


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder, or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # links in a circle
        return False


def _changed(path: Path) -> int:
    """When a folder got its name, about; 0 if it is gone."""
    try:
        return path.lstat().st_ctime_ns
    except OSError as error:
        if error.errno not in GONE:
            raise
        return 0


_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
"""What systems say where the new name of a folder is that of something else."""
