"""A folder of text as bytes: which files count, in which order, and which part is held out. Pure but for reading."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from .._errors import UserError
from .options import DataOptions

_SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages"})


@dataclass(frozen=True, kw_only=True)
class Text:
    """The bytes of a folder's text files, cut into two.

    Args:
        folder: Where they come from.
        files: The number of files.
        train: The bytes to train on.
        held_out: The bytes to validate on.
    """

    folder: Path
    files: int
    train: bytes
    held_out: bytes

    @cached_property
    def digest(self) -> str:
        """Equal on two ranks exactly if their bytes, and their cut, are."""
        return hashlib.sha256(len(self.train).to_bytes(8) + self.train + self.held_out).hexdigest()


def read_text(options: DataOptions) -> Text:
    """Reads every text file of the folder, in an order that is shuffled but the same on every machine.

    The last part of the concatenated bytes is held out. As files come in the order of a hash of their relative path,
    it is a sample of the whole folder, and one that hardly changes when a file is added.

    Raises:
        UserError: The folder does not exist, cannot be read, or holds no text.
    """
    folder = source_folder(options)
    if not folder.is_dir():
        raise UserError(f"data.folder is {str(folder)!r}, which is not a folder; give the path of a folder of text")
    try:
        names = sorted(_find_files(folder, PurePosixPath()), key=_shuffle_key)
        chosen = [name for name in names if _is_chosen(name, options.patterns)]
        texts = [data for data in ((folder / name).read_bytes() for name in chosen) if _is_text(data)]
    except OSError as error:
        raise UserError(f"cannot read {error.filename!r} of data.folder: {error.strerror}; make it readable") from None
    whole = b"".join(texts)
    if not whole:
        matching = f" that matches {', '.join(options.patterns)}" if options.patterns else ""
        raise UserError(f"data.folder {str(folder)!r} holds no text file{matching}; name a folder of UTF-8 text")
    cut = len(whole) - round(len(whole) * options.validation_fraction)
    return Text(folder=folder, files=len(texts), train=whole[:cut], held_out=whole[cut:])


def source_folder(options: DataOptions) -> Path:
    """The folder that the options mean."""
    return Path(options.folder).expanduser() if options.folder else Path(sysconfig.get_path("stdlib"))


def _find_files(folder: Path, below: PurePosixPath) -> Iterator[PurePosixPath]:
    """Relative paths of regular files; links, hidden folders and installed packages are left alone."""
    with os.scandir(folder / below) as entries:
        found = list(entries)
    for entry in found:
        if entry.is_file(follow_symlinks=False):
            yield below / entry.name
        elif entry.is_dir(follow_symlinks=False) and not _is_skipped(entry.name):
            yield from _find_files(folder, below / entry.name)


def _is_skipped(name: str) -> bool:
    return name.startswith(".") or name in _SKIPPED_FOLDERS


def _is_chosen(name: PurePosixPath, patterns: tuple[str, ...]) -> bool:
    return not patterns or any(name.match(pattern) for pattern in patterns)


def _shuffle_key(name: PurePosixPath) -> bytes:
    return hashlib.sha256(os.fsencode(name)).digest()


def _is_text(data: bytes) -> bool:
    if b"\0" in data:
        return False
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
