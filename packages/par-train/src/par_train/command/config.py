"""From a config file and command-line flags to `Options`, with every value checked. Pure but for reading the file."""

import dataclasses
import difflib
import inspect
import math
import runpy
import tomllib
import traceback
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from .._errors import UserError
from ..jobs.options import SECTIONS, Options


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One key of a config, such as `train.steps`: what it takes and what it means."""

    key: str
    kind: Any
    default: Any
    help: str
    low: float | None
    high: float | None


def load_options(path: Path | None, flags: Mapping[str, Any]) -> Options:
    """Reads a config file, if there is one, and lets flags win over it.

    Args:
        path: A TOML file, or a Python file whose names are the keys.
        flags: Dotted keys and values; text is read as the key's type demands.

    Raises:
        UserError: A file that cannot be read, an unknown key, or a value of the wrong type or out of range.
    """
    tree = read_file(path) if path is not None else {}
    known = {setting.key: setting for setting in settings()}
    for key, value in flags.items():
        if not key.startswith("parallel.") and key not in known:
            raise unknown_key(key)
        text = isinstance(value, str)
        _put(tree, key, _from_text(value, known[key].kind if key in known else None) if text else value)
    return build_options(tree)


def read_file(path: Path) -> dict[str, Any]:
    """The tables of a config file.

    Raises:
        UserError: There is no such file, or there is a mistake in it.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"cannot read the config file {path}: {error.strerror}; give the path of a TOML or Python file"
        ) from None
    if path.suffix == ".py":
        return _run_python(path)
    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"the config file {path} is not TOML: {error}; mend that line") from None


def _run_python(path: Path) -> dict[str, Any]:
    """The names that a Python file sets, without those with a leading underscore and what it imports or defines."""
    try:
        names = runpy.run_path(str(path))
    except (Exception, SystemExit) as error:  # the file's own mistake, whichever it is
        places = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line, what = (error.lineno, error.msg) if isinstance(error, SyntaxError) and not places else (places[-1], error)
        raise UserError(f"the config file {path}, line {line}: {type(error).__name__}: {what}; mend it") from error
    defined = (inspect.ismodule, inspect.isroutine, inspect.isclass)
    return {
        name: value
        for name, value in names.items()
        if not name.startswith("_") and not any(is_so(value) for is_so in defined)
    }


def build_options(tree: Mapping[str, Any]) -> Options:
    """Options from nested tables; keys that are left out keep their defaults.

    Raises:
        UserError: As `load_options`.
    """
    known = {setting.key: setting for setting in settings()}
    values: dict[str, dict[str, Any]] = {name: {} for name in ("", *SECTIONS)}
    for key, value in _leaves(tree):
        if key not in known:
            raise unknown_key(key)
        section, _, name = key.rpartition(".")
        values[section][name] = checked(known[key], _plain(key, value))
    parallel = _plain("parallel", tree.get("parallel", {}))
    if not isinstance(parallel, Mapping):
        raise UserError(f"parallel is {parallel!r}; it must be a table, such as [parallel] data = 2")
    sections = {name: kind(**values[name]) for name, kind in SECTIONS.items()}
    return Options(**values[""], **sections, parallel=dict(parallel))


def to_tree(options: Options) -> dict[str, Any]:
    """Nested dicts that `build_options` reads again."""
    return dataclasses.asdict(options)


def settings() -> Iterator[Setting]:
    """Every key but those of `parallel`, in the order of the dataclasses."""
    for section, kind in {"": Options, **SECTIONS}.items():
        hints = get_type_hints(kind)
        for each in dataclasses.fields(kind):
            if "help" in each.metadata:
                key = f"{section}.{each.name}" if section else each.name
                yield Setting(key=key, kind=hints[each.name], default=each.default, **each.metadata)


def unknown_key(key: str) -> UserError:
    """The error for a key that does not exist, with the nearest that does."""
    keys = [setting.key for setting in settings()]
    tables = [*SECTIONS, "parallel"]
    inside = [each for each in [*keys, "parallel.data"] if each.startswith(f"{key}.")]
    if inside:
        return UserError(f"{key} is a table; set what is in it, such as {inside[0]}")
    by_name = {name.rpartition(".")[2]: name for name in keys}
    near = difflib.get_close_matches(key, [*keys, *tables], n=1)
    near = near or [by_name[name] for name in difflib.get_close_matches(key.rpartition(".")[2], by_name, n=1)]
    if near:
        return UserError(f"unknown key {key!r}; did you mean {near[0]!r}?")
    return UserError(f"unknown key {key!r}; known keys: {', '.join([*keys, *tables])}")


