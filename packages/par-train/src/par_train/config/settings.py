"""Options as a frozen dataclass whose fields carry help and limits: listed for the help, filled with checked values.

A field whose type is a dataclass of options is a table of the config file; a field made without `option`, such as
`parallel`, is a table whose keys somebody else checks.
"""

import dataclasses
import difflib
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from .._errors import UserError
from .files import read_file
from .kinds import OptionType, kinds_of, read_toml_value

OptionsType = TypeVar("OptionsType")


class FlagsAlone:
    """Base of options that no config file can hold: they are flags, with hyphens in their names."""


def option(
    default: Any,
    text: str,
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    kind: OptionType | None = None,
) -> Any:
    """Return a field of a dataclass of options, with its help and limits for the command line and config files.

    Args:
        default: Default value; `dataclasses.MISSING` for a required option.
        text: Line of help.
        low: Smallest allowed value.
        above: Number that the value must exceed.
        high: Largest allowed value.
        kind: Type of the value, such as `kinds.BYTES`. Default: the type of the field.
    """
    limits = {"above": above, "at least": low, "at most": high}
    limits = {words: limit for words, limit in limits.items() if limit is not None}
    return field(default=default, metadata={"help": text, "limits": limits, "kind": kind})


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One key of a config file, and its flag.

    Args:
        name: Name in errors: "train.steps", or "--device-memory" for an option that is only a flag.
        kinds: Types of value that the option accepts.
        default: Default value, or `dataclasses.MISSING`.
        help: Line of help.
        limits: Limits by kind: "above", "at least", "at most".
    """

    name: str
    kinds: tuple[OptionType, ...]
    default: Any
    help: str
    limits: Mapping[str, float]

    @property
    def flag(self) -> str:
        """The flag of the command line, such as "--train.steps"."""
        return self.name if self.name.startswith("--") else f"--{self.name}"

    def read(self, text: str) -> Any:
        """Return the value of a config file for a flag's text; the text itself if no kind can parse it."""
        for kind in self.kinds:
            try:
                return kind.read(text)
            except ValueError:
                continue
        return text

    def check(self, value: Any) -> Any:
        """Return the option's value for the value of a config file.

        Raises:
            UserError: The value has another type, or is outside of its limits.
        """
        # A union such as int or "auto" takes the first kind that accepts the value.
        fitted = next((fitted for kind in self.kinds if (fitted := kind.fit(value)) is not None), None)
        if fitted is None:
            words = " or ".join(kind.words for kind in self.kinds)
            raise UserError(f"{self.name} is {value!r} ({type(value).__name__}); it must be {words}")
        if type(fitted) in (int, float):
            rules = [f"{words} {limit:g}" for words, limit in self.limits.items()]
            if isinstance(fitted, float) and "at most" not in self.limits:
                rules.append("finite")
            kept = all(_COMPARE[words](fitted, limit) for words, limit in self.limits.items())
            if not kept or not (isinstance(fitted, int) or math.isfinite(fitted)):
                raise UserError(f"{self.name} is {fitted!r}; it must be {' and '.join(rules)}")
        return fitted


_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    "above": operator.gt,
    "at least": operator.ge,
    "at most": operator.le,
}


def settings(options: Any) -> Mapping[str, Setting]:
    """Return the settings of a dataclass of options and of its tables, by dotted path, in order."""
    listed: dict[str, Setting] = {}
    hints = get_type_hints(options)
    for one in dataclasses.fields(options):
        # A field that `option` has made has metadata. Any other one is a table: of options, or with free keys.
        if one.metadata:
            listed[one.name] = Setting(
                name=f"--{one.name.replace('_', '-')}" if issubclass(options, FlagsAlone) else one.name,
                kinds=(one.metadata["kind"],) if one.metadata["kind"] else kinds_of(hints[one.name]),
                default=one.default,
                help=one.metadata["help"],
                limits=one.metadata["limits"],
            )
        elif dataclasses.is_dataclass(table := hints[one.name]):
            for key, setting in settings(table).items():
                path = f"{one.name}.{key}"
                listed[path] = dataclasses.replace(setting, name=path)
    return listed


def build(options: type[OptionsType], tree: Mapping[str, Any]) -> OptionsType:
    """Make options from nested tables. Missing keys keep their defaults.

    Args:
        options: A dataclass whose fields are made by `option`, are such dataclasses, or are free tables.
        tree: Content of a config file.

    Raises:
        UserError: A key does not exist, or a value has a wrong type or is outside of its limits.
    """
    known = settings(options)
    hints = get_type_hints(options)
    values: dict[str, Any] = {}
    for name, value in _plain("", tree).items():
        if name in known:
            values[name] = known[name].check(value)
        elif name not in hints:
            raise unknown_key(options, name)
        elif not isinstance(value, dict):
            raise UserError(f"{name} is {value!r}, but {unknown_key(options, name)}")
        elif dataclasses.is_dataclass(hints[name]):
            for key in value:
                if f"{name}.{key}" not in known:
                    raise unknown_key(options, f"{name}.{key}")
            values[name] = hints[name](**{key: known[f"{name}.{key}"].check(inner) for key, inner in value.items()})
        else:
            values[name] = value
    return options(**values)


def load(options: type[OptionsType], path: Path | None, flags: Mapping[str, Any]) -> OptionsType:
    """Make options from a config file, if there is one, and from flags, which override it.

    Args:
        options: A dataclass as for `build`.
        path: A TOML file, or a Python file whose names are the keys.
        flags: Values by dotted path; a text is parsed by the option's type.

    Raises:
        UserError: The file is not readable, a key does not exist, or a value has a wrong type or is outside of its
            limits.
    """
    tree = {} if path is None else read_file(path)
    known = settings(options)
    for key, value in flags.items():
        read = known[key].read if key in known else read_toml_value
        _put(tree, key, read(value) if isinstance(value, str) else value)
    return build(options, tree)


def unknown_key(options: type, key: str) -> UserError:
    """Return the error for a key that does not exist or is a table. The error names the key to use."""
    names = list(settings(options))
    tables = [one.name for one in dataclasses.fields(options) if not one.metadata]
    if key in tables:
        inside = next((name for name in names if name.startswith(f"{key}.")), f"{key}.data")
        return UserError(f"{key} is a table, [{key}]; set what is in it, such as {inside}")
    by_last = {name.rpartition(".")[2]: name for name in names}
    # A user often forgets the table, so the last word of each key is compared as well.
    near = difflib.get_close_matches(key, [*names, *tables], n=1)
    near = near or [by_last[last] for last in difflib.get_close_matches(key.rpartition(".")[2], by_last, n=1)]
    if near:
        return UserError(f"unknown key {key!r}; did you mean {near[0]!r}?")
    return UserError(f"unknown key {key!r}; known keys: {', '.join([*names, *tables])}")


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key. `parallel.tensor = 2` of a file becomes the size if a flag sets `parallel.tensor.mode`."""
    *path, name = key.split(".")
    for depth, part in enumerate(path):
        inner = tree.setdefault(part, {})
        if not isinstance(inner, dict):
            if depth == 0:
                return  # a value that is no table stays in the tree, and `build` raises
            inner = tree[part] = {"size": inner}
        tree = inner
    tree[name] = value


def _plain(key: str, value: Any) -> Any:
    """Return a value in the types of JSON, in which ranks receive it; a config file may have sets and dates."""
    if isinstance(value, Mapping):
        return {str(name): _plain(f"{key}.{name}" if key else str(name), inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(key, inner) for inner in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise UserError(f"{key} holds {value!r} ({type(value).__name__}); use strings, numbers, lists and tables alone")
