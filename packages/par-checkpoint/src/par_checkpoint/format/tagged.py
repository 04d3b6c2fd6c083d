"""Values as JSON that comes back as it was: tuples, int keys, inf, bytes, sets and tensors included.

What JSON cannot say is an object with one key that begins with "$", and the type after it: {"$tuple": [1, 2]}. Types
are told exactly: an object of a subclass is refused, for it would come back as something else.
"""

import base64
import collections
import json
import math
import pathlib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from .._errors import CheckpointError, corrupt
from .dtypes import safetensors_name
from .manifest import MANIFEST

_DEPTH = 100  # far below where reading JSON ends
_PLAIN = 64  # bits of a whole number that JSON readers agree on

_Path = tuple[object, ...]


def encode(value: object, tensors: dict[str, torch.Tensor], where: str) -> Any:
    """A value as what `json.dumps(..., allow_nan=False)` takes.

    Args:
        value: None, numbers, texts, bytes, paths, torch's dtypes, devices and sizes, tensors, NumPy arrays and numbers,
            and lists, tuples, sets, dicts, OrderedDicts and Counters of them.
        tensors: Takes the tensors, uncopied, by names that begin with `where`. They come back on the CPU.
        where: What the value is called, for names and messages.

    Raises:
        TypeError: Anything else; the message names where it is.
        ValueError: A tensor with a dtype that files cannot hold.
    """
    return _Encoder(tensors, where).any(value, ())


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> object:
    """The value again.

    Args:
        value: What `encode` gave, perhaps through JSON.
        tensors: By name, the tensors that it refers to.

    Raises:
        CorruptError: Nothing that `encode` gives, or a tensor that is not there.
    """
    try:
        return _Decoder(tensors).any(value)
    except CheckpointError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, RuntimeError) as error:
        raise corrupt(MANIFEST, f"holds a value that cannot be read ({type(error).__name__}: {error})") from error


def check_round_trip(value: object, where: str) -> None:
    """Makes sure that a value comes back from JSON as it was.

    Raises:
        TypeError: It does not; the message names where.
        ValueError: A tensor with a dtype that files cannot hold.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(value, tensors, where), allow_nan=False)
    difference = _difference(value, decode(json.loads(text), tensors), ())
    if difference is not None:
        raise TypeError(f"{_spoken(where, difference)} does not come back from JSON as it was; give it in another form")


@dataclass(frozen=True)
class _Leaf:
    """How a type without parts is written and read."""

    tag: str
    write: Callable[[Any], object]
    read: Callable[[Any], object]


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch.{name} is no dtype")
    return found


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


_LEAVES: dict[type, _Leaf] = {
    int: _Leaf("$int", hex, lambda text: int(text, 16)),
    float: _Leaf("$float", repr, float),
    complex: _Leaf("$complex", lambda z: [repr(z.real), repr(z.imag)], lambda z: complex(float(z[0]), float(z[1]))),
    bytes: _Leaf("$bytes", _base64, base64.b64decode),
    bytearray: _Leaf("$bytearray", _base64, lambda text: bytearray(base64.b64decode(text))),
    range: _Leaf("$range", lambda r: [r.start, r.stop, r.step], lambda three: range(*three)),
    type(pathlib.Path()): _Leaf("$path", str, pathlib.Path),
    pathlib.PurePosixPath: _Leaf("$posix_path", str, pathlib.PurePosixPath),
    pathlib.PureWindowsPath: _Leaf("$windows_path", str, pathlib.PureWindowsPath),
    torch.Size: _Leaf("$size", list, torch.Size),
    torch.dtype: _Leaf("$dtype", lambda dtype: str(dtype).removeprefix("torch."), _dtype),
    torch.device: _Leaf("$device", str, torch.device),
}
_ROWS: dict[type, str] = {tuple: "$tuple", set: "$set", frozenset: "$frozenset"}
_MAPS: dict[type, str] = {dict: "$dict", collections.OrderedDict: "$ordered_dict", collections.Counter: "$counter"}

_LEAF_OF = {leaf.tag: leaf for leaf in _LEAVES.values()}
_ROW_OF: dict[str, Callable[[Iterable[object]], object]] = {tag: kind for kind, tag in _ROWS.items()}
_MAP_OF: dict[str, Callable[[dict[object, object]], object]] = {tag: kind for kind, tag in _MAPS.items()}


class _Encoder:
    """Writes one value."""

    def __init__(self, tensors: dict[str, torch.Tensor], where: str) -> None:
        self._tensors, self._where = tensors, where

    def any(self, value: object, path: _Path) -> Any:
        kind = type(value)
        if len(path) > _DEPTH:
            spoken = _spoken(self._where, path[:4])
            raise TypeError(f"{spoken}... is nested deeper than {_DEPTH}, or holds itself; give it in a flatter form")
        if value is None or kind in (bool, str) or _is_plain_number(value):
            return value
        if kind in _LEAVES:
            return {_LEAVES[kind].tag: _LEAVES[kind].write(value)}
        if kind is list or kind in _ROWS:
            return self._row(value, path)
        if kind in _MAPS:
            return self._map(value, path)
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._keep(value, path)}
        return self._numpy(value, path)

    def _row(self, value: Any, path: _Path) -> Any:
        items = [self.any(item, (*path, place)) for place, item in enumerate(value)]
        if isinstance(value, set | frozenset):  # whose order differs from process to process
            items.sort(key=json.dumps)
        return items if isinstance(value, list) else {_ROWS[type(value)]: items}

    def _map(self, value: Any, path: _Path) -> Any:
        if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.any(item, (*path, key)) for key, item in value.items()}
        pairs = []
        for key, item in value.items():
            if isinstance(key, torch.Tensor):  # equal to nothing but itself
                raise self._refusal(key, (*path, "a key"))
            pairs.append([self.any(key, (*path, key)), self.any(item, (*path, key))])
        return {_MAPS[type(value)]: pairs}

    def _keep(self, tensor: torch.Tensor, path: _Path) -> str:
        if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise TypeError(
                f"{_spoken(self._where, path)} is a {type(tensor).__name__} ({tensor.layout}, {tensor.device}), not an "
                "ordinary tensor with data; give it whole, dense and detached"
            )
        plain = ".".join([self._where, *map(str, path)])
        name, number = plain, 2
        while name in self._tensors:  # the keys "a.b" and "a", then "b", read alike
            name, number = f"{plain}#{number}", number + 1
        safetensors_name(tensor.dtype, name)
        self._tensors[name] = tensor.detach().resolve_conj().resolve_neg()
        return name

    def _numpy(self, value: Any, path: _Path) -> Any:
        """An array or number of NumPy, which can only be one if NumPy is there."""
        numpy = sys.modules.get("numpy")
        array = numpy is not None and type(value) is numpy.ndarray
        if numpy is None or not (array or isinstance(value, numpy.generic)):
            raise self._refusal(value, path)
        try:
            tensor = torch.from_numpy(numpy.array(value, order="C"))
        except (TypeError, ValueError, RuntimeError) as error:  # of texts, dates, objects, or the other byte order
            raise self._refusal(value, path) from error
        if array:
            return {"$array": self._keep(tensor, path)}
        return {"$number": [str(tensor.dtype).removeprefix("torch."), self.any(tensor.item(), path)]}

    def _refusal(self, value: object, path: _Path) -> TypeError:
        kind = type(value)
        return TypeError(
            f"{_spoken(self._where, path)} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot say "
            "without pickle; give its state_dict(), or numbers, texts, tensors, and lists and dicts of them"
        )


class _Decoder:
    """Reads one value."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def any(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.any(item) for item in value]
        if not isinstance(value, dict):
            return value
        tag = next(iter(value), "")
        if tag.startswith("$"):
            if len(value) != 1:
                raise ValueError(f"{tag} has further keys beside it")
            return self._tagged(tag, value[tag])
        return {key: self.any(item) for key, item in value.items()}

    def _tagged(self, tag: str, value: Any) -> object:
        if tag in _LEAF_OF:
            return _LEAF_OF[tag].read(value)
        if tag in _ROW_OF:
            return _ROW_OF[tag]([self.any(item) for item in value])
        if tag in _MAP_OF:
            return _MAP_OF[tag]({self.any(key): self.any(item) for key, item in value})
        if tag == "$number":
            return _as_numpy(torch.tensor(self.any(value[1]), dtype=_dtype(value[0]), device="cpu"))
        if tag not in ("$tensor", "$array"):
            raise ValueError(f"{tag} is no type that this version knows")
        tensor = self._tensors[value]
        return tensor if tag == "$tensor" else _as_numpy(tensor, array=True)


