"""Values as JSON that comes back as it was: tuples, int keys, inf, bytes, sets and tensors included.

A value that JSON lacks becomes an object with one key that begins with "$" and names the type: {"$tuple": [1, 2]}. A
value must be of exactly such a type. An object of a subclass raises an error, because it would be loaded as another
type.
"""

import base64
import collections
import json
import math
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .._errors import CheckpointError, corrupt
from .header import safetensors_name
from .manifest import MANIFEST

_DEPTH = 100  # far below where reading JSON ends
_PLAIN = 64  # bits of a whole number that JSON readers agree on

_RANKS = "$ranks"  # a list of what differed between ranks, which no `encode` gives

_Path = tuple[object, ...]


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{name} is no dtype")
    return dtype


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


# Types without parts: their tag, how they are written and how they are read.
_SCALARS: dict[type, tuple[str, Callable[[Any], object], Callable[[Any], object]]] = {
    int: ("$int", hex, lambda text: int(text, 16)),
    float: ("$float", repr, float),
    complex: ("$complex", lambda z: [repr(z.real), repr(z.imag)], lambda z: complex(float(z[0]), float(z[1]))),
    bytes: ("$bytes", _base64, base64.b64decode),
    bytearray: ("$bytearray", _base64, lambda text: bytearray(base64.b64decode(text))),
    range: ("$range", lambda r: [r.start, r.stop, r.step], lambda three: range(*three)),
    type(pathlib.Path()): ("$path", str, pathlib.Path),
    pathlib.PurePosixPath: ("$posix_path", str, pathlib.PurePosixPath),
    pathlib.PureWindowsPath: ("$windows_path", str, pathlib.PureWindowsPath),
    torch.Size: ("$size", list, torch.Size),
    torch.dtype: ("$dtype", _dtype_name, _dtype),
    torch.device: ("$device", str, torch.device),
}
_ROWS: dict[type, str] = {tuple: "$tuple", set: "$set", frozenset: "$frozenset"}
_MAPS: dict[type, str] = {dict: "$dict", collections.OrderedDict: "$ordered_dict", collections.Counter: "$counter"}

_READ_SCALAR = {tag: read for tag, _, read in _SCALARS.values()}
_MAKE_ROW: dict[str, Callable[[list[Any]], object]] = {tag: kind for kind, tag in _ROWS.items()}
_MAKE_MAP: dict[str, Callable[[dict[Any, Any]], object]] = {tag: kind for kind, tag in _MAPS.items()}


def encode(value: object, tensors: dict[str, torch.Tensor], where: str) -> Any:
    """Return a value in a form that `json.dumps(..., allow_nan=False)` accepts.

    Args:
        value: None, numbers, texts, bytes, paths, torch's dtypes, devices and sizes, tensors, NumPy arrays and numbers,
            and lists, tuples, sets, dicts, OrderedDicts and Counters of them.
        tensors: Takes the tensors, uncopied, by names that begin with `where`. They come back on the CPU.
        where: Name of the value, in tensor names and messages.

    Raises:
        TypeError: Anything else; the message names where it is.
        ValueError: A tensor with a dtype that files cannot hold.
    """

    def encoded(value: Any, path: _Path) -> Any:
        kind = type(value)
        if len(path) > _DEPTH:
            start = _spoken(where, path[:4])
            raise TypeError(f"{start}... is nested deeper than {_DEPTH}, or holds itself; give it in a flatter form")
        if value is None or kind in (bool, str) or _is_plain_number(value):
            return value
        if kind in _SCALARS:
            tag, write, _ = _SCALARS[kind]
            return {tag: write(value)}
        # Only such a dict is read as plain JSON: a key that begins with "$" would be taken for a tag.
        if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: encoded(item, (*path, key)) for key, item in value.items()}
        if kind in _MAPS:
            for key in value:
                if isinstance(key, torch.Tensor):  # equal to nothing but itself
                    raise _refusal(key, where, (*path, "a key"))
            pairs = [[encoded(key, (*path, key)), encoded(item, (*path, key))] for key, item in value.items()]
            return {_MAPS[kind]: pairs}
        if kind is list or kind in _ROWS:
            items = [encoded(item, (*path, place)) for place, item in enumerate(value)]
            if kind in (set, frozenset):  # whose order differs from process to process
                items.sort(key=json.dumps)
            return items if kind is list else {_ROWS[kind]: items}
        if isinstance(value, torch.Tensor):
            return {"$tensor": _keep(value, tensors, where, path)}
        tensor, is_array = _of_numpy(value, where, path)
        if is_array:
            return {"$array": _keep(tensor, tensors, where, path)}
        return {"$number": [_dtype_name(tensor.dtype), encoded(tensor.item(), path)]}

    return encoded(value, ())


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> object:
    """Return the value that `encode` encoded.

    Args:
        value: Return value of `encode`, perhaps after a round trip through JSON.
        tensors: Tensors that the value refers to, by name.

    Raises:
        CorruptError: The value is not from `encode`, or a tensor is missing.
    """

    def decoded(value: Any) -> Any:
        if isinstance(value, list):
            return [decoded(item) for item in value]
        if not isinstance(value, dict):
            return value
        tag = next(iter(value), "")
        if not tag.startswith("$"):
            return {key: decoded(item) for key, item in value.items()}
        if len(value) != 1:
            raise ValueError(f"{tag} has further keys beside it")
        content = value[tag]
        if tag in _READ_SCALAR:
            return _READ_SCALAR[tag](content)
        if tag in _MAKE_ROW:
            return _MAKE_ROW[tag]([decoded(item) for item in content])
        if tag in _MAKE_MAP:
            return _MAKE_MAP[tag]({decoded(key): decoded(item) for key, item in content})
        if tag == "$number":
            return _to_numpy(torch.tensor(decoded(content[1]), dtype=_dtype(content[0]), device="cpu"), is_array=False)
        if tag == "$array":
            return _to_numpy(tensors[content], is_array=True)
        if tag == "$tensor":
            return tensors[content]
        if tag == _RANKS:
            return [decoded(item) for item in content]
        raise ValueError(f"{tag} is no type that this version knows")

    try:
        return decoded(value)
    except CheckpointError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        raise corrupt(MANIFEST, f"holds a value that cannot be read ({type(error).__name__}: {error})") from error


