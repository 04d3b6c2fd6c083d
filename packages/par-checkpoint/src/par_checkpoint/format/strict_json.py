"""JSON from files of strangers, read more strictly than Python's module does by itself."""

import json

from .._errors import corrupt


def parse_object(data: bytes, file: str) -> dict[str, object]:
    """Read a JSON object, strictly: UTF-8, no key twice, no NaN, no nesting without end.

    Raises:
        CorruptError: Anything else; the message names `file`.
    """
    try:
        value = json.loads(data.decode(), object_pairs_hook=_without_duplicates, parse_constant=_refused)
    except RecursionError:
        raise corrupt(file, "JSON that is nested too deep") from None
    except ValueError as error:  # also what is no UTF-8, and integers of thousands of digits
        check_no_pointer(data, file)
        raise corrupt(file, f"not the JSON that it should be ({error})") from error
    if not isinstance(value, dict):
        raise corrupt(file, f"holds a JSON {type(value).__name__} where an object belongs")
    return value


_POINTER = b"version https://git-lfs.github.com/spec/"


def check_no_pointer(data: bytes, file: str) -> None:
    """Raise CorruptError for what Git LFS keeps in the place of a file that was not downloaded."""
    if data.startswith(_POINTER):
        raise corrupt(file, "is a pointer of Git LFS, in whose place `git lfs pull` puts the file itself")


def text_map(value: object, where: str) -> dict[str, str]:
    """Return a JSON object after a check that its values are all texts.

    Raises:
        CorruptError: Anything else; the message names `where`.
    """
    if not isinstance(value, dict):
        raise corrupt(where, f"{value!r:.80} is no map of texts")
    for key, text in value.items():
        if not isinstance(text, str):
            raise corrupt(where, f"{key!r} is {text!r:.80}, not a text")
    return value


def is_count(value: object) -> bool:
    """Return whether a JSON value is a whole number of at least 0; booleans are not."""
    return type(value) is int and value >= 0


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"{twice!r} is there twice")
    return values


def _refused(constant: str) -> object:
    raise ValueError(f"{constant} is no JSON")