def _is_plain_number(value: object) -> bool:
    if type(value) is int:
        return value.bit_length() <= _PLAIN
    return type(value) is float and math.isfinite(value)


def _as_numpy(tensor: torch.Tensor, *, array: bool = False) -> object:
    """An array or number of NumPy; without NumPy, the tensor or Python's number."""
    try:
        found: Any = tensor.numpy()
    except RuntimeError:  # torch says so when NumPy is not there
        return tensor if array else tensor.item()
    return found if array else found[()]


def _difference(one: Any, two: Any, path: _Path) -> _Path | None:
    """Where two values first differ, in type or value; NaN equals NaN."""
    if type(one) is not type(two):
        return path
    if isinstance(one, torch.Tensor):  # which JSON only names
        return None if one.dtype == two.dtype and one.shape == two.shape else path
    if type(one) in _MAPS:
        pairs = zip(one, one.values(), two.values(), strict=False)
        differences = (_difference(a, b, (*path, key)) for key, a, b in pairs)
        return path if _difference(list(one), list(two), ()) is not None else _first(differences)
    if isinstance(one, list | tuple) and len(one) == len(two):
        return _first(_difference(a, b, (*path, place)) for place, (a, b) in enumerate(zip(one, two, strict=True)))
    if isinstance(one, set | frozenset):
        return None if _texts(one) == _texts(two) else path
    return None if _bits(one) == _bits(two) else path


def _first(found: Iterable[_Path | None]) -> _Path | None:
    return next((path for path in found if path is not None), None)


def _bits(value: Any) -> object:
    """Something that is equal exactly where values of one type are the same, -0.0 and NaN told apart."""
    if type(value).__name__ == "ndarray":
        return (str(value.dtype), value.shape, value.tobytes())
    number = isinstance(value, float | complex) or hasattr(value, "dtype")
    return repr(value) if number else value


def _texts(values: Iterable[object]) -> list[str]:
    return sorted(json.dumps(encode(value, {}, "")) for value in values)


def _spoken(where: str, path: _Path) -> str:
    return where + "".join(f"[{key!r:.60}]" for key in path)
