"""Folders on a local file system, or on one that all machines mount. Links are followed only for reading."""

import contextlib
import ctypes
import os
import shutil
import stat
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from .._errors import CheckpointError, CorruptError
from ..format.manifest import BLOCK, GENERATION, MANIFEST, OPTIMIZER, TEMPLATES, Manifest, generation_in
from .commit import GONE, UNREADABLE, CommitTarget, OutrunError, erase, files_in, is_folder, link_or_copy, scan
from .owned import carried, check_name, check_replaceable, parents
from .sharing import Sharing, sharing_of

if TYPE_CHECKING:
    from .lease import Lease


class LocalFolder:
    """A folder of a local disk, see `Folder`.

    Args:
        path: The folder; a symbolic link at its end is not resolved.
        at: Called with the name of each step of a commit.
        exchange: Whether to exchange folders in one step where the system can.
        patience: Seconds that a living saver gets between its two renames, and a shared file system to show a folder.
        lease: Seconds without a sign of life after which a saver of another machine is taken for dead.
    """

    positional = True
    cached = True
    in_flight = 0
    stages_beside = True
    dangling: Collection[str] = ()
    """Names of links to files that are missing, as of the last look at sizes."""

    def __init__(
        self,
        path: str,
        *,
        at: Callable[[str], None],
        exchange: bool = True,
        patience: float = 10.0,
        lease: float = 60.0,
    ) -> None:
        self.path = Path(os.path.abspath(path))  # noqa: PTH100 - resolves '..', but no links
        if not self.path.name:
            raise ValueError(f"{path!r} has no name: give a folder below it")
        # Several ranks write one file, each at its own offset. Windows has no calls for that, so a path is refused here
        # rather than in the middle of a save. Object stores need no local folder.
        if not hasattr(os, "pwrite"):
            raise CheckpointError(f"path={path!r}: local checkpoints need Linux or macOS; use WSL, or an object store")
        self.url = str(self.path)
        self.target = CommitTarget(path=self.path, at=at, exchange=exchange, patience=patience, lease=lease)
        self._seen = self.path
        self._generation: str | None = None

    @property
    def sharing(self) -> Sharing:
        """Ways in which several clients may write one file."""
        return sharing_of(self.path.parent)

    @property
    def settles(self) -> float:
        """Seconds until a change by another machine is usually visible; 0 if it is visible at once."""
        return _SETTLES if self.sharing is Sharing.FILES else 0.0

    def block(self, size: int) -> int:
        """Return the bytes of a block, which do not depend on the file's size here."""
        del size
        return BLOCK

    def recover(self) -> None:
        """Find the folder to read, even if a saver died between its two renames. This renames no folder."""
        self._seen, self._generation = self.target.seen(), None

    def repair(self) -> None:
        """Rename the old checkpoint back to the target if a saver died between its two renames."""
        self.target.recover()
        self._seen, self._generation = self.path, None

    def use(self, manifest: Manifest | None) -> None:
        """Find the folder again after a commit, and read files from the subfolder that the manifest names."""
        self.recover()
        self._generation = "" if manifest is None else manifest.generation

    def version(self) -> str | None:
        """Return a text that changes when the manifest is replaced or moved; None without a manifest."""
        try:
            # A network file system answers `stat` from its cache, but compares a file with the server on each open.
            file = os.open(self._seen / MANIFEST, os.O_RDONLY)
            try:
                status = os.fstat(file)
            finally:
                os.close(file)
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise
            return None
        return f"{self._seen.name}:{status.st_dev}:{status.st_ino}:{status.st_mtime_ns}"

    def exists(self) -> bool:
        """Return whether the path exists. An empty folder counts as missing."""
        if not self._is_there() or self._seen.is_symlink():
            return os.path.lexists(self._seen)
        return bool(scan(self._seen))

    def _is_there(self) -> bool:
        """Return whether the path is a folder or a link to one. A name that is too long is neither."""
        try:
            return self._seen.is_dir()
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise
            return False

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every file in the folder and in a checkpoint's subfolders."""
        if not self._is_there():
            if os.path.lexists(self._seen):
                raise CheckpointError(f"path={self.url!r}: this is a file; pass its folder, {str(self.path.parent)!r}")
            raise CheckpointError(f"there is no folder {self.url}: check the path")
        sizes: dict[str, int] = {}
        dangling: set[str] = set()
        # After a copy from an object store, the files are in a generation, and the manifest is above it.
        for top in dict.fromkeys((self._seen, self._where())):
            for folder in ("", OPTIMIZER, TEMPLATES):
                for entry in scan(top / folder):
                    if is_folder(entry):
                        continue
                    name, size = f"{folder}{entry.name}", _size(entry)
                    if size is None:
                        dangling.add(name)
                    else:
                        sizes[name] = size
        self.dangling = dangling
        return sizes

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return bytes begin .. end - 1 of a file; by default all bytes."""
        with contextlib.closing(self.open(name)) as source:
            data = bytearray((source.size if end is None else end) - begin)
            source.read_into(begin, memoryview(data))
        return bytes(data)

    def open(self, name: str) -> "LocalSource":
        """Open a file for reading."""
        inside = self._where() / check_name(name)
        return LocalSource(inside if name != MANIFEST and inside.exists() else self._seen / name)

    def _where(self) -> Path:
        """Return the folder of the files, which is a generation in this folder after a copy from an object store."""
        if self._generation is None:
            self._generation = ""
            if any(GENERATION.fullmatch(entry.name) for entry in scan(self._seen)):
                with contextlib.suppress(FileNotFoundError):
                    self._generation = generation_in((self._seen / MANIFEST).read_bytes()) or ""
        return self._seen / self._generation

    def folders(self) -> list[str]:
        """Return the names of the subfolders."""
        return sorted(entry.name for entry in scan(self.path) if is_folder(entry))

    def child(self, name: str) -> "LocalFolder":
        """Return a subfolder."""
        path, own = str(self.path / check_name(name)), self.target
        return LocalFolder(path, at=own.at, exchange=own.exchange, patience=own.patience, lease=own.lease)

    def stage(self, nonce: str, *, by_owner: bool = False) -> "LocalStaging":
        """Return a handle on the staging folder of a save, without creating the folder."""
        del by_owner  # every rank can write any bytes of a local file, so it does not matter which rank writes a file
        return LocalStaging(self, nonce)

    def check_replaceable_here(self) -> None:
        """Raise CheckpointError if the folder is this process's working directory, or if its name is too long.

        A save replaces the folder, which would leave the process in a removed working directory. The hidden names of a
        save are longer than the folder's own name.
        """
        with contextlib.suppress(FileNotFoundError):  # another process may have removed the working directory already
            here, own = Path.cwd(), Path(os.path.realpath(self.path))
            if own == here or own in here.parents:
                raise CheckpointError(
                    f"path={self.url!r}: this process works in {str(here)!r}, and a save puts another folder in the "
                    "place of its path; pass a folder below it, such as './checkpoint'"
                )
        longest = len(os.fsencode(self.target.beside("lease", "0" * 12).name))
        if longest > _NAME:
            raise CheckpointError(
                f"path={self.url!r}: its last name has {len(os.fsencode(self.path.name))} bytes, and a save needs "
                f"{longest - len(os.fsencode(self.path.name))} more of {_NAME} beside it; pass a shorter name"
            )

    def check_target(self, *, overwrite: bool) -> None:
        """Raise if the path exists and must not be replaced."""
        self.check_replaceable_here()
        if self.path.is_mount():
            raise CheckpointError(f"{self.url} is a mount point and cannot be swapped: save to a folder below it")
        deadline = time.monotonic() + self.target.patience
        while True:
            try:
                if self.exists():
                    self._check_replaceable(overwrite=overwrite)
            except (CorruptError, FileNotFoundError):
                # Another saver may be replacing the checkpoint between two of the reads. Such an error disappears, and
                # only a checkpoint that stays broken is reported.
                if time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE)
                self.repair()
            else:
                return

    def _check_replaceable(self, *, overwrite: bool) -> None:
        """Raise if the existing path must not be replaced."""
        if not overwrite:
            raise FileExistsError(f"{self.url!r} exists; pass overwrite=True to replace it, or choose another path")
        if not stat.S_ISDIR(self.path.lstat().st_mode):
            raise CheckpointError(f"{self.url} is a link or a file, which is never replaced: save to another path")
        names = self.files()
        check_replaceable(self.url, names, self.read(MANIFEST) if MANIFEST in names else None)

    def remove(self) -> None:
        """Remove the checkpoint. After a kill at any moment it is either complete or gone."""
        if self.path.is_symlink():
            raise CheckpointError(f"{self.url} is a symbolic link, which is never followed: remove it by hand")
        self.target.retire(self.path)

    def sweep(self, *, dry_run: bool = False) -> list[str]:
        """Remove the remnants of dead saves next to the folder, and return their paths."""
        return self.target.sweep(dry_run=dry_run)

    def files(self) -> list[str]:
        """Return the names of all files at any depth. Links count as files and are not followed."""
        return files_in(self.path)


class LocalStaging:
    """A save under way, see `Staging`."""

    positional = True
    joins = False
    generation = ""

    def __init__(self, folder: LocalFolder, nonce: str) -> None:
        self._folder, self._nonce = folder, nonce
        self._path = folder.target.beside("tmp", nonce)
        self._lease: Lease | None = None
        self._carried: list[str] = []

    def create(self, names: Iterable[str], needed: int) -> None:
        """Remove remnants, check the free space, and create the staging folder and its lease."""
        parent, target = self._folder.path.parent, self._folder.target
        parent.mkdir(parents=True, exist_ok=True)
        # Remnants of dead saves go before the free space is measured. After a crash in a full folder they may occupy
        # the space that this save needs.
        self._folder.repair()
        target.sweep(dry_run=False)
        target.at("swept")
        free = shutil.disk_usage(parent).free
        if needed > free:
            raise CheckpointError(f"{needed:,} bytes are needed in {parent}, {free:,} are free: free some space")
        self._lease = target.begin(self._nonce)
        for name in parents(names):
            (self._path / name).mkdir()
        target.at("made")

    def invite(self) -> None:
        """Return None, because the path is all that the other ranks need."""

    def complete(self, share: tuple[int, int]) -> None:
        """Do nothing: a local file is complete when all of its bytes are written."""

    def attach(self, invitation: None = None) -> None:
        """Raise CheckpointError if the staging folder does not become visible here within some seconds."""
        del invitation
        deadline = time.monotonic() + self._folder.target.patience
        while not self._path.is_dir():
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{self._path} is not visible on this rank: use a file system that all ranks share"
                )
            time.sleep(0.05)
            scan(self._path.parent)  # a network file system may refresh its cached names only when a folder is listed

    def allocate(self, name: str, size: int, *, head: int = 0, block: int = BLOCK) -> None:
        """Create a file of a given size, into which all ranks write at any offset."""
        del head, block
        with contextlib.closing(self.writer(name)) as writer:
            writer.resize(size)

    def write(self, name: str, data: bytes) -> None:
        """Write a small file."""
        for parent in parents([name]):
            (self._path / parent).mkdir(exist_ok=True)
        with contextlib.closing(self.writer(name)) as writer:
            writer.resize(0)
            writer.write_at(0, memoryview(data))
            writer.finish()

    def writer(self, name: str) -> "LocalWriter":
        """Open a file for writing."""
        return LocalWriter(self._path / check_name(name))

    def publish(self, *, overwrite: bool, index: tuple[str, bytes] | None = None) -> None:
        """Keep the old checkpoint's config, tokenizer and similar files, and commit. Retry after another saver."""
        del index  # the files are where transformers looks for them, so they need no second index
        folder, deadline = self._folder, time.monotonic() + self._folder.target.patience
        while True:
            # A process that was stopped for minutes may have lost its lease. Its staging folder may then be half swept,
            # so the lease is checked right before each attempt to commit.
            if self._lease is not None:
                self._lease.check()
            folder.repair()
            replaces = folder.exists()
            if replaces and not overwrite:
                raise CheckpointError(f"another process wrote {folder.url} in the meantime: save to another path")
            folder.check_target(overwrite=overwrite)
            try:
                if replaces:
                    self._carry()
                folder.target.commit(self._nonce, replaces=replaces)
            except OutrunError:
                if not overwrite or time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE)
            else:
                break
        self.close()

    def _carry(self) -> None:
        """Link or copy config, tokenizer and similar files of the old checkpoint into the staging folder.

        Raises:
            OutrunError: Another saver is replacing the old checkpoint.
        """
        folder = self._folder
        # An earlier attempt has linked files of a checkpoint that another saver has replaced since then. The new one
        # may not have them.
        for name in self._carried:
            (self._path / name).unlink(missing_ok=True)
        self._carried = carried(folder.files(), files_in(self._path))
        for name in self._carried:
            old, new = folder.path / name, self._path / name
            new.parent.mkdir(exist_ok=True)
            try:
                link_or_copy(old, new)
            except FileNotFoundError as error:
                raise OutrunError(f"another process replaces {folder.url}: save again") from error
        folder.target.at("linked")

    def discard(self) -> None:
        """Remove the staging folder in any state."""
        erase(self._path)
        self.close()

    def close(self) -> None:
        """End the lease without removing the staging folder. A second call does nothing."""
        if self._lease is not None:
            self._lease.release()
            self._lease = None


