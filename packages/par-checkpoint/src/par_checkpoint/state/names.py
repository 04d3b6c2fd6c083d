"""What a tensor of the model is called in the files."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

Names = Mapping[str, str] | Sequence[tuple[str, str]] | Callable[[str], str]


def rename(names: Names | None, keys: Iterable[str]) -> dict[str, str]:
    """The name in the files of each name in the model.

    Args:
        names: A mapping of model names, where names that it lacks stay as they are and names that are not here, such
            as those of another pipeline stage, do not count; or pairs of a regular expression and its replacement, each
            applied to what the one before left; or a function of the model's name.
        keys: The model's names, tied tensors once.

    Raises:
        ValueError: A broken regular expression, or two tensors that would share one name.
        TypeError: `names` is nothing of the kind.
    """
    keys = tuple(keys)
    renamed = _renamed(names, keys)
    first: dict[str, str] = {}
    for key, name in renamed.items():
        other = first.setdefault(name, key)
        if other != key:
            raise ValueError(
                f"names maps both {other!r} and {key!r} to {name!r}; each tensor needs a name of its own in the files"
            )
    return renamed


def _renamed(names: object, keys: Sequence[str]) -> dict[str, str]:
    if names is None:
        return {key: key for key in keys}
    if isinstance(names, Mapping):
        return _by_mapping(names, keys)
    if callable(names):
        return {key: _text(names(key), f"names({key!r})") for key in keys}
    if isinstance(names, Sequence) and not isinstance(names, str | bytes):
        return _by_expressions(names, keys)
    raise TypeError(f"names is {names!r}; give a dict, pairs of (regular expression, replacement), or a function")


def _by_mapping(names: Mapping[str, object], keys: Sequence[str]) -> dict[str, str]:
    return {key: _text(names[key], f"names[{key!r}]") if key in names else key for key in keys}


def _by_expressions(names: Sequence[object], keys: Sequence[str]) -> dict[str, str]:
    renamed = {key: key for key in keys}
    for pair in names:
        if not (isinstance(pair, Sequence) and not isinstance(pair, str) and len(pair) == 2):
            raise TypeError(f"names has {pair!r}; each item is a pair of a regular expression and its replacement")
        pattern, replacement = (_text(each, f"{pair!r} in names") for each in pair)
        try:
            expression = re.compile(pattern)
            renamed = {key: expression.sub(replacement, name) for key, name in renamed.items()}
        except re.error as error:
            raise ValueError(f"{pair!r} in names is not a regular expression and its replacement: {error}") from None
    return renamed


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{what} is {value!r}; names are strings")
    return value
