"""What a checkpoint needs of a file system, in four protocols, and the choice between a local and a remote one."""

import os
from collections.abc import Callable, Iterable
from typing import Protocol

from .local import LocalFolder


def open_folder(path: str | os.PathLike[str], at: Callable[[str], None] | None = None) -> "Folder":
    """The folder of one checkpoint, or of several; it need not exist.

    Args:
        path: A local path, or a URL such as "s3://bucket/run", which is opened through fsspec.
        at: Called with the name of each step of a commit as soon as it is done; a fault test ends the process there.

    Raises:
        TypeError: A path of bytes.
        ValueError: A path without a name, such as "/".
        ImportError: A URL, but fsspec is not installed.
    """
    path = os.fspath(path)
    if not isinstance(path, str):
        raise TypeError(f"{path!r} is a path of bytes: give it as str")
    at = at or (lambda _: None)
    if "://" not in path:
        return LocalFolder(path, at=at)
    try:
        from .remote import RemoteFolder  # noqa: PLC0415 - fsspec is optional
    except ModuleNotFoundError as error:
        if error.name != "fsspec":
            raise
        raise ImportError(f"{path} needs fsspec, which is not installed: pip install fsspec") from error
    return RemoteFolder(path, at=at)


class Source(Protocol):
    """A file that is being read."""

    size: int
    stride: int
    """Bytes to read at a time, where something is done with them right after."""

    def read_into(self, begin: int, view: memoryview) -> None:
        """Fills the view with the bytes from `begin` on; raises CorruptError if the file ends before."""

    def close(self) -> None:
        """Ends it; again is harmless."""


class Writer(Protocol):
    """A file that is being written."""

    def write_at(self, begin: int, view: memoryview) -> None:
        """Writes all of the view at byte `begin`; where the staging is not positional, that must be the current end."""

    def finish(self) -> None:
        """Brings the bytes to the disk, and closes."""

    def abort(self) -> None:
        """Closes without caring for the bytes; after `finish` it does nothing."""


class Folder(Protocol):
    """The folder of a checkpoint. Names of files are relative, with '/' between, and one level deep at most."""

    url: str
    positional: bool
    """Whether several ranks may write ranges of one file."""

    def recover(self) -> None:
        """Makes the old checkpoint visible again if a save died while it swapped; called before reading."""

    def version(self) -> str | None:
        """A text that changes whenever the manifest is replaced by another file; None where there is no manifest."""

    def exists(self) -> bool:
        """Whether anything is there; an empty folder is nothing."""

    def sizes(self) -> dict[str, int]:
        """The bytes of every file in it and in its folder "optimizer"."""

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Bytes begin .. end - 1 of a file, by default all."""

    def open(self, name: str) -> Source:
        """A file to read from."""

    def folders(self) -> list[str]:
        """The names of the folders in it, hidden ones too; none if it does not exist."""

    def child(self, name: str) -> "Folder":
        """A folder in it."""

    def stage(self, nonce: str) -> "Staging":
        """A handle on the folder beside this one in which a save gathers its files; touches nothing.

        Args:
            nonce: Letters and digits, the same on every rank and new for every save.
        """

    def check_target(self, *, overwrite: bool) -> None:
        """Raises if what is there now cannot be replaced, so that it is known before bytes are moved.

        Raises:
            FileExistsError: Something is there, and `overwrite` is not asked for.
            CheckpointError: What is there is not ours to replace.
        """

    def remove(self) -> None:
        """Removes the whole checkpoint, whatever it holds; a crash on the way never leaves one that looks whole."""

    def sweep(self, *, dry_run: bool = False) -> list[str]:
        """Removes what dead saves to this folder left beside it; returns the paths."""


class Staging(Protocol):
    """A save under way. Every rank has a handle; each call says which of them makes it."""

    positional: bool
    """Whether several ranks may write ranges of one file."""

    def create(self, names: Iterable[str], needed: int) -> None:
        """One rank: sweeps, checks that `needed` bytes are free, and makes the folders for files of these names."""

    def attach(self) -> None:
        """Every rank: raises CheckpointError if the staging is not visible here."""

    def allocate(self, name: str, size: int) -> None:
        """One rank, if positional: makes a file of that many bytes, all zero."""

    def write(self, name: str, data: bytes) -> None:
        """One rank: writes a small file from beginning to end."""

    def writer(self, name: str) -> Writer:
        """A file to write into."""

    def publish(self, *, overwrite: bool) -> None:
        """The rank that created: makes this the checkpoint. At any kill there is wholly the old or wholly the new."""

    def discard(self) -> None:
        """One rank: removes the staging in whatever state it is, unless it is the checkpoint by now, and closes it."""

    def close(self) -> None:
        """Lets go of the lock without removing anything; again is harmless."""
