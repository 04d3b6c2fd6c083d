"""The types of options: how to parse a flag's text, and how to check the value of a config file."""

import tomllib
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from par_groups import parse_size


@dataclass(frozen=True, kw_only=True)
class OptionType:
    """One type of value.

    Args:
        words: Description for error messages.
        metavar: Placeholder in the help of a flag.
        read: Function from a flag's text to the value of a config file; raises ValueError for other text.
        fit: Function from the value of a config file to the option's value; returns None for another type.
    """

    words: str
    metavar: str
    read: Callable[[str], Any]
    fit: Callable[[Any], Any]


def kinds_of(hint: Any) -> tuple[OptionType, ...]:
    """Return the kinds of value that a type hint allows: several for a union such as `int | Literal["auto"]`."""
    hints = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return tuple(_kind_of(one) for one in hints)


def read_toml_value(text: str) -> Any:
    """Parse a text as a TOML value, or return the text: 2 is a number, true a bool, 2d a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _kind_of(hint: Any) -> OptionType:
    if get_origin(hint) is Literal:
        choices = get_args(hint)
        return OptionType(
            words=" or ".join(repr(choice) for choice in choices),
            metavar="|".join(choices),
            read=str,
            fit=lambda value: value if isinstance(value, str) and value in choices else None,
        )
    if get_origin(hint) is tuple:
        return {str: _STRINGS, int: _NUMBERS}.get(get_args(hint)[0], _TABLES)
    return _KINDS[hint]


def _exactly(kind: type) -> Callable[[Any], Any]:
    """Return a function that accepts values of a type, but not of its subclasses, so that True is no integer."""
    return lambda value: value if type(value) is kind else None


def _fit_number(value: Any) -> float | None:
    try:
        # `type` and not isinstance, since True is an int.
        return float(value) if type(value) in (int, float) else None
    except OverflowError:  # a whole number of more than 308 digits
        return None


def _fit_bytes(value: Any) -> float | None:
    try:
        if isinstance(value, str):  # also rates, such as "400GB/s"
            return float(parse_size(value.strip().removesuffix("/s"), example="80GB"))
        return _fit_number(value)
    except ValueError:
        return None


def _list_of(kind: type, words: str, metavar: str) -> OptionType:
    """Make the type of a list, which a flag takes with commas."""
    return OptionType(
        words=words,
        metavar=metavar,
        read=lambda text: [kind(item) for item in text.split(",") if item],
        # `type` and not isinstance, since True is an int.
        fit=lambda value: tuple(value) if type(value) is list and all(type(item) is kind for item in value) else None,
    )


def tables_with(key: str, example: str, metavar: str) -> OptionType:
    """Make the kind of a list of tables, each of which has a text under a key.

    Args:
        key: Key of the text.
        example: Example for error messages.
        metavar: Placeholder in the help of a flag.
    """

    def fit(value: Any) -> tuple[Mapping[str, Any], ...] | None:
        is_list = isinstance(value, list)
        typed = is_list and all(isinstance(item, dict) and isinstance(item.get(key), str) for item in value)
        return tuple(value) if typed else None

    return OptionType(words=f"a list of tables with a {key}, {example}", metavar=metavar, read=read_toml_value, fit=fit)


BOOL = OptionType(words="true or false", metavar="", read=read_toml_value, fit=_exactly(bool))
BYTES = OptionType(words="a size, such as 80GB or 80GiB", metavar="SIZE", read=str, fit=_fit_bytes)
_STRINGS = _list_of(str, "a list of strings", "A,B")
_NUMBERS = _list_of(int, "a list of whole numbers", "N,N")
SOURCES = tables_with("path", '[{path = "web.parquet", weight = 2}]', '[{path="A",weight=1}]')
_TABLES = tables_with("type", '[{type = "name"}]', '[{type="A"}]')
_KINDS: Mapping[Any, OptionType] = {
    int: OptionType(words="a whole number", metavar="N", read=int, fit=_exactly(int)),
    float: OptionType(words="a number", metavar="X", read=float, fit=_fit_number),
    str: OptionType(words="a string", metavar="TEXT", read=str, fit=_exactly(str)),
    bool: BOOL,
}
