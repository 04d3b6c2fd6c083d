"""What lies in a file of documents, one after the other: lines of text, objects of JSON, rows of a table.

    .txt and others         a line                          number of the line
    .jsonl .json            a line, an object of JSON       number of the line
    .parquet .arrow         a row of the table              number of the row

Tables are read by pyarrow, a batch of rows at a time, and of each row only the column that is wanted.
"""

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

Kind = Literal["lines", "objects", "rows"]
"""What a file is made of."""

KINDS: dict[str, Kind] = {
    ".txt": "lines",
    ".jsonl": "objects",
    ".json": "objects",
    ".parquet": "rows",
    ".arrow": "rows",
}
"""By the ending of a file's name; files with another one are lines."""

SUMMARY = "corpus.json"
"""The file by which a folder of tokens is known."""

_ROWS = 1000
"""Rows of a table that are in memory at a time."""


class Record(NamedTuple):
    """What a file has at one place, such as "line 3", and where that is."""

    path: Path
    where: str
    value: Any

    @property
    def place(self) -> str:
        """The place as errors name it."""
        return f"{self.path}, {self.where}"


def is_corpus(path: Path) -> bool:
    """Whether a folder has tokens, which need no reading."""
    return (path / SUMMARY).is_file()


def files_of(path: Path) -> list[Path]:
    """The files that a path means, in the order of their names: a file, those of a folder, or those of a pattern.

    Args:
        path: A file; a folder, of which files count whose names end as text or tables do; or a pattern, such as
            data/train-*.parquet.

    Raises:
        ValueError: There is none, or a folder has files of several kinds.
    """
    if path.is_file():
        return [path]
    if path.is_dir():
        # What a Hugging Face cache keeps beside its tables says what is in them, and is no document.
        about = {"dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json"}
        found = sorted(each for each in path.iterdir() if each.is_file() and each.name not in about)
        found = [each for each in found if each.suffix in KINDS and not each.name.startswith(".")]
        endings = sorted({each.suffix for each in found})
        if len(endings) > 1:
            raise ValueError(
                f"the corpus {str(path)!r} is a folder of files that end in {' and '.join(endings)}; give files of one "
                f"kind, such as {str(path / ('*' + endings[0]))!r}"
            )
        if not found:
            raise ValueError(
                f"the corpus {str(path)!r} is a folder without files that end in {', '.join(KINDS)}; give one that has "
                "some, or a file"
            )
        return found
    if any(letter in path.name for letter in "*?["):
        found = sorted(each for each in path.parent.glob(path.name) if each.is_file())
        if found:
            return found
        raise ValueError(f"the corpus {str(path)!r} is a pattern that no file has; correct it")
    raise ValueError(f"the corpus {str(path)!r} is no file; correct the path")


def kind_of(path: Path) -> Kind:
    """What a file is made of, by the ending of its name."""
    return KINDS.get(path.suffix, "lines")


def is_conversations(path: Path) -> bool:
    """Whether the first object or row of a file has messages.

    Raises:
        ValueError: A table that cannot be opened.
    """
    if kind_of(path) == "rows":
        with _Table(path) as table:
            return "messages" in table.columns
    with path.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    try:
        value = json.loads(first)
    except ValueError:
        return False  # which is wrong, and is said with the number of the line
    return isinstance(value, dict) and "messages" in value


def lines_of(path: Path, parse: Callable[[str], Any], advance: Callable[[int], object]) -> Iterator[Record]:
    """The lines of a file that are not empty, as what they hold.

    Args:
        path: The file, in UTF-8.
        parse: Makes what a line holds of its text; a ValueError says what is wrong with it.
        advance: Called with the bytes of each line.

    Raises:
        ValueError: A line that is not UTF-8 or that does not hold what it should.
    """
    with path.open("rb") as file:
        for number, data in enumerate(file, 1):
            advance(len(data))
            if not data.strip():
                continue
            try:
                text = data.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                yield Record(path, f"line {number}", parse(text))
            except UnicodeDecodeError as error:
                raise ValueError(f"{path}, line {number} is not UTF-8 ({error}); convert the file to UTF-8") from None
            except ValueError as error:
                raise ValueError(f"{path}, line {number} {error}") from None


def rows_of(
    path: Path, column: str, parse: Callable[[dict[str, Any]], Any], advance: Callable[[int], object]
) -> Iterator[Record]:
    """The rows of a table, as what they hold.

    Args:
        path: The table, in Parquet or as a stream or file of Arrow.
        column: The only column that is read.
        parse: Makes what a row holds of its values by column; a ValueError says what is wrong with it.
        advance: Called with about the bytes of the file that rows take.

    Raises:
        ValueError: A table that cannot be opened, has no such column, or a row that does not hold what it should.
    """
    with _Table(path) as table:
        if column not in table.columns:
            raise ValueError(
                f"{path} has no column {column!r}, only {', '.join(map(repr, table.columns)) or 'none'}; name the "
                "field of the text"
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


class _Table:
    """An open table.

    Args:
        path: The file; one whose name ends in .parquet is in Parquet, others are Arrow's, a stream or a file.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._arrow: Any = importlib.import_module("pyarrow")
        except ModuleNotFoundError as error:
            if error.name != "pyarrow":
                raise
            raise ValueError(f"reading the table {str(path)!r} needs pyarrow; pip install pyarrow") from None
        self._path = path
        try:
            self._open()
        except (OSError, ValueError) as error:  # pyarrow's own errors are of these kinds
            raise ValueError(f"the table {str(path)!r} cannot be read ({error}); mend or convert it") from None

    def _open(self) -> None:
        self._file: Any = self._arrow.memory_map(str(self._path))
        if self._path.suffix == ".parquet":
            self._table: Any = importlib.import_module("pyarrow.parquet").ParquetFile(self._file)
            self.columns, self.rows = list(self._table.schema_arrow.names), int(self._table.metadata.num_rows)
            return
        ipc = importlib.import_module("pyarrow.ipc")
        magic = self._file.read(6)
        self._file.seek(0)
        # A file of Arrow can be entered anywhere, a stream, as caches of data sets are, only at its beginning.
        reader = ipc.open_file(self._file) if magic == b"ARROW1" else ipc.open_stream(self._file)
        self._table = reader.read_all()  # which maps, and reads nothing yet
        self.columns, self.rows = list(self._table.schema.names), int(self._table.num_rows)

    def __enter__(self) -> "_Table":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def batches(self, column: str) -> Iterator[list[dict[str, Any]]]:
        """Rows, each as its values by column, some at a time.

        Raises:
            ValueError: What was begun cannot be read on.
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
                raise ValueError(f"the table {str(self._path)!r} cannot be read on ({error}); copy it anew") from None
            if rows is None:
                return
            yield rows
