"""The commit of a save on a local or shared file system: how the new folder replaces the old one.

A save writes its files into a staging folder `.<name>.tmp-<nonce>` next to the target. When all files and the folder
itself are on the disk, the commit is one of these:

- Without an old checkpoint, the staging folder is renamed to the target. Before the rename there is no checkpoint, and
  after it the checkpoint is complete.
- Linux exchanges the old folder and the new one in one step. The old folder then has the staging name.
- On other systems the old folder becomes `.<name>.old-<nonce>`, and then the staging folder becomes the target. Between
  the two renames no folder has the target's name, and the old checkpoint is complete. `recover` restores its name.

So after any kill the target is the complete old or the complete new folder, or it is absent and a complete `.old-*`
exists. Nothing is ever removed under such a name. The folder is renamed to a staging name first. A staging name never
counts, so a half-removed folder is never read.

The saver holds a lease, `.<name>.lease-<nonce>`, from before it creates the staging folder until the folder is gone
(see `lease`). A folder without a held lease has no living saver, and may be swept. If `recover` finds no target but a
living saver, it waits for the second rename.

Only savers rename. A reader that finds no target reads the old folder under its `.old-*` name. If that folder
disappears, the reader starts again.

Savers on other machines commit at any moment, and a list of names may be old by seconds. So no folder is removed only
because of a list. A rename finds out whether a name is taken, and a saver that is too late lists the names again.

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
"""Error numbers for a file that does not exist, or that another machine has removed while it was open."""


UNREADABLE = (*GONE, errno.ELOOP, errno.EISDIR, errno.ENAMETOOLONG)
"""Error numbers for a name that cannot be read as a file, such as links in a circle and folders."""


class OutrunError(CheckpointError):
    """Another saver committed first. The target has no file of this save."""


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
        """Take a lease and create a staging folder.

        Returns:
            The lease. The caller releases it when the save has ended.
        """
        # The lease comes first. Another saver that sweeps at this moment removes any staging folder without a lease.
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
        """Replace the target with a staging folder whose files are on the disk.

        Args:
            nonce: Nonce of the save.
            replaces: Whether an old checkpoint exists.

        Raises:
            OutrunError: Another process committed first. Its checkpoint stays.
        """
        staging, old = self.beside("tmp", nonce), self.beside("old", nonce)
        # The writers have synced the content of the files, and a folder's list of names is synced separately. Without
        # this, a power failure after the rename could leave a target in which some files are missing.
        for folder, _, _ in os.walk(staging):
            sync(Path(folder))
        self.at("synced-staging")
        if not replaces:
            self._move_in(staging)
        elif self._exchange(staging):
            self.at("exchanged")
            # The old checkpoint is erased only after the exchange is on the disk. In the other order, a power failure
            # could undo the exchange and leave the target's name with a folder that is half erased.
            sync(self.path.parent)
            self.at("synced")
            erase(staging)  # the old checkpoint has the staging name since the exchange
            self.at("removed")
        else:
            with self._others_may_be_first():
                self.path.rename(old)
            try:
                self.at("renamed-old")
                self._move_in(staging)
            except BaseException as error:
                # The old checkpoint goes back first, because until then readers find none under the target's name. If
                # another saver has taken the name, its checkpoint is the newer one, and the old one can go.
                if not self._put_back(old) and isinstance(error, OutrunError):
                    self.retire(old)
                raise
            # `_move_in` has synced the parent folder, so the new checkpoint survives a power failure from here on.
            self.retire(old)
            self.at("removed")

    def recover(self) -> None:
        """Rename an old checkpoint back to the target if its saver died between the two renames. Only savers call it.

        Raises:
            CheckpointError: A living saver does not finish, or the rename fails.
        """
        deadline = time.monotonic() + self.patience
        self._look_anew()
        while (newest := self._newest_old()) is not None:
            lease = self.beside("lease", newest.nonce)
            if not is_held(lease, self.lease):
                self._put_back(self.beside("old", newest.nonce))
                # Whether the rename succeeded does not matter. If it failed, another saver has taken the name, even if
                # this machine's cached list of names does not show it yet.
                return
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
        """Remove the folders and leases of dead saves next to the target, and return the paths of the folders."""
        swept = []
        if not dry_run:
            self._look_anew()
        for remnant in self._remnants():
            path, lease = self.beside(remnant.kind, remnant.nonce), self.beside("lease", remnant.nonce)
            # The target is checked after the lease. A saver that was alive when its old folder was listed may have
            # finished its second rename since then.
            if is_held(lease, self.lease) or (remnant.kind == "old" and not os.path.lexists(self.path)):
                continue
            # An old folder may hold the only complete checkpoint, and a network file system may still list a target
            # that no longer exists. Only a rename that fails proves that the target's name is taken.
            if remnant.kind == "old" and not dry_run and self._put_back(path):
                continue
            if not dry_run:
                (self.retire if remnant.kind == "old" else erase)(path)
            if dry_run or not os.path.lexists(path):
                swept.append(str(path))
        if not dry_run:
            # A lease goes only after all folders of its save. As long as one of them remains, a later sweep needs the
            # lease to find out that the saver is dead.
            left = {remnant.nonce for remnant in self._remnants()}
            prefix = f".{self.path.name}.lease-"
            names = (entry.name for entry in scan(self.path.parent))
            for nonce in {name.removeprefix(prefix) for name in names if name.startswith(prefix)} - left:
                if not is_held(self.beside("lease", nonce), self.lease):
                    self.beside("lease", nonce).unlink(missing_ok=True)
        return swept

    def retire(self, path: Path) -> None:
        """Rename a complete folder, the target or an old one, to a name that is never read, and remove it."""
        # Removing files takes time. A crash in the middle must not leave half a checkpoint under a name that readers
        # trust, so the folder loses that name first, in one step.
        trash = self.beside("tmp", uuid.uuid4().hex)
        with contextlib.suppress(FileNotFoundError):  # another process sweeps as well
            path.rename(trash)
            self.at("retired")
            erase(trash)

    def beside(self, kind: str, nonce: str) -> Path:
        """Return the path of a save's folder or lease next to the target; `kind` is "tmp", "old" or "lease"."""
        return self.path.with_name(Remnant(self.path.name, kind, nonce).name)

    def _exchange(self, staging: Path) -> bool:
        """Exchange the staging folder and the target; return False if the caller or the system does not allow it."""
        with self._others_may_be_first():
            return self.exchange and exchange(staging, self.path)

    def _move_in(self, staging: Path) -> None:
        """Rename the staging folder to the target. No folder, or an empty one, may have the target's name."""
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
        """Make a network file system refresh its list of the parent folder, if this process may write there.

        NFS may list a folder from its cache for half a minute. A change by this machine makes it compare the folder
        with the server.
        """
        # The probe has the name of a lease. If this process dies before `unlink`, a later sweep removes the probe.
        probe = self.beside("lease", uuid.uuid4().hex)
        with contextlib.suppress(OSError):
            os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
            probe.unlink()

    def _put_back(self, old: Path) -> bool:
        """Rename an old checkpoint to the target; return False if the name is taken or another saver has done it."""
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


