"""A folder of text as bytes: selection and order of files, the held-out part, and the ends of documents.

Imports no torch, so that the command checks a folder before any rank starts.
"""

import hashlib
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from .._errors import UserError
from .options import DataOptions, Options

Lengths = NDArray[np.int64]

_EMPTY_LINES = re.compile(rb"\n\s*\n")
_SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages"})


@dataclass(frozen=True, kw_only=True)
class Text:
    """The bytes of a folder's text files, cut into two.

    Args:
        folder: Where they come from.
        files: The number of files.
        train: The bytes to train on.
        held_out: The bytes to validate on.
        documents: The lengths of the documents in each of the two, int64; None: nobody asked for them.
    """

    folder: Path
    files: int
    train: bytes
    held_out: bytes
    documents: tuple[Lengths, Lengths] | None = None

    @cached_property
    def digest(self) -> str:
        """Equal on two ranks exactly if their bytes, their cut and their documents are."""
        digest = hashlib.sha256(len(self.train).to_bytes(8) + self.train + self.held_out)
        for lengths in self.documents or ():
            digest.update(len(lengths).to_bytes(8) + lengths.tobytes())
        return digest.hexdigest()


def read_text(options: DataOptions) -> Text:
    """Reads every text file of the folder, in an order that is shuffled but the same on every machine.

    The last part of the concatenated bytes is held out. As files come in the order of a hash of their relative path,
    it is a sample of the whole folder, and one that hardly changes when a file is added. A document that lies across
    the cut is two.

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
    documents = None if options.packing == "auto" else _documents(texts, options.documents, cut)
    return Text(folder=folder, files=len(texts), train=whole[:cut], held_out=whole[cut:], documents=documents)


def check_size(text: Text, options: Options) -> None:
    """Raise UserError if the text has too few windows to train or to validate on; rows of documents are not counted."""
    context, batch = options.model.context, options.train.batch_size
    windows, held_out = len(text.train) // context, len(text.held_out) // context
    if options.data.packing == "auto" and (windows < batch or not held_out):
        raise UserError(
            f"{str(text.folder)!r} gives {windows} windows of model.context {context} bytes to train on, and "
            f"{held_out} held out; a step needs train.batch_size {batch} of them, and validation 1: pass a folder with "
            "more text, or lower model.context or train.batch_size"
        )


def _documents(texts: Sequence[bytes], kind: str, cut: int) -> tuple[Lengths, Lengths]:
    """The lengths of the documents before and behind a cut of all texts.

    Args:
        texts: The files, one after the other.
        kind: "files", or "paragraphs": to each belong the empty lines behind it.
        cut: The number of bytes before the cut.
    """
    ends, begin = [0, cut], 0
    for text in texts:
        if kind == "paragraphs":
            ends += [begin + empty.end() for empty in _EMPTY_LINES.finditer(text)]
        begin += len(text)
        ends.append(begin)
    every = np.unique(np.array(ends, np.int64))
    place = int(np.searchsorted(every, cut))
    return np.diff(every[: place + 1]), np.diff(every[place:])


def source_folder(options: DataOptions) -> Path:
    """The folder that the options mean."""
    return Path(options.folder).expanduser() if options.folder else Path(sysconfig.get_path("stdlib"))


def _find_files(folder: Path, below: PurePosixPath) -> Iterator[PurePosixPath]:
    """Yield relative paths of regular files, without links, hidden folders and installed packages."""
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
