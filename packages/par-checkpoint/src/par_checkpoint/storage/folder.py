"""The interface of folders that a checkpoint needs, and the choice between local and remote folders."""

import os
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

from ..format.manifest import BLOCK, Manifest
from .files import FileSource, Writer
from .local import LocalFolder
from .sharing import Sharing


def open_folder(path: str | os.PathLike[str], at: Callable[[str], None] | None = None) -> "Folder":
    """Return the folder of one checkpoint, or of several; it need not exist.

    Args:
        path: A local path, or a URL such as "s3://bucket/run", which is opened through fsspec.
        at: Called with the name of each step of a commit as soon as it is done; a fault test ends the process there.

    Raises:
        TypeError: A path of bytes.
        ValueError: A path without a name, such as "/", or what is left of a URL that pathlib took for a path.
        ImportError: A URL, but fsspec is not installed.
    """
    path = os.fspath(path)
    if not isinstance(path, str):
        raise TypeError(f"{path!r} is a path of bytes: give it as str")
    at = at or (lambda _: None)
    if "://" not in path:
        check_no_url(path)
        return LocalFolder(path, at=at)
    try:
        from .remote import RemoteFolder  # noqa: PLC0415 - fsspec is optional
    except ModuleNotFoundError as error:
        if error.name != "fsspec":
            raise
        raise ImportError(f"{path} needs fsspec, which is not installed: pip install fsspec") from error
    return RemoteFolder(path, at=at)


_SCHEMES = frozenset(
    {"abfs", "abfss", "adl", "az", "file", "gcs", "gs", "hdfs", "hf", "http", "https", "memory", "oci", "oss"}
    | {"r2", "s3", "s3a", "s3n", "sftp", "ssh", "wasb", "wasbs", "webhdfs"}
)
"""Schemes of URLs that nobody calls a folder by, with a colon behind it."""


def check_no_url(path: str) -> None:
    """Raise ValueError for a path that means another place than its text: "~/...", and what pathlib makes of a URL.

    pathlib, os.path.normpath and os.path.abspath make a local path "s3:/..." of a URL.
    At the beginning of a path any scheme counts, further on only those of known stores: so a folder whose name ends
    with a colon can still be named, as "./name:/...".
    """
    # On Windows pathlib writes a URL with backslashes.
    parts = path.replace("\\", "/").split("/")
    if parts[0] == "~":
        # Later, `rm -r ~` in a shell would remove the home folder instead of this folder.
        raise ValueError(
            f"path={path!r}: this is a folder named '~' in the working directory; pass os.path.expanduser({path!r}) "
            "for the home folder"
        )
    for number, part in enumerate(parts[:-1]):
        scheme = part.removesuffix(":")
        if number:
            # fsspec chains schemes, as in "simplecache::s3://..."; the last one says where files are.
            is_scheme = scheme.rpartition("::")[2].lower() in _SCHEMES
        else:  # one letter is a drive
            is_scheme = re.fullmatch("[A-Za-z][A-Za-z0-9+.:-]+", scheme) is not None
        if scheme == part or not is_scheme:
            continue
        rest = "/".join(each for each in parts[number + 1 :] if each)
        raise ValueError(
            f"path={path!r}: this is a local path, made of the URL '{scheme}://{rest}' by pathlib or os.path; pass "
            "the URL itself, as a str"
        )


