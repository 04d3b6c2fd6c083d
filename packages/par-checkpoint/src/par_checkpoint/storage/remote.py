"""Folders on object stores and other remote file systems, through fsspec.

Here nothing is renamed in one step: folders are copied and removed file by file. So a save makes its way like this, and
at any kill the old or the new is whole and known to be:

1. The new files are gathered in `.<name>.tmp-<nonce>/`, which is never read.
2. The old files, or none if nothing is there, are copied to `.<name>.old-<nonce>/`, and a mark is added as the last.
   Without its mark that folder does not count.
3. The old files in the target are removed, the new ones moved in, the manifest last.
4. The mark is removed, then the rest of both folders.

Who reads takes the target, unless it has no sound manifest and a marked `.old-*` is beside it: then that, and as it is
a copy that nobody changes, a reader never writes. Who saves puts the marked one back first.

There are no locks: of two savers to one path the last one wins, and the other one fails.
"""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

from fsspec.core import url_to_fs  # type: ignore[import-untyped]

from .._errors import CheckpointError, CorruptError
from ..format.manifest import MANIFEST, decode_manifest
from .owned import Remnant, carried, check_name, check_replaceable, parents, remnant_of

_MARK = "par_checkpoint.mark"


class RemoteFolder:
    """See `Folder`.

    Args:
        url: The folder.
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
        self._readable = None

    def version(self) -> str | None:
        path = f"{self._where()}/{MANIFEST}"
        self.fs.invalidate_cache()
        try:
            return f"{path} {self.fs.ukey(path)}"
        except FileNotFoundError:
            return None

    def exists(self) -> bool:
        return bool(self.files(self._where()))

    def sizes(self) -> dict[str, int]:
        files = self.files(self._where())
        if not files:
            raise CheckpointError(f"there is no folder {self.url}: check the path")
        return {name: size for name, size in files.items() if "/" not in name or name.rpartition("/")[0] == "optimizer"}

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        with contextlib.closing(self.open(name)) as source:
            data = bytearray((source.size if end is None else end) - begin)
            source.read_into(begin, memoryview(data))
        return bytes(data)

    def open(self, name: str) -> "RemoteSource":
        return RemoteSource(self.fs, f"{self._where()}/{check_name(name)}")

    def folders(self) -> list[str]:
        return self._folders(self.path)

    def child(self, name: str) -> "RemoteFolder":
        return RemoteFolder(f"{self.url}/{check_name(name)}", at=self.at)

    def stage(self, nonce: str) -> "RemoteStaging":
        if "/" not in self.path:
            raise ValueError(f"{self.url!r} has nothing above it to put files aside: save to a folder below it")
        return RemoteStaging(self, nonce)

    def check_target(self, *, overwrite: bool) -> None:
        where = self._where()
        names = self.files(where)
        if names and not overwrite:
            raise FileExistsError(f"{self.url!r} exists; pass overwrite=True to replace it, or choose another path")
        check_replaceable(self.url, names, self.fs.cat_file(f"{where}/{MANIFEST}") if MANIFEST in names else None)

    def remove(self) -> None:
        self.undo()
        old = self.beside("old", "removed")  # that there was nothing is what a crash from here on restores
        self.mark(old)
        self.clear(self.path, first=MANIFEST)
        self.clear(old, first=_MARK)
        self.recover()

    def sweep(self, *, dry_run: bool = False) -> list[str]:
        if not dry_run:
            self.undo()
        needed = {each.name for each in self._marked()} if not self._sound() else set()
        swept = [f"{self._parent}/{each.name}" for each in self._remnants() if each.name not in needed]
        for path in () if dry_run else swept:
            self.clear(path, first=_MARK)
        return swept

    def undo(self) -> None:
        """Puts the old checkpoint back if a save died after it began to replace it."""
        self.recover()
        if self._sound():
            return
        for each in self._marked()[:1]:
            old = f"{self._parent}/{each.name}"
            self.clear(self.path, first=MANIFEST)
            self.copy(self.files(old), old, self.path)
            self.clear(old, first=_MARK)

    def beside(self, kind: str, nonce: str) -> str:
        """The folder of a save beside this one."""
        return f"{self._parent}/{Remnant(self._name, kind, nonce).name}"

    def files(self, folder: str) -> dict[str, int]:
        """The bytes of all files in a folder, however deep; the mark is none of them."""
        self.fs.invalidate_cache()
        found = self.fs.find(folder, detail=True)
        sizes = {path.removeprefix(folder).lstrip("/"): int(info["size"]) for path, info in found.items()}
        return {name: size for name, size in sizes.items() if name != _MARK}

    def copy(self, names: Iterable[str], source: str, into: str) -> None:
        """Copies files between folders, the manifest last."""
        for name in sorted(names, key=lambda name: name == MANIFEST):
            self.make(into, [name])
            self.fs.cp_file(f"{source}/{name}", f"{into}/{name}")

    def mark(self, folder: str) -> None:
        """Declares an old folder whole, or a staging folder there."""
        self.make(folder, ())
        self.fs.pipe_file(f"{folder}/{_MARK}", b"whole")

    def make(self, folder: str, names: Iterable[str]) -> None:
        """The folders for files of these names, where there are such things as folders."""
        for path in [folder, *(f"{folder}/{each}" for each in parents(names))]:
            self.fs.makedirs(path, exist_ok=True)

    def clear(self, folder: str, *, first: str) -> None:
        """Removes a folder, beginning with the file that makes it count."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(f"{folder}/{first}")
        self.fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(folder, recursive=True)

    def _where(self) -> str:
        """The folder to read: this one, or the old one while this one is not whole."""
        if self._readable is None:
            marked = self._marked()
            broken = bool(marked) and not self._sound()
            self._readable = f"{self._parent}/{marked[0].name}" if broken else self.path
        return self._readable

    def _sound(self) -> bool:
        try:
            decode_manifest(self.fs.cat_file(f"{self.path}/{MANIFEST}"))
        except (FileNotFoundError, CorruptError):
            return False
        return True

    def _marked(self) -> list[Remnant]:
        olds = (each for each in self._remnants() if each.kind == "old")
        return [each for each in olds if self.fs.exists(f"{self._parent}/{each.name}/{_MARK}")]

    def _remnants(self) -> list[Remnant]:
        found = (remnant_of(name) for name in self._folders(self._parent))
        return [each for each in found if each is not None and each.target == self._name]

    def _folders(self, path: str) -> list[str]:
        self.fs.invalidate_cache()
        try:
            entries = self.fs.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(each["name"].rstrip("/").rpartition("/")[2] for each in entries if each["type"] == "directory")