class LocalSource:
    """A file that is being read, see `FileSource`. Several threads may read it concurrently."""

    # 2 MiB mostly stay in a core's cache until the checksum reads them again. Smaller reads would switch between
    # threads more often.
    stride = 1 << 21
    _fd = -1

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDONLY)
            self.size = os.fstat(self._fd).st_size
        except OSError as error:
            self.close()
            if error.errno not in UNREADABLE:
                raise
            raise CorruptError(f"{path} is missing: restore it, or load another checkpoint") from error

    def read_into(self, begin: int, view: memoryview) -> None:
        """Fill the view with the bytes from `begin` on."""
        while len(view):
            try:
                count = os.preadv(self._fd, [view], begin)
            except OSError as error:
                if error.errno not in GONE:
                    raise
                raise CorruptError(f"{self._path} was removed while it was read: load another checkpoint") from error
            if count == 0:
                raise CorruptError(f"{self._path} ends at byte {self.size}, but byte {begin} is asked for: truncated?")
            begin, view = begin + count, view[count:]

    def ranged(self, begin: int, end: int) -> "LocalSource":
        """Open the file once more."""
        del begin, end
        return LocalSource(self._path)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LocalWriter:
    """A file that is being written, see `Writer`. Several threads and ranks may write it concurrently.

    On Linux, the kernel starts to write the bytes to the disk immediately and drops them from the page cache
    afterwards. So `fsync` has little left to write, a save needs few new pages, and the files of other processes stay
    cached.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        self._sync_range = _sync_file_range()
        self._under_way: deque[tuple[int, int]] = deque()  # first byte and bytes of large writes

    def write_at(self, begin: int, view: memoryview) -> None:
        """Write all bytes of the view at byte `begin`."""
        at, left = begin, view
        while len(left):
            count = os.pwrite(self._fd, left, at)
            at, left = at + count, left[count:]
        if self._sync_range is None or len(view) < _WORTH:
            return
        # `sync_file_range` only speeds up the later `fsync`, which reports every error. So its result is ignored.
        self._sync_range(self._fd, begin, len(view), _WRITE)
        self._under_way.append((begin, len(view)))
        if len(self._under_way) > _UNDER_WAY:
            # The kernel drops only pages that are already on the disk. Waiting for the oldest write costs little,
            # because 16 newer ones were started after it.
            begin, size = self._under_way.popleft()
            self._sync_range(self._fd, begin, size, _WAIT_BEFORE)
            os.posix_fadvise(self._fd, begin, size, os.POSIX_FADV_DONTNEED)

    def resize(self, size: int) -> None:
        """Set the size of the file in bytes. New bytes are zero."""
        os.ftruncate(self._fd, size)

    def finish(self) -> None:
        """Flush the bytes to the disk, and close the file."""
        try:
            # The commit renames the folder later. The rename may reach the disk before unsynced bytes would, and a
            # power failure would then leave a committed checkpoint with zeros in it.
            os.fsync(self._fd)
        finally:
            self.close()

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    abort = close


_PAUSE = 0.02
"""Seconds until a saver checks again whether another saver has finished."""
_SETTLES = 3.5
"""Seconds until names and sizes are fresh: by default FUSE caches them for 1 s, and NFS for 3 s or more."""
_WORTH = 1 << 20
"""Bytes of a write from which on `sync_file_range` costs less than it saves."""
_UNDER_WAY = 16
"""Number of such writes to one file that may be in flight. The next write waits for the oldest."""
_NAME = 255
"""Bytes that a name may have on the file systems of Linux, macOS and Windows."""
_WAIT_BEFORE, _WRITE = 1, 2
"""Flags of Linux' sync_file_range."""


def _sync_file_range() -> Callable[[int, int, int, int], object] | None:
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call


def _size(entry: os.DirEntry[str]) -> int | None:
    """Return the bytes of a file, or None for a link whose target is missing, such as an evicted cache blob."""
    try:
        return entry.stat().st_size
    except OSError as error:
        if error.errno not in UNREADABLE:
            raise
        if entry.is_symlink():
            return None
        raise CorruptError(f"{entry.path} is gone: load again") from error