class Folder(Protocol):
    """The folder of a checkpoint. Names of files are relative, with '/' between, and one level deep at most."""

    url: str
    positional: bool
    """Whether several ranks may write ranges of one file."""
    cached: bool
    """Whether ranks of one machine share what one of them has read, without sending it."""
    in_flight: int
    """How many blocks a rank writes or reads at a time; 0 where that is left to the number of threads."""
    stages_beside: bool
    """Whether saves work in hidden folders beside this one, and not in it."""

    def block(self, size: int) -> int:
        """Return the block size of a file with `size` bytes of data."""

    def use(self, manifest: Manifest | None) -> None:
        """Read from now on the checkpoint of this manifest, which another rank has found; None: one without."""

    @property
    def sharing(self) -> Sharing:
        """Ways in which several clients may write one file."""

    @property
    def settles(self) -> float:
        """Seconds until a change by another machine is usually visible; 0 if it is visible at once."""

    def recover(self) -> None:
        """Find the old checkpoint if a save died between its two renames; called before reading."""

    def repair(self) -> None:
        """Rename the old checkpoint back if a save died between its two renames; called before writing."""

    def version(self) -> str | None:
        """Return a text that changes whenever another file replaces the manifest; None without a manifest."""

    def exists(self) -> bool:
        """Return whether the folder contains anything."""

    @property
    def dangling(self) -> Collection[str]:
        """Names of links to files that are missing, as of the last look at sizes."""

    def sizes(self) -> dict[str, int]:
        """Return the size of every file in it and in the subfolders that checkpoints have, in bytes."""

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return bytes begin .. end - 1 of a file, by default all."""

    def open(self, name: str) -> FileSource:
        """Open a file to read."""

    def folders(self) -> list[str]:
        """Return the names of the folders in it, including hidden ones; empty if it does not exist."""

    def child(self, name: str) -> "Folder":
        """Return a folder in it."""

    def stage(self, nonce: str, *, by_owner: bool = False) -> "Staging":
        """Return a handle for the folder in which a save collects its files; changes nothing.

        Args:
            nonce: Letters and digits, the same on every rank and new for every save.
            by_owner: Whether each file is written by one rank, from beginning to end.
        """

    def check_target(self, *, overwrite: bool) -> None:
        """Raise if what is there now cannot be replaced, so that it is known before bytes are moved.

        Raises:
            FileExistsError: The folder exists, and `overwrite` is False.
            CheckpointError: The folder contains files that a save must not replace.
        """

    def remove(self) -> None:
        """Remove the checkpoint with all its content.

        After a crash, the rest never looks like a complete checkpoint.
        """

    def sweep(self, *, dry_run: bool = False) -> list[str]:
        """Remove the remnants of dead saves next to this folder, and return their paths."""


class Staging(Protocol):
    """A save under way. Every rank has a handle; each call says which of them makes it."""

    positional: bool
    """Whether several ranks may write ranges of one file."""
    generation: str
    """The folder in the target in which the files stay; "" where they come to lie in the target itself."""

    joins: bool
    """Whether `complete` has anything to do."""

    def create(self, names: Iterable[str], needed: int) -> None:
        """Sweep, check that `needed` bytes are free, and make the folders for files of these names.

        One rank calls it.
        """

    def allocate(self, name: str, size: int, *, head: int = 0, block: int = BLOCK) -> None:
        """Make a file of `size` bytes, which ranks write in blocks. One rank calls it, if the staging is positional.

        Args:
            name: Name of the file.
            size: Size, in bytes.
            head: Bytes before the first block, written by the rank that writes the first block. Default: 0.
            block: Size of a block, in bytes. If the store joins files from parts, one rank writes each complete block.
        """

    def invite(self) -> Any:
        """Return the data that other ranks need to take part.

        The rank that created the staging calls it after `allocate`.
        """

    def attach(self, invitation: Any) -> None:
        """Take part, on every rank; raise CheckpointError if the staging is not visible here."""

    def complete(self, share: tuple[int, int]) -> None:
        """Complete files, after all blocks are written; every rank does its share, a number and the count of shares."""

    def write(self, name: str, data: bytes) -> None:
        """Write a small file from beginning to end. One rank calls it."""

    def writer(self, name: str) -> Writer:
        """Open a file to write."""

    def publish(self, *, overwrite: bool, index: tuple[str, bytes] | None = None) -> None:
        """Make this the checkpoint, on the rank that called `create`.

        After any kill, the folder is all of the old or all of the new checkpoint.

        Args:
            overwrite: Whether to replace an existing checkpoint.
            index: Name and bytes of the index by which transformers finds files in a generation. Default: no index.
        """

    def discard(self) -> None:
        """Remove the staging in any state, unless it was published, and close it. One rank calls it."""

    def close(self) -> None:
        """Release the staging without removing anything; a second call does nothing."""