class RemoteStaging:
    """See `Staging`."""

    positional = False

    def __init__(self, folder: RemoteFolder, nonce: str) -> None:
        self._folder = folder
        self._path, self._old = folder.beside("tmp", nonce), folder.beside("old", nonce)

    def create(self, names: Iterable[str], needed: int) -> None:
        del needed  # nobody tells how much is free
        self._folder.sweep()
        self._folder.at("swept")
        self._folder.make(self._path, names)
        self._folder.mark(self._path)
        self._folder.at("made")

    def attach(self) -> None:
        if not self._folder.fs.exists(f"{self._path}/{_MARK}"):
            raise CheckpointError(f"{self._path} is not visible on this rank: use a file system that all ranks share")

    def allocate(self, name: str, size: int) -> None:
        raise TypeError(f"{name} of {size} bytes: {self._folder.url} is written from beginning to end, by one rank")

    def write(self, name: str, data: bytes) -> None:
        self._folder.make(self._path, [name])
        self._folder.fs.pipe_file(f"{self._path}/{name}", data)

    def writer(self, name: str) -> "RemoteWriter":
        return RemoteWriter(self._folder.fs, f"{self._path}/{check_name(name)}")

    def publish(self, *, overwrite: bool) -> None:
        folder, target = self._folder, self._folder.path
        old, new = folder.files(target), folder.files(self._path)
        if old and not overwrite:
            raise CheckpointError(f"another process wrote {folder.url} in the meantime: save to another path")
        folder.check_target(overwrite=overwrite)
        folder.copy(carried(old, new), target, self._path)
        folder.copy(old, target, self._old)
        folder.at("copied-old")
        folder.mark(self._old)
        folder.at("marked")
        folder.clear(target, first=MANIFEST)
        folder.at("cleared")
        self._move_in()
        folder.clear(self._old, first=_MARK)
        folder.at("removed-old")
        self.discard()
        folder.recover()
        folder.at("removed")

    def discard(self) -> None:
        self._folder.clear(self._path, first=_MARK)

    def close(self) -> None:
        """Nothing is held."""

    def _move_in(self) -> None:
        folder, target = self._folder, self._folder.path
        for name in sorted(folder.files(self._path), key=lambda name: name == MANIFEST):
            folder.copy([name], self._path, target)
            folder.fs.rm_file(f"{self._path}/{name}")
            folder.at(f"moved {name}")


class RemoteSource:
    """See `Source`."""

    stride = 1 << 30  # each reading is a request

    def __init__(self, fs: Any, path: str) -> None:
        self._fs, self._path = fs, path
        try:
            self.size = int(fs.size(path))
        except FileNotFoundError as error:
            raise CorruptError(f"{path} is missing: restore it, or load another checkpoint") from error

    def read_into(self, begin: int, view: memoryview) -> None:
        end = begin + len(view)
        if end > self.size:
            raise CorruptError(f"{self._path} ends at byte {self.size}, but bytes to {end} are asked for: truncated?")
        if begin < end:
            view[:] = self._fs.cat_file(self._path, start=begin, end=end)

    def close(self) -> None:
        """Nothing is held."""


class RemoteWriter:
    """See `Writer`: a stream, from beginning to end."""

    def __init__(self, fs: Any, path: str) -> None:
        self._path, self._end = path, 0
        self._file: Any = fs.open(path, "wb")

    def write_at(self, begin: int, view: memoryview) -> None:
        if begin != self._end:
            raise ValueError(f"{self._path} is written from beginning to end: byte {begin} cannot follow {self._end}")
        self._file.write(view)
        self._end += len(view)

    def finish(self) -> None:
        file, self._file = self._file, None
        file.close()

    def abort(self) -> None:
        if self._file is not None:
            with contextlib.suppress(Exception):  # what made the caller give up is the error to tell
                self.finish()