def checked(setting: Setting, value: Any) -> Any:
    """The value as its type, within its limits.

    Raises:
        UserError: It does not fit.
    """
    for kind in alternatives(setting.kind):
        fitted = _fit(value, kind)
        if fitted is not None:
            _check_range(setting, fitted)
            return fitted
    raise UserError(f"{setting.key} is {value!r} ({type(value).__name__}); it must be {expected(setting.kind)}")


def expected(kind: Any) -> str:
    """A type in words."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
    if get_origin(kind) is Literal:
        return " or ".join(repr(choice) for choice in get_args(kind))
    if get_origin(kind) is tuple:
        return "a list of strings" if get_args(kind)[0] is str else 'a list of tables with a type, [{type = "name"}]'
    return " or ".join(words[each] if each in words else expected(each) for each in alternatives(kind))


def alternatives(kind: Any) -> tuple[Any, ...]:
    """The members of a union, or the type itself."""
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _fit(value: Any, kind: Any) -> Any:
    """The value as that type, or None."""
    if get_origin(kind) is Literal:
        return value if value in get_args(kind) else None
    if get_origin(kind) is tuple:
        belongs = _is_string if get_args(kind)[0] is str else _is_typed
        return tuple(value) if isinstance(value, list) and all(map(belongs, value)) else None
    if kind is float and type(value) is int:
        return float(value)
    return value if type(value) is kind else None  # exactly: True is no whole number here


def _is_string(value: Any) -> bool:
    return isinstance(value, str)


def _is_typed(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("type"), str)


def _plain(key: str, value: Any) -> Any:
    """The value as JSON gives it back to a rank; a Python file may hold what JSON does not."""
    if isinstance(value, Mapping):
        return {str(name): _plain(f"{key}.{name}", inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(key, inner) for inner in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise UserError(f"{key} holds {value!r} ({type(value).__name__}); use strings, numbers, lists and tables alone")


def _check_range(setting: Setting, value: Any) -> None:
    if isinstance(value, str | bool | tuple):
        return
    low = -math.inf if setting.low is None else setting.low
    high = math.inf if setting.high is None else setting.high
    if low <= value <= high and (isinstance(value, int) or math.isfinite(value)):
        return
    limits = [f"at least {low:g}"] if math.isfinite(low) else []
    limits += [f"at most {high:g}"] if math.isfinite(high) else []
    limits += ["finite"] if isinstance(value, float) else []
    raise UserError(f"{setting.key} is {value!r}; it must be {' and '.join(limits)}")


def _from_text(text: str, kind: Any) -> Any:
    """A flag's text as the value that a config file would hold; text that does not fit stays text."""
    if get_origin(kind) is tuple and get_args(kind)[0] is str:
        return [each for each in text.split(",") if each]
    wanted = alternatives(kind)
    for each in (int, float):
        if each in wanted:
            try:
                return each(text)
            except ValueError:
                continue
    return _from_toml(text) if kind is None or get_origin(kind) is tuple else text


def _from_toml(text: str) -> Any:
    """What the text means in TOML, or the text itself: 2 is a number, true a bool, 2d a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    """Sets a dotted key; `parallel.tensor = 2` makes way for `parallel.tensor.mode` as its size."""
    *path, name = key.split(".")
    for depth, part in enumerate(path):
        inner = tree.setdefault(part, {})
        if not isinstance(inner, dict):
            if depth == 0:
                raise UserError(f"{part} is {inner!r}; it must be a table")
            inner = {"size": inner}
        tree[part] = inner
        tree = inner
    tree[name] = value


def _leaves(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of everything but `parallel`."""
    for name, value in tree.items():
        if name in SECTIONS:
            if not isinstance(value, Mapping):
                raise UserError(f"{name} is {value!r}; it must be a table, [{name}]")
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        elif name != "parallel":
            yield name, value
