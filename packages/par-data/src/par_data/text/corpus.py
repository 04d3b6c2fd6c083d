"""Files of text, tokenized once and then memory-mapped by every rank.

The first rank of each machine streams documents through the tokenizer into a folder. The folder's name is a hash of
everything that decides the tokens: the files, the tokenizer, the chat template and the format. So a run that resumes,
and the next run with the same data, find the folder. It appears completely or not at all.

- tokens.u32: the tokens of all documents, concatenated
- documents.u64: the offset of each document's first token, then the number of tokens
- hashes.u64: a hash of each document's tokens, which decides whether the document is held out
- trained.u1, only for conversations: one bit per token, set if the token is a target
- corpus.json: format, vocabulary, padding, and the sizes of the other files
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

from .records import SUMMARY, find_corpus_files, is_conversations, is_corpus, kind_of
from .tokenize import Document, documents_of, find_tokenizer_files, load_tokenizer

Ints = NDArray[np.int64]
Format = Literal["text", "jsonl", "chat"]

_VERSION = 1
_FILES = {"tokens.u32": "<u4", "documents.u64": "<u8", "hashes.u64": "<u8", "trained.u1": "u1"}


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Tokenized documents in memory-mapped files.

    Args:
        path: The folder of the files.
        format: "text", "jsonl" or "chat".
        tokens: The tokens of all documents, concatenated, uint32 [tokens].
        documents: The offset of each document in `tokens`, then the number of tokens, uint64 [documents + 1].
        hashes: A hash of each document's tokens, uint64 [documents].
        trained: One bit per token, lowest bit first: whether the token is a target, uint8 [tokens / 8]. None: all are.
        vocabulary: Number of tokens in the tokenizer's vocabulary.
        padding: The token that fills a sequence behind its last document.
    """

    path: Path
    format: str
    tokens: NDArray[np.uint32]
    documents: NDArray[np.uint64]
    hashes: NDArray[np.uint64]
    trained: NDArray[np.uint8] | None
    vocabulary: int
    padding: int

    @classmethod
    def from_bytes(cls, text: bytes, lengths: Ints, padding: int) -> "Corpus":
        """Return a corpus of bytes in memory, of which each byte is a token.

        Args:
            text: The documents, concatenated; bytes after the last one belong to no document.
            lengths: The number of bytes in each document, int64 [documents].
            padding: The byte that fills a sequence behind its last document.
        """
        return cls(
            path=Path(),
            format="text",
            tokens=np.frombuffer(text, np.uint8),  # a quarter of the memory of uint32
            documents=np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint64),
            hashes=np.zeros(len(lengths), np.uint64),
            trained=None,
            vocabulary=256,
            padding=padding,
        )

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.documents) - 1

    @property
    def lengths(self) -> Ints:
        """The number of tokens in each document, int64 [documents]."""
        ends = self.documents.astype(np.int64)
        return ends[1:] - ends[:-1]

    def split(self, fraction: float) -> tuple[Ints, Ints]:
        """Return the indices of the documents to train on, and of the held-out documents.

        A hash of a document's tokens decides. So a document stays on its side when documents are added, and duplicates
        are on the same side.

        Args:
            fraction: Approximate fraction of held-out documents, at least 0 and below 1.

        Raises:
            ValueError: A fraction outside of that range.
        """
        if not 0 <= fraction < 1:
            raise ValueError(f"fraction={fraction}: the held-out fraction must be at least 0 and below 1; set another")
        # Hashes are uniform in 0 .. 2^64 - 1. With a larger fraction, a document that was held out stays held out.
        held_out = self.hashes < np.uint64(int(fraction * 2**64))
        return np.flatnonzero(~held_out), np.flatnonzero(held_out)

    def targets(self, begin: int, end: int) -> NDArray[np.bool_]:
        """Return a mask of the tokens begin .. end - 1 that the loss counts as targets, bool [end - begin]."""
        if self.trained is None:
            return np.ones(end - begin, np.bool_)
        low = begin // 8
        bits = np.unpackbits(self.trained[low : -(-end // 8)], bitorder="little")
        return bits[begin - 8 * low : end - 8 * low].astype(np.bool_)


@dataclass(frozen=True, kw_only=True)
class _CorpusInputs:
    """Everything that decides the tokens of a corpus."""

    path: Path
    files: Sequence[Path]
    tokenizer: Path
    format: Format
    field: str
    template: str | None

    @property
    def digest(self) -> str:
        """A hash that names the folder of the tokens."""
        digest = hashlib.sha256(f"{_VERSION} {self.format} {self.field} {self.template}".encode())
        for path in (*self.files, *find_tokenizer_files(self.tokenizer)):
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
    """Tokenize files, unless the tokens exist already, and memory-map the tokens.

    Collective over `group` if torch.distributed is initialized. The first rank of each machine tokenizes, and the other
    ranks wait for it.

    Args:
        path: A UTF-8 text file or a table (Parquet or Arrow). A folder or a pattern, such as data/train-*.parquet,
            selects several files, sorted by name. The folder of a corpus is mapped as it is.
        tokenizer: The folder of a Hugging Face tokenizer.
        folder: The cache: each corpus gets a subfolder.
        format: "text": every line is a document. "jsonl": `field` of the JSON object in every line, or of every row of
            a table, is a document. "chat": every line or row has a conversation under "messages", and only the
            assistant's tokens are targets. "auto": decided by the first line of a .jsonl or .json file, or by the
            columns of a table; all other files are text. Every format skips empty lines.
        field: The key or column of the text if `format` is "jsonl".
        template: A file with a chat template, which replaces the tokenizer's.
        group: The ranks that need the corpus. None: all ranks.
        progress: Whether to show a progress bar. None: only if stderr is a terminal.
        stop: Called before each document on the rank that tokenizes. If it returns true, all ranks raise, and the
            tokens are removed.

    Raises:
        ValueError: A wrong argument, or a line or row with its location. The other ranks raise its text.
        InterruptedError: `stop` returned true. The ranks that waited raise a ValueError with its text.
    """
    # Ranks of one machine share its disks, so one of them tokenizes for all. Machines may have separate disks, so the
    # first rank of each machine does it, and compares the name of the folder with the other machines afterwards.
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
    except Exception as error:
        # An error of any kind is kept until `agree`: the other ranks wait for this one there.
        problem = error
    names = agree(problem, place.name, *groups)
    others = [rank for rank, name in names.items() if name != next(iter(names.values()))]
    if others:
        raise ValueError(f"{str(path)!r} or the tokenizer differs on ranks {others}; use the same files on all ranks")
    # A rank that waited may not see the files, on a network file system for example: then all ranks raise.
    with together("mapping the corpus", *groups):
        return open_corpus(place)


def open_corpus(place: Path | str) -> Corpus:
    """Memory-map a corpus that `read_corpus` has written.

    Args:
        place: The folder of the corpus.

    Raises:
        ValueError: The folder is missing, or a file has another size.
    """
    place = Path(place)
    try:
        summary = json.loads((place / SUMMARY).read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(place)!r} holds no corpus ({error}); call read_corpus on every machine first") from None
    arrays = {}
    for name, size in summary["files"].items():
        found = (place / name).stat().st_size if (place / name).exists() else -1
        if found != size:
            raise ValueError(
                f"{str(place / name)!r} has {found} bytes instead of {size}; remove the folder, and tokenize again"
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


def _checked(path: Path, tokenizer: Path, format_: str, field: str, template: Path | str | None) -> _CorpusInputs:
    """Check the arguments, as far as possible without reading the files."""
    files = find_corpus_files(path)
    if format_ not in ("auto", *get_args(Format)):
        raise ValueError(f"format={format_!r} is unknown; use 'auto', 'text', 'jsonl' or 'chat'")
    text = None
    if template is not None:
        if not Path(template).is_file():
            raise ValueError(f"template={str(template)!r} does not exist; correct the path")
        text = Path(template).read_text(encoding="utf-8")
    found = format_
    if format_ == "auto" and kind_of(files[0]) == "lines":
        found = "text"
    elif format_ == "auto":
        found = "chat" if is_conversations(files[0]) else "jsonl"
    if found == "text" and kind_of(files[0]) == "rows":
        raise ValueError(
            f"format='text' with the corpus {str(path)!r}: a table has no lines of text; use format='jsonl', and set "
            "field to the column"
        )
    return _CorpusInputs(
        path=path,
        files=files,
        tokenizer=tokenizer,
        format=found,  # type: ignore[arg-type]
        field=field,
        template=text,
    )


def _write(source: _CorpusInputs, place: Path, progress: bool | None, stop: Callable[[], bool] | None) -> None:
    """Tokenize files into their folder, which appears with the final rename."""
    tokenizer = load_tokenizer(source.tokenizer)
    # The name has machine and process, so that a later run can tell the remains of a killed process from the files of
    # one that still writes. The dot hides the folder from patterns.
    prefix = f".{place.name}.tmp-{socket.gethostname()}-"
    for left in place.parent.glob(f"{prefix}*"):
        if not _is_running(left.name.removeprefix(prefix)):
            shutil.rmtree(left, ignore_errors=True)
    staging = place.with_name(f"{prefix}{os.getpid()}")
    staging.mkdir(parents=True)
    try:
        documents = documents_of(source.files, tokenizer, source.format, source.field, source.template, progress)
        with _CorpusWriter(staging, masked=source.format == "chat") as files:
            for document in documents:
                if stop is not None and stop():
                    raise InterruptedError(
                        f"stopped while the corpus {str(source.path)!r} was tokenized; its tokens were removed: start "
                        "again"
                    )
                files.add(document)
        if files.count == 0:
            raise ValueError(
                f"the corpus {str(source.path)!r} has no document; use files with at least one line of text"
            )
        padding = next((id_ for id_ in (tokenizer.pad_token_id, tokenizer.eos_token_id) if id_ is not None), 0)
        summary = {
            "source": str(source.path),
            "format": source.format,
            "vocabulary": len(tokenizer),
            "padding": padding,
            "files": {path.name: path.stat().st_size for path in sorted(staging.iterdir())},
        }
        # Written last: a folder with this file is a corpus, and its sizes show whether a copy of it is complete.
        _write_durably(staging / SUMMARY, json.dumps(summary, indent=2).encode())
        try:
            staging.rename(place)
        except OSError:
            # Another process, perhaps on another machine with the same disk, may have been faster with the same tokens.
            if not is_corpus(place):
                raise
        sync_to_disk(place.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


class _CorpusWriter:
    """The files of a corpus, written document by document.

    Args:
        folder: The folder of the files.
        masked: Whether some tokens are not targets.
    """

    def __init__(self, folder: Path, *, masked: bool) -> None:
        names = [name for name in _FILES if masked or name != "trained.u1"]
        self._files: dict[str, BinaryIO] = {name: (folder / name).open("wb") for name in names}
        self._bits = np.zeros(0, np.uint8)  # of the last tokens, which do not fill a byte yet
        self._end = 0
        self.count = 0

    def __enter__(self) -> "_CorpusWriter":
        self._put("documents.u64", [0])
        return self

    def add(self, document: Document) -> None:
        """Write a document; skip one without tokens."""
        if not document.tokens:
            return
        self.count += 1
        self._end += len(document.tokens)
        data = self._put("tokens.u32", document.tokens)
        self._put("documents.u64", [self._end])
        # Python's own hash() differs from process to process, and would hold out other documents after a resume.
        self._files["hashes.u64"].write(hashlib.sha256(data).digest()[:8])
        if document.trained is not None:
            # Documents do not end at bytes: the bits of the last byte wait for the next document.
            bits = np.concatenate([self._bits, np.asarray(document.trained, np.uint8)])
            whole = len(bits) // 8 * 8
            self._files["trained.u1"].write(np.packbits(bits[:whole], bitorder="little").tobytes())
            self._bits = bits[whole:]

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if len(self._bits):
            self._files["trained.u1"].write(np.packbits(self._bits, bitorder="little").tobytes())
        for file in self._files.values():
            file.flush()
            if error is None:  # otherwise the files are removed, and waiting for the disk would be useless
                os.fsync(file.fileno())
            file.close()

    def _put(self, name: str, values: Sequence[int]) -> bytes:
        data = np.asarray(values, _FILES[name]).tobytes()
        self._files[name].write(data)
        return data


def _is_running(process: str) -> bool:
    """Return whether a process of this machine is running, by its id as text."""
    try:
        os.kill(int(process), 0)
    except (ValueError, OverflowError, ProcessLookupError):
        return False
    except PermissionError:  # a process of another user
        return True
    return True


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    sync_to_disk(path.parent)