def check_round_trip(value: object, where: str) -> None:
    """Raise unless a value survives a round trip through JSON unchanged.

    Args:
        value: Argument of `encode`.
        where: Name of the value in messages.

    Raises:
        TypeError: The value changes; the message names the position.
        ValueError: A tensor has a dtype that files do not support.
    """
    tensors: dict[str, torch.Tensor] = {}
    again: dict[str, torch.Tensor] = {}
    one = encode(value, tensors, where)
    two = encode(decode(json.loads(json.dumps(one, allow_nan=False)), tensors), again, where)
    # The encoded values are compared, because a NaN differs from itself.
    path = _difference(one, two, ())
    changed = None if path is None else _spoken(where, path)
    for name in tensors if path is None else ():
        if tensors[name].dtype != again[name].dtype or tensors[name].shape != again[name].shape:
            changed = name
    if changed is not None:
        raise TypeError(f"{changed} does not come back from JSON as it was; give it in another form")


def _is_plain_number(value: object) -> bool:
    if type(value) is int:
        return value.bit_length() <= _PLAIN
    return type(value) is float and math.isfinite(value)


def join_ranks(encoded: list[Any]) -> Any:
    """Join the encoded values of several ranks, by rank, into one encoded value; `split_ranks` splits it again."""
    return {_RANKS: encoded}


def split_ranks(encoded: Any) -> list[Any] | None:
    """Return the encoded values of several ranks that `join_ranks` has joined; None for any other value."""
    return encoded[_RANKS] if isinstance(encoded, dict) and list(encoded) == [_RANKS] else None


def _keep(tensor: torch.Tensor, tensors: dict[str, torch.Tensor], where: str, path: _Path) -> str:
    """Put a tensor among the others, and give its name there."""
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
        raise TypeError(
            f"{_spoken(where, path)} is a {type(tensor).__name__} ({tensor.layout}, {tensor.device}), not an "
            "ordinary tensor with data; give it whole, dense and detached"
        )
    plain = ".".join([where, *map(str, path)])
    name, number = plain, 2
    while name in tensors:  # the keys "a.b" and "a", then "b", read alike
        name, number = f"{plain}#{number}", number + 1
    # Called for its error: a dtype that safetensors lacks is refused here, before a save writes anything.
    safetensors_name(tensor.dtype, name)
    # A conjugate or negative view is a flag of torch's tensor, which the bytes of a file lack.
    tensors[name] = tensor.detach().resolve_conj().resolve_neg()
    return name


def _of_numpy(value: Any, where: str, path: _Path) -> tuple[torch.Tensor, bool]:
    """Return a NumPy array or number as a tensor, and whether the value is an array.

    Raises:
        TypeError: The value is not from NumPy, or has a dtype that torch does not support.
    """
    numpy = sys.modules.get("numpy")
    is_array = numpy is not None and type(value) is numpy.ndarray
    if numpy is None or not (is_array or isinstance(value, numpy.generic)):
        raise _refusal(value, where, path)
    try:
        # torch takes no array with negative strides, and a copy in C order has none.
        return torch.from_numpy(numpy.array(value, order="C")), is_array
    except (TypeError, ValueError, RuntimeError) as error:  # of texts, dates, objects, or the other byte order
        raise _refusal(value, where, path) from error


def _to_numpy(tensor: torch.Tensor, *, is_array: bool) -> object:
    """Return an array or number of NumPy; without NumPy, the tensor or Python's number."""
    try:
        array: Any = tensor.numpy()
    except RuntimeError:  # torch says so when NumPy is not there
        return tensor if is_array else tensor.item()
    return array if is_array else array[()]


def _refusal(value: object, where: str, path: _Path) -> TypeError:
    kind = type(value)
    return TypeError(
        f"{_spoken(where, path)} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot say "
        "without pickle; give its state_dict(), or numbers, texts, tensors, and lists and dicts of them"
    )


def _difference(one: Any, two: Any, path: _Path) -> _Path | None:
    """Return the path at which two JSON values first differ, or None."""
    if type(one) is not type(two):
        return path
    if not isinstance(one, dict | list):
        return None if repr(one) == repr(two) else path  # -0.0 equals 0.0, but is not the same
    keys: list[Any] = list(one) if isinstance(one, dict) else list(range(len(one)))
    if keys != (list(two) if isinstance(two, dict) else list(range(len(two)))):
        return path
    places = (_difference(one[key], two[key], (*path, key)) for key in keys)
    return next((place for place in places if place is not None), None)


def _spoken(where: str, path: _Path) -> str:
    return where + "".join(f"[{key!r:.60}]" for key in path)
