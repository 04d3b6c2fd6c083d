"""Files of text, turned into tokens once and then mapped into memory by every rank.

The first rank of each machine streams documents through the tokenizer into a folder that is named after all that
decides on the tokens: the files, the tokenizer, its chat template and the format. So a run that goes on, and the next
run with the same data, find it there. The folder appears whole or not at all.

    tokens.u32      the tokens of all documents in a row
    documents.u64   where each document begins, and the end
    hashes.u64      a hash of each document's tokens, which decides whether it is held out
    trained.u1      a bit a token, of conversations alone: whether the model says it
    corpus.json     the rest, and what the sizes of the files must be
"""

import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, get_args

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

from par_groups import agree, sync_to_disk, together

from .records import SUMMARY, files_of, is_conversations, is_corpus, kind_of
from .tokenize import Document, documents_of, load_tokenizer, tokenizer_files

Ints = NDArray[np.int64]
Format = Literal["text", "jsonl", "chat"]

_VERSION = 1
_FILES = {"tokens.u32": "<u4", "documents.u64": "<u8", "hashes.u64": "<u8", "trained.u1": "u1"}


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents as tokens, in files that are mapped into memory.

    Args:
        path: The folder of the files.
        format: "text", "jsonl" or "chat".
        tokens: uint32, the tokens of all documents in a row.
        documents: uint64, where each document begins in `tokens`, and their number at the end.
        hashes: uint64, a hash of each document's tokens.
        trained: uint8, a bit a token from the lowest on: whether it is a target; None: all are.
        vocabulary: The number of tokens that the tokenizer knows.
        padding: The token that fills a row behind its last document.
    """

    path: Path
    format: str
    tokens: NDArray[np.uint32]
    documents: NDArray[np.uint64]
    hashes: NDArray[np.uint64]
    trained: NDArray[np.uint8] | None
    vocabulary: int
    padding: int

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.documents) - 1

    @property
    def lengths(self) -> Ints:
        """The number of tokens of each document."""
        ends = self.documents.astype(np.int64)
        return ends[1:] - ends[:-1]

    def split(self, fraction: float) -> tuple[Ints, Ints]:
        """The documents to train on and those that are held out, by number.

        A document's own tokens decide, so it stays on its side whatever is added to the file, and so do its copies.

        Args:
            fraction: The part that is held out, about; 0 holds out none.

        Raises:
            ValueError: A fraction that leaves nothing to train on.
        """
        if not 0 <= fraction < 1:
            raise ValueError(f"fraction is {fraction}; the part that is held out is at least 0 and less than 1")
        held_out = self.hashes < np.uint64(int(fraction * 2**64))
        return np.flatnonzero(~held_out), np.flatnonzero(held_out)

    def targets(self, begin: int, end: int) -> NDArray[np.bool_]:
        """Whether each of the tokens begin .. end - 1 is a target, as far as the text decides."""
        if self.trained is None:
            return np.ones(end - begin, np.bool_)
        low = begin // 8
        bits = np.unpackbits(self.trained[low : -(-end // 8)], bitorder="little")
        return bits[begin - 8 * low : end - 8 * low].astype(np.bool_)


@dataclass(frozen=True, kw_only=True)
class _Source:
    """What a corpus is made of."""

    path: Path
    files: Sequence[Path]
    tokenizer: Path
    format: Format
    field: str
    template: str | None

    @property
    def digest(self) -> str:
        """Another one for other tokens."""
        digest = hashlib.sha256(f"{_VERSION} {self.format} {self.field} {self.template}".encode())
        for path in (*self.files, *tokenizer_files(self.tokenizer)):
            with path.open("rb") as file:
                digest.update(b"\0" + hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()[:32]


def read_corpus(
    path: Path | str,
    tokenizer: Path | str,
    folder: Path | str,
    *,
    format: Literal["auto", "text", "jsonl", "chat"] = "auto",  # noqa: A002 - what it is called in a config
    field: str = "text",
    template: Path | str | None = None,
    group: dist.ProcessGroup | None = None,
    progress: bool | None = None,
    stop: Callable[[], bool] | None = None,
) -> Corpus:
    """Turns files into tokens, unless that was done before, and maps them. Collective where torch.distributed runs.

    The first rank of each machine writes; the others wait for it.

    Args:
        path: A file of lines in UTF-8 or a table, in Parquet or Arrow; a folder of such files, which are taken in the
            order of their names; a pattern, such as data/train-*.parquet; or a corpus's own folder, which is mapped as
            it is.
        tokenizer: The folder of a Hugging Face tokenizer.
        folder: Where corpora are kept, each in a folder of its own.
        format: "text": every line is a document. "jsonl": every line is a JSON object, and `field` of it a document;
            so is every row of a table, and its column `field`. "chat": every line or row has a conversation under
            "messages", of which the model is trained on what the assistant says. "auto": the first line of a .jsonl or
            .json file tells, or the columns of a table; other files are text. Empty lines count in no format.
        field: The key, or column, of the text where `format` is "jsonl".
        template: A file with a chat template that takes the place of the tokenizer's.
        group: The ranks that read it; None: the world.
        progress: Whether to show a bar; None: where stderr is a terminal.
        stop: Asked before each document by the rank that writes; where it gives true, all ranks leave, and nothing of
            the corpus stays.

    Raises:
        ValueError: What the caller gave or what a line or row holds, with its place. Where ranks differ, the others
            raise a ValueError with its text.
        InterruptedError: `stop` gave true; ranks that waited raise a ValueError with its text.
    """
    running = dist.is_available() and dist.is_initialized()
    groups = (group,) if running else ()
    hosts = agree(None, socket.gethostname(), *groups)
    me = dist.get_rank() if running else next(iter(hosts))
    is_first = me == min(rank for rank, host in hosts.items() if host == hosts[me])
    problem: Exception | None = None
    place = Path(folder)
    try:
        if is_corpus(Path(path)):
            place = Path(path).resolve()
        else:
            source = _checked(Path(path), Path(tokenizer), format, field, template)
            place /= source.digest
            if is_first and not is_corpus(place):
                _write(source, place, progress, stop)
    except Exception as error:  # of any kind: the others wait for this rank
        problem = error
    names = agree(problem, place.name, *groups)
    others = [rank for rank, name in names.items() if name != next(iter(names.values()))]
    if others:
        raise ValueError(f"{str(path)!r} or the tokenizer differs on ranks {others}; give all ranks the same files")
    with together("mapping the corpus", *groups):
        return open_corpus(place)


def open_corpus(place: Path | str) -> Corpus:
    """Maps what `read_corpus` has written.

    Args:
        place: The corpus's own folder.

    Raises:
        ValueError: It is not there, or not what was written.
    """
    place = Path(place)
    try:
        summary = json.loads((place / SUMMARY).read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{str(place)!r} holds no corpus ({error}); let the first rank of every machine write it"
        ) from None
    arrays = {}
    for name, size in summary["files"].items():
        found = (place / name).stat().st_size if (place / name).exists() else -1
        if found != size:
            raise ValueError(
                f"{str(place / name)!r} has {found} bytes and not {size}; remove the folder to make it anew"
            )
        arrays[name] = np.memmap(place / name, _FILES[name], mode="r")
    return Corpus(
        path=place,
        format=summary["format"],
        tokens=arrays["tokens.u32"],
        documents=arrays["documents.u64"],
        hashes=arrays["hashes.u64"],
        trained=arrays.get("trained.u1"),
        vocabulary=summary["vocabulary"],
        padding=summary["padding"],
    )


def _checked(path: Path, tokenizer: Path, format_: str, field: str, template: Path | str | None) -> _Source:
    """What to read, as far as it can be checked before it is read."""
    files = files_of(path)
    if format_ not in ("auto", *get_args(Format)):
        raise ValueError(f"the format of a corpus is {format_!r}; it can be 'auto', 'text', 'jsonl' or 'chat'")
    text = None
    if template is not None:
        if not Path(template).is_file():
            raise ValueError(f"the chat template {str(template)!r} is no file; correct the path")
        text = Path(template).read_text(encoding="utf-8")
    found = _format_of(files[0]) if format_ == "auto" else format_
    if found == "text" and kind_of(files[0]) == "rows":
        raise ValueError(
            f"the corpus {str(path)!r} is a table, of which no line is a text; leave the format out, or give 'jsonl' "
            "and the column as the field"
        )
    return _Source(
        path=path,
        files=files,
        tokenizer=tokenizer,
        format=found,  # type: ignore[arg-type]
        field=field,
        template=text,
    )


def _format_of(path: Path) -> Format:
    """The format of a file, from its name and from what it begins with."""
    if kind_of(path) == "lines":
        return "text"
    return "chat" if is_conversations(path) else "jsonl"


def _write(source: _Source, place: Path, progress: bool | None, stop: Callable[[], bool] | None) -> None:
    """Tokenizes files into their folder, which appears with the last step, unless it is to stop before."""
    tokenizer = load_tokenizer(source.tokenizer)
    prefix = f".{place.name}.tmp-{socket.gethostname()}-"
    for left in place.parent.glob(f"{prefix}*"):
        if not _lives(left.name.removeprefix(prefix)):
            shutil.rmtree(left, ignore_errors=True)
    beside = place.with_name(f"{prefix}{os.getpid()}")
    beside.mkdir(parents=True)
    try:
        documents = documents_of(source.files, tokenizer, source.format, source.field, source.template, progress)
        with _Files(beside, masked=source.format == "chat") as files:
            for document in documents:
                if stop is not None and stop():
                    raise InterruptedError(
                        f"stopped while the corpus {str(source.path)!r} was tokenized; nothing of it is kept: start "
                        "again"
                    )
                files.add(document)
        if files.count == 0:
            raise ValueError(f"the corpus {str(source.path)!r} holds no document; give one with a line of text")
        padding = next((id_ for id_ in (tokenizer.pad_token_id, tokenizer.eos_token_id) if id_ is not None), 0)
        summary = {
            "source": str(source.path),
            "format": source.format,
            "vocabulary": len(tokenizer),
            "padding": padding,
            "files": {path.name: path.stat().st_size for path in sorted(beside.iterdir())},
        }
        _write_durably(beside / SUMMARY, json.dumps(summary, indent=2).encode())
        try:
            beside.rename(place)
        except OSError:
            if not is_corpus(place):  # else another process, perhaps of another machine, was first
                raise
        sync_to_disk(place.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


class _Files:
    """The files of a corpus, written document by document.

    Args:
        folder: Where they are made.
        masked: Whether there are tokens that are no targets.
    """

    def __init__(self, folder: Path, *, masked: bool) -> None:
        names = [name for name in _FILES if masked or name != "trained.u1"]
        self._files: dict[str, BinaryIO] = {name: (folder / name).open("wb") for name in names}
        self._bits = np.zeros(0, np.uint8)  # of the last tokens, which do not fill a byte yet
        self._end = 0
        self.count = 0

    def __enter__(self) -> "_Files":
        self._put("documents.u64", [0])
        return self

    def add(self, document: Document) -> None:
        """Writes one more document; one without tokens does not count."""
        if not document.tokens:
            return
        self.count += 1
        self._end += len(document.tokens)
        data = self._put("tokens.u32", document.tokens)
        self._put("documents.u64", [self._end])
        self._files["hashes.u64"].write(hashlib.sha256(data).digest()[:8])
        if document.trained is not None:
            bits = np.concatenate([self._bits, np.asarray(document.trained, np.uint8)])
            whole = len(bits) // 8 * 8
            self._files["trained.u1"].write(np.packbits(bits[:whole], bitorder="little").tobytes())
            self._bits = bits[whole:]

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if len(self._bits):
            self._files["trained.u1"].write(np.packbits(self._bits, bitorder="little").tobytes())
        for file in self._files.values():
            file.flush()
            if error is None:  # else they are removed, and nobody waits for the disk
                os.fsync(file.fileno())
            file.close()

    def _put(self, name: str, values: Sequence[int]) -> bytes:
        data = np.asarray(values, _FILES[name]).tobytes()
        self._files[name].write(data)
        return data


def _lives(process: str) -> bool:
    """Whether a process of this machine runs, by its number as a text."""
    try:
        os.kill(int(process), 0)
    except (ValueError, OverflowError, ProcessLookupError):
        return False
    except PermissionError:  # it is another user's
        return True
    return True


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_to_disk(path.parent)
