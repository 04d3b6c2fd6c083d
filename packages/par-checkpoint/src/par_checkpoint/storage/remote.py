"""Folders on object stores and other remote file systems, through fsspec, and how a save commits there.

Here nothing is renamed in one step: folders are copied and removed file by file. So a save writes down first what is to
become of the target, and then makes it so:

1. The new files are gathered in `.<name>.tmp-<nonce>/`. So far nobody reads them.
2. A mark is added to them, the last of all: that one small file is the commit.
3. The old files in the target are removed, the new ones copied there, the manifest last.
4. The mark is removed, then the rest of the staging folder.

Whoever reads takes a marked staging folder where there is one, else the target. Readers write nothing. Whoever saves
next does steps 3 and 4 anew for a marked folder that is still there, and removes those without a mark. So at any kill
the checkpoint is wholly the old, before the mark, or wholly the new, from the mark on. Removing a checkpoint is a save
of nothing.

There are no locks: of two savers to one path the last one wins, and the other one fails.
"""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from fsspec.core import url_to_fs  # type: ignore[import-untyped]

from .._errors import CheckpointError, CorruptError
from ..format.manifest import MANIFEST
from .owned import Remnant, carried, check_name, check_replaceable, parents, remnant_of

_BEGUN = "par_checkpoint.begun"
"""Shows all ranks the staging folder: object stores know no empty ones."""

_MARK = "par_checkpoint.mark"
"""Makes a staging folder the checkpoint."""


