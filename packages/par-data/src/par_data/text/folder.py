"""A folder of text as bytes: selection and order of files, the held-out part, and the ends of documents."""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Lengths = NDArray[np.int64]

_EMPTY_LINES = re.compile(rb"\n\s*\n")
_SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages"})


@dataclass(frozen=True, kw_only=True)
class FolderText:
    """The bytes of a folder's text files, split into two parts.

    Args:
        folder: The folder.
        files: Number of files.
        train: Bytes to train on.
        held_out: Bytes to validate on.
        documents: Lengths of the documents in each of the two parts, int64. None: they are not known.
    """

    folder: Path
    files: int
    train: bytes
    held_out: bytes
    documents: tuple[Lengths, Lengths] | None = None

    @cached_property
    def digest(self) -> str:
        """A hash that is equal on two ranks exactly if their bytes, their parts and their documents are."""
        # With the lengths, else a border one byte further on would have the same hash.
        digest = hashlib.sha256(len(self.train).to_bytes(8) + self.train + self.held_out)
        for lengths in self.documents or ():
            digest.update(len(lengths).to_bytes(8) + lengths.tobytes())
        return digest.hexdigest()


def read_folder_text(
    folder: Path | str,
    *,
    patterns: Sequence[str] = (),
    validation_fraction: float = 0.05,
    documents: Literal["files", "paragraphs"] | None = None,
) -> FolderText:
    """Read every UTF-8 text file of a folder, in an order that is shuffled but the same on every machine.

    The last part of the concatenated bytes is held out. Files come in the order of a hash of their relative path, so
    that this part is a sample of the whole folder, and hardly changes when a file is added. A document at the border
    counts as two. Links, hidden folders and installed packages are skipped.

    Args:
        folder: Folder of text.
        patterns: Patterns of file names, such as "*.py". Default: every text file.
        validation_fraction: Fraction of the bytes to hold out.
        documents: Unit whose lengths are returned; paragraphs end at empty lines. Default: no lengths.

    Raises:
        ValueError: The folder does not exist, cannot be read, or holds no text; or the fraction is below 0, or 1 or
            more.
    """
    if not 0 <= validation_fraction < 1:
        raise ValueError(
            f"validation_fraction={validation_fraction}: it must be at least 0 and below 1; pass such a fraction"
        )
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise ValueError(f"{str(folder)!r} is not a folder; pass the path of a folder of text")
    try:
        # A folder lists its files in an order that machines and file systems choose.
        names = sorted(
            _find_files(folder, PurePosixPath()), key=lambda name: hashlib.sha256(os.fsencode(name)).digest()
        )
        chosen = [name for name in names if not patterns or any(name.match(pattern) for pattern in patterns)]
        texts = [data for data in ((folder / name).read_bytes() for name in chosen) if _is_text(data)]
    except OSError as error:
        raise ValueError(f"cannot read {error.filename!r}: {error.strerror}; make it readable") from None
    full = b"".join(texts)
    if not full:
        matching = f" that matches {', '.join(patterns)}" if patterns else ""
        raise ValueError(f"{str(folder)!r} holds no text file{matching}; pass a folder of UTF-8 text")
    # From the end, so that a fraction of 0 holds out nothing.
    border = len(full) - round(len(full) * validation_fraction)
    lengths = None if documents is None else _lengths_of(texts, documents, border)
    return FolderText(folder=folder, files=len(texts), train=full[:border], held_out=full[border:], documents=lengths)


def _lengths_of(texts: Sequence[bytes], kind: str, border: int) -> tuple[Lengths, Lengths]:
    """Return the lengths of the documents before and after a border in the concatenated texts.

    Args:
        texts: The files, one after the other.
        kind: "files", or "paragraphs", which include the empty lines after them.
        border: Number of bytes before the border.
    """
    # The border counts as the end of a document, so that a document across it has a length on each side.
    ends, begin = [0, border], 0
    for text in texts:
        if kind == "paragraphs":
            ends += [begin + empty.end() for empty in _EMPTY_LINES.finditer(text)]
        begin += len(text)
        ends.append(begin)
    # Sorted, and without the empty documents that two ends in one place would make.
    every = np.unique(np.array(ends, np.int64))
    place = int(np.searchsorted(every, border))
    return np.diff(every[: place + 1]), np.diff(every[place:])


def _find_files(folder: Path, below: PurePosixPath) -> Iterator[PurePosixPath]:
    """Yield relative paths of regular files, without links, hidden folders and installed packages."""
    with os.scandir(folder / below) as entries:
        found = list(entries)
    for entry in found:
        is_skipped = entry.name.startswith(".") or entry.name in _SKIPPED_FOLDERS
        if entry.is_file(follow_symlinks=False):
            yield below / entry.name
        elif entry.is_dir(follow_symlinks=False) and not is_skipped:
            yield from _find_files(folder, below / entry.name)


def _is_text(data: bytes) -> bool:
    if b"\0" in data:
        return False
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
