"""Records in a file of documents, one after the other: lines of text, JSON objects, rows of a table.

    .txt and others         a line                          number of the line
    .jsonl .json            a line with a JSON object       number of the line
    .parquet .arrow         a row of the table              number of the row

pyarrow reads tables in batches of rows, and only the requested column of each row.
"""

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

Kind = Literal["lines", "objects", "rows"]
"""The kind of records in a file."""

KINDS: dict[str, Kind] = {
    ".txt": "lines",
    ".jsonl": "objects",
    ".json": "objects",
    ".parquet": "rows",
    ".arrow": "rows",
}
"""The kind of records by the suffix of a file's name; all other files hold lines."""

SUMMARY = "corpus.json"
"""The file that identifies a folder as a corpus of tokens."""

_ROWS = 1000
"""Rows of a table that are in memory at a time."""


class Record(NamedTuple):
    """A value in a file, with its location for error messages.

    Args:
        path: The file.
        where: The location in the file, such as "line 3".
        value: The text, object or conversation.
    """

    path: Path
    where: str
    value: Any

    @property
    def location(self) -> str:
        """The file and the location in it."""
        return f"{self.path}, {self.where}"


def is_corpus(path: Path) -> bool:
    """Return whether a folder holds tokens that `read_corpus` has written."""
    return (path / SUMMARY).is_file()


def find_corpus_files(path: Path) -> list[Path]:
    """Return the files that a path selects, sorted by name.

    Args:
        path: A file; a folder, whose files with the suffixes of text and tables are selected; or a pattern, such as
            data/train-*.parquet.

    Raises:
        ValueError: No file, or a folder with several kinds of files.
    """
    if path.is_file():
        return [path]
    if path.is_dir():
        # A Hugging Face cache keeps descriptions of its tables next to them; they are not documents.
        about = {"dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json"}
        found = sorted(each for each in path.iterdir() if each.is_file() and each.name not in about)
        found = [each for each in found if each.suffix in KINDS and not each.name.startswith(".")]
        endings = sorted({each.suffix for each in found})
        if len(endings) > 1:
            raise ValueError(
                f"the corpus {str(path)!r} is a folder with {' and '.join(endings)} files: all files must be of one "
                f"kind; use a pattern such as {str(path / ('*' + endings[0]))!r}"
            )
        if not found:
            raise ValueError(
                f"the corpus {str(path)!r} is a folder without {', '.join(KINDS)} files; use a folder that has some, "
                "or a file"
            )
        return found
    if any(letter in path.name for letter in "*?["):
        found = sorted(each for each in path.parent.glob(path.name) if each.is_file())
        if found:
            return found
        raise ValueError(f"the corpus {str(path)!r} is a pattern that matches no file; correct the pattern")
    raise ValueError(f"the corpus {str(path)!r} does not exist; correct the path")


def kind_of(path: Path) -> Kind:
    """Return the kind of records in a file, by the suffix of its name."""
    return KINDS.get(path.suffix, "lines")


def is_conversations(path: Path) -> bool:
    """Return whether the first object or row of a file has "messages".

    Raises:
        ValueError: A table that cannot be opened.
    """
    if kind_of(path) == "rows":
        with _TableFile(path) as table:
            return "messages" in table.columns
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        value = json.loads(first)
    except ValueError:
        return False  # reading the file reports the error with the number of the line
    return isinstance(value, dict) and "messages" in value


def lines_of(path: Path, parse: Callable[[str], Any], advance: Callable[[int], object]) -> Iterator[Record]:
    """Iterate over the lines of a file that are not empty.

    Args:
        path: The file, in UTF-8.
        parse: Converts a line to its value. It raises a ValueError with the end of a sentence about the line.
        advance: Called with the number of bytes of each line.

    Raises:
        ValueError: A line that is not UTF-8, or that `parse` rejects.
    """
    with path.open("rb") as file:
        for number, data in enumerate(file, 1):
            advance(len(data))
            if not data.strip():
                continue
            try:
                # A byte order mark at the beginning of a file is not part of the first document.
                text = data.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                yield Record(path, f"line {number}", parse(text))
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, line {number} is not UTF-8 ({error}); convert the file to UTF-8") from None
            except ValueError as error:
                raise ValueError(f"{path}, line {number} {error}") from None


def rows_of(
    path: Path, column: str, parse: Callable[[dict[str, Any]], Any], advance: Callable[[int], object]
) -> Iterator[Record]:
    """Iterate over the rows of a table.

    Args:
        path: The table, in Parquet or Arrow.
        column: The column to read.
        parse: Converts a row, as a dict of its columns, to its value. It raises a ValueError with the end of a
            sentence about the row.
        advance: Called with the approximate number of bytes of each batch of rows.

    Raises:
        ValueError: A table that cannot be opened or has no such column, or a row that `parse` rejects.
    """
    with _TableFile(path) as table:
        if column not in table.columns:
            raise ValueError(
                f"{path} has no column {column!r}, only {', '.join(map(repr, table.columns)) or 'none'}; set field to "
                "the column of the text"
            )
        size, number = path.stat().st_size, 0
        for batch in table.batches(column):
            for row in batch:
                number += 1
                try:
                    yield Record(path, f"row {number}", parse(row))
                except ValueError as error:
                    raise ValueError(f"{path}, row {number} {error}") from None
            advance(size * len(batch) // max(1, table.rows))


class _TableFile:
    """An open table.

    Args:
        path: The file: Parquet if its name ends in .parquet, else an Arrow file or stream.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._arrow: Any = importlib.import_module("pyarrow")
        except ModuleNotFoundError as error:
            if error.name != "pyarrow":
                raise
            raise ValueError(f"the table {str(path)!r} needs pyarrow to be read; pip install pyarrow") from None
        self._path = path
        try:
            self._open()
        except (OSError, ValueError) as error:  # the bases of pyarrow's own errors
            raise ValueError(f"the table {str(path)!r} cannot be read ({error}); repair or convert it") from None

    def _open(self) -> None:
        self._file: Any = self._arrow.memory_map(str(self._path))
        if self._path.suffix == ".parquet":
            self._table: Any = importlib.import_module("pyarrow.parquet").ParquetFile(self._file)
            self.columns, self.rows = list(self._table.schema_arrow.names), int(self._table.metadata.num_rows)
            return
        ipc = importlib.import_module("pyarrow.ipc")
        # An Arrow file begins with this magic. The caches of Hugging Face datasets are Arrow streams, which have none.
        magic = self._file.read(6)
        self._file.seek(0)
        reader = ipc.open_file(self._file) if magic == b"ARROW1" else ipc.open_stream(self._file)
        # The file is memory-mapped: this reads no rows yet, they are read when a batch is converted.
        self._table = reader.read_all()
        self.columns, self.rows = list(self._table.schema.names), int(self._table.num_rows)

    def __enter__(self) -> "_TableFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def batches(self, column: str) -> Iterator[list[dict[str, Any]]]:
        """Iterate over batches of rows, each row a dict of its columns.

        Raises:
            ValueError: A row that cannot be read.
        """
        if self._path.suffix == ".parquet":
            found = self._table.iter_batches(batch_size=_ROWS, columns=[column])
        else:
            found = iter(self._table.select([column]).to_batches(max_chunksize=_ROWS))
        while True:
            try:
                batch = next(found, None)
                rows = None if batch is None else batch.to_pylist()
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"the table {str(self._path)!r} is damaged ({error}); copy it from its source again"
                ) from None
            if rows is None:
                return
            yield rows