class RemoteFolder:
    """A folder of a file system that fsspec opens, see `Folder`.

    Args:
        url: The folder's URL.
        at: Called with the name of each step of a commit.
    """

    positional = False

    def __init__(self, url: str, *, at: Callable[[str], None]) -> None:
        scheme, _, rest = url.partition("://")
        self.url, self.at = f"{scheme}://{rest.rstrip('/')}", at
        fs, path = url_to_fs(url)
        self.fs: Any = fs
        self.path = str(path).rstrip("/")
        self._parent, _, self._name = self.path.rpartition("/")
        self._readable: str | None = None

    def recover(self) -> None:
        """Looks anew, at the next access, whether the target or a marked staging folder is the checkpoint."""
        self._readable = None

    def version(self) -> str | None:
        """A text that changes when the manifest is replaced; None where there is none."""
        path = f"{self._where()}/{MANIFEST}"
        self.fs.invalidate_cache()
        try:
            return f"{path} {self.fs.ukey(path)}"
        except FileNotFoundError:
            return None

    def exists(self) -> bool:
        """Whether there is any file."""
        return bool(self.files(self._where()))

    def sizes(self) -> dict[str, int]:
        """The bytes of every file in the folder and in its folder "optimizer"."""
        files = self.files(self._where())
        if not files:
            raise CheckpointError(f"there is no folder {self.url}: check the path")
        return {name: size for name, size in files.items() if "/" not in name or name.rpartition("/")[0] == "optimizer"}

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Bytes begin .. end - 1 of a file, by default all."""
        with contextlib.closing(self.open(name)) as source:
            data = bytearray((source.size if end is None else end) - begin)
            source.read_into(begin, memoryview(data))
        return bytes(data)

    def open(self, name: str) -> "RemoteSource":
        """A file to read from."""
        return RemoteSource(self.fs, f"{self._where()}/{check_name(name)}")

    def folders(self) -> list[str]:
        """The names of the folders in it."""
        return self._folders(self.path)

    def child(self, name: str) -> "RemoteFolder":
        """A folder in it."""
        return RemoteFolder(f"{self.url}/{check_name(name)}", at=self.at)

    def stage(self, nonce: str) -> "RemoteStaging":
        """A handle on the staging folder of a save; touches nothing."""
        if "/" not in self.path:
            raise ValueError(f"{self.url!r} has nothing above it to put files aside: save to a folder below it")
        return RemoteStaging(self, nonce)

    def check_target(self, *, overwrite: bool) -> None:
        """Raises if what is there now must not be replaced."""
        where = self._where()
        names = self.files(where)
        if names and not overwrite:
            raise FileExistsError(f"{self.url!r} exists; pass overwrite=True to replace it, or choose another path")
        check_replaceable(self.url, names, self.fs.cat_file(f"{where}/{MANIFEST}") if MANIFEST in names else None)

    def remove(self) -> None:
        """Removes the checkpoint: puts nothing in its place."""
        self._finish_commits()
        self.commit(self.beside("removed"))

    def sweep(self, *, dry_run: bool = False) -> list[str]:
        """Ends the commits of savers that died on the way, and removes what others left; returns what it removed."""
        if not dry_run:
            self._finish_commits()
        marked = set(self._marked())
        swept = [path for path in self._stagings() if path not in marked]
        for path in () if dry_run else swept:
            self.clear(path, first=_MARK)
        return swept

    def beside(self, nonce: str) -> str:
        """The path of a save's staging folder."""
        return f"{self._parent}/{Remnant(self._name, 'tmp', nonce).name}"

    def files(self, folder: str) -> dict[str, int]:
        """The bytes of all files in a folder, however deep, by name; marks are none of them."""
        self.fs.invalidate_cache()
        listed = self.fs.find(folder, detail=True)
        sizes = {path.removeprefix(folder).lstrip("/"): int(info["size"]) for path, info in listed.items()}
        return {name: size for name, size in sizes.items() if name not in (_BEGUN, _MARK)}

    def commit(self, staging: str) -> None:
        """Makes a staging folder the checkpoint, steps 2 to 4: from the mark on it is the one that is read."""
        self.make(staging, ())
        self.fs.pipe_file(f"{staging}/{_MARK}", b"whole")
        self.at("marked")
        self._install(staging)

    def copy(self, names: Iterable[str], source: str, into: str) -> None:
        """Copies files between folders."""
        for name in names:
            self.make(into, [name])
            self.fs.cp_file(f"{source}/{name}", f"{into}/{name}")

    def make(self, folder: str, names: Iterable[str]) -> None:
        """Makes the folders for files of these names, where there are such things as folders."""
        for path in [folder, *(f"{folder}/{parent}" for parent in parents(names))]:
            self.fs.makedirs(path, exist_ok=True)

    def clear(self, folder: str, *, first: str) -> None:
        """Removes a folder, beginning with the file that makes it count."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(f"{folder}/{first}")
        self.fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(folder, recursive=True)

    def _install(self, staging: str) -> None:
        """Steps 3 and 4, which may be done again from their beginning."""
        names = sorted(self.files(staging), key=lambda name: name == MANIFEST)
        self.clear(self.path, first=MANIFEST)
        self.at("cleared")
        for name in names:
            self.copy([name], staging, self.path)
            self.at(f"copied {name}")
        self.clear(staging, first=_MARK)
        self.recover()
        self.at("removed")

    def _finish_commits(self) -> None:
        for staging in self._marked()[:1]:
            self._install(staging)

    def _where(self) -> str:
        """The folder to read: a marked staging folder, else the target."""
        if self._readable is None:
            self._readable = next(iter(self._marked()), self.path)
        return self._readable

    def _marked(self) -> list[str]:
        return [staging for staging in self._stagings() if self.fs.exists(f"{staging}/{_MARK}")]

    def _stagings(self) -> list[str]:
        """The paths of the staging folders of saves to this folder."""
        remnants = (remnant_of(name) for name in self._folders(self._parent))
        return [
            self.beside(each.nonce) for each in remnants if each and (each.target, each.kind) == (self._name, "tmp")
        ]

    def _folders(self, path: str) -> list[str]:
        self.fs.invalidate_cache()
        try:
            entries = self.fs.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = (entry["name"].rstrip("/") for entry in entries if entry["type"] == "directory")
        return sorted(name.rpartition("/")[2] for name in names)


class RemoteStaging:
    """A save under way, see `Staging`."""

    positional = False

    def __init__(self, folder: RemoteFolder, nonce: str) -> None:
        self._folder, self._path = folder, folder.beside(nonce)

    def create(self, names: Iterable[str], needed: int) -> None:
        """Sweeps, and makes the staging folder."""
        del needed  # nobody tells how much is free
        self._folder.sweep()
        self._folder.at("swept")
        self._folder.make(self._path, names)
        self._folder.fs.pipe_file(f"{self._path}/{_BEGUN}", b"begun")
        self._folder.at("made")

    def attach(self) -> None:
        """Raises CheckpointError if the staging folder is not visible here."""
        if not self._folder.fs.exists(f"{self._path}/{_BEGUN}"):
            raise CheckpointError(f"{self._path} is not visible on this rank: use a file system that all ranks share")

    def allocate(self, name: str, size: int) -> None:
        """Raises TypeError: files are streams here."""
        raise TypeError(f"{name} of {size} bytes: {self._folder.url} is written from beginning to end, by one rank")

    def write(self, name: str, data: bytes) -> None:
        """Writes a small file."""
        self._folder.make(self._path, [name])
        self._folder.fs.pipe_file(f"{self._path}/{name}", data)

    def writer(self, name: str) -> "RemoteWriter":
        """A file to stream into."""
        return RemoteWriter(self._folder.fs, f"{self._path}/{check_name(name)}")

    def publish(self, *, overwrite: bool) -> None:
        """Commits."""
        folder = self._folder
        old = folder.files(folder.path)
        if old and not overwrite:
            raise CheckpointError(f"another process wrote {folder.url} in the meantime: save to another path")
        folder.check_target(overwrite=overwrite)
        folder.copy(carried(old, folder.files(self._path)), folder.path, self._path)
        folder.at("carried")
        folder.commit(self._path)

    def discard(self) -> None:
        """Removes the staging folder, unless it is the checkpoint by now: then the next save does what is left."""
        if not self._folder.fs.exists(f"{self._path}/{_MARK}"):
            self._folder.clear(self._path, first=_BEGUN)

    def close(self) -> None:
        """Nothing is open."""


class RemoteSource:
    """A file that is being read, see `Source`."""

    stride = 1 << 30  # each reading is a request

    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._path = fs, path
        try:
            self.size = int(fs.size(path))
        except FileNotFoundError as error:
            raise CorruptError(f"{path} is missing: restore it, or load another checkpoint") from error

    def read_into(self, begin: int, view: memoryview) -> None:
        """Fills the view with the bytes from `begin` on."""
        end = begin + len(view)
        if end > self.size:
            raise CorruptError(f"{self._path} ends at byte {self.size}, but bytes to {end} are asked for: truncated?")
        if begin < end:
            view[:] = self._fs.cat_file(self._path, start=begin, end=end)

    def close(self) -> None:
        """Nothing is open."""


class RemoteWriter:
    """A file that is streamed from beginning to end, see `Writer`."""

    def __init__(self, fs: Any, path: str) -> None:
        self._path, self._end = path, 0
        self._file: Any = fs.open(path, "wb")

    def write_at(self, begin: int, view: memoryview) -> None:
        """Writes the view at byte `begin`, which must be the current end."""
        if begin != self._end:
            raise ValueError(f"{self._path} is written from beginning to end: byte {begin} cannot follow {self._end}")
        self._file.write(view)
        self._end += len(view)

    def finish(self) -> None:
        """Closes the file, which uploads what is left."""
        file, self._file = self._file, None
        file.close()

    def abort(self) -> None:
        """Closes the file without caring for its bytes; after `finish` it does nothing."""
        if self._file is not None:
            with contextlib.suppress(Exception):  # what made the caller give up is the error to tell
                self.finish()
