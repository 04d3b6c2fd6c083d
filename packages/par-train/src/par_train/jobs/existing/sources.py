"""The training data of a Hugging Face Transformers model: one path of the options, or several with weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from par_data import find_corpus_files, is_corpus

from ..._errors import UserError, as_user_error
from ..options import DataOptions

_FORMATS = ("auto", "text", "jsonl", "chat")


@dataclass(frozen=True, kw_only=True)
class CorpusSource:
    """One path of text.

    Args:
        key: Key of the path in the options, such as "data.path".
        path: The path, as it was given.
        weight: Weight in the mixture, relative to the other sources; None for a single source.
        format: Format of a line or row for `read_corpus`.
        field: Key of the text in an object.
    """

    key: str
    path: str
    weight: float | None
    format: str
    field: str

    @property
    def place(self) -> Path:
        """The path, from the root or the working folder."""
        return Path(self.path).expanduser()

    def check(self) -> None:
        """Check that the path has files of one kind.

        Raises:
            UserError: There are no files, or files of several kinds.
        """
        if is_corpus(self.place):
            return
        with as_user_error(f"{self.key}: "):
            find_corpus_files(self.place)


def sources_of(data: DataOptions, key: str) -> list[CorpusSource]:
    """Return the sources of text that the options name.

    Args:
        data: Options of the data.
        key: Option that names the model, which needs text; for errors.

    Raises:
        UserError: The options name no source, or both a path and sources, or a source has a wrong value.
    """
    if data.path and data.sources:
        several = f"{len(data.sources)} path{'s' if len(data.sources) > 1 else ''}"
        raise UserError(f"data.path is {data.path!r}, and data.sources names {several}; give one of both")
    if data.path:
        return [CorpusSource(key="data.path", path=data.path, weight=None, format=data.format, field=data.field)]
    if not data.sources:
        raise UserError(f"{key}, but data.path is missing; name the file to train on")
    found = [_source(f"data.sources[{number}]", each, data) for number, each in enumerate(data.sources)]
    paths = [source.path for source in found]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise UserError(f"data.sources has {twice!r} twice; name it once, with both weights together")
    return found


def _source(key: str, given: Mapping[str, Any], data: DataOptions) -> CorpusSource:
    unknown = [name for name in given if name not in ("path", "weight", "format", "field")]
    if unknown:
        raise UserError(f"{key} has {unknown[0]!r}; it can have path, weight, format and field")
    path, weight = str(given["path"]), given.get("weight")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < inf:
        raise UserError(f"{key}, {path!r}, has the weight {weight!r}; give a number above 0: its part of the rows")
    kind, field = given.get("format", data.format), given.get("field", data.field)
    if kind not in _FORMATS:
        raise UserError(f"{key}, {path!r}, has the format {kind!r}; it can be {', '.join(map(repr, _FORMATS))}")
    if not isinstance(field, str) or not field:
        raise UserError(f"{key}, {path!r}, has the field {field!r}; give the name of a key or a column")
    return CorpusSource(key=key, path=path, weight=float(weight), format=str(kind), field=field)