def exchange(one: Path, other: Path) -> bool:
    """Exchange the names of two folders in one step; return False if the system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    here, both = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    rename.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint)
    if rename(here, os.fsencode(one), here, os.fsencode(other), both) == 0:
        return True
    number = ctypes.get_errno()
    # EINVAL and ENOTSUP are file systems that cannot exchange, ENOSYS is an old kernel, and EPERM is the system call
    # filter of a container. In all of these cases two separate renames still work.
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))


def erase(path: Path) -> None:
    """Remove a folder that has a staging name. Files that cannot be removed stay until the next sweep."""
    # Some file systems keep files that another process has open. The save is already committed, so such a file must
    # not make it fail.
    shutil.rmtree(path, ignore_errors=True)


def sync(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as error:
        # Some network file systems do not sync folders, because their server has already stored each rename.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(file)


def link_or_copy(old: Path, new: Path) -> None:
    """Create a hard link to a file, or copy the file if the file system refuses links."""
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:  # some file systems have no links, and Linux may refuse links to another user's file
        shutil.copy2(old, new, follow_symlinks=False)
        if not new.is_symlink():
            sync(new)


def scan(folder: Path) -> list[os.DirEntry[str]]:
    """Return a folder's entries, or an empty list if the folder does not exist."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        if error.errno not in UNREADABLE:
            raise
        return []


def files_in(folder: Path) -> list[str]:
    """Return the names of all files in a folder at any depth. Links count as files and are not followed."""
    names = []
    for top, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(top) / name).is_symlink()]
        names += [str((Path(top) / name).relative_to(folder)) for name in files + links]
    return names


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder, or a link to a folder."""
    try:
        return entry.is_dir()
    except OSError:  # links in a circle
        return False


def _changed(path: Path) -> int:
    """Return the time of a folder's last rename in nanoseconds, approximately, or 0 if the folder is gone."""
    try:
        return path.lstat().st_ctime_ns
    except OSError as error:
        if error.errno not in GONE:
            raise
        return 0


_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
"""Error numbers for a rename to a name that is taken."""
