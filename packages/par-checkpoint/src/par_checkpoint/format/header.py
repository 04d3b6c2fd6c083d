"""The header of a safetensors file: written as safetensors does but better aligned, and read more strictly."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from .._errors import CheckpointError, corrupt
from .dtypes import dtype_of, place_of, safetensors_name
from .strict_json import is_count, parse_object, text_map

MAX_HEADER = 100_000_000
"""Bytes of JSON that a header may have."""

_METADATA = "__metadata__"
_ALIGNMENT = 64  # of the data's first byte, as of torch's memory: a copy between unlike alignments is a quarter slower
_FIELDS = ["data_offsets", "dtype", "shape"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """One tensor of a file.

    Args:
        dtype: Of its elements.
        shape: The whole tensor's, row-major.
        begin: First byte, counted from where the data begins.
        end: One past the last byte.
    """

    dtype: torch.dtype
    shape: Shape
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a safetensors file holds.

    Args:
        tensors: By name, in the order of their bytes.
        metadata: The texts under `__metadata__`.
        data_begin: Where the data begins in the file, in bytes.
    """

    tensors: dict[str, Stored]
    metadata: dict[str, str]
    data_begin: int

    @property
    def data_size(self) -> int:
        """Bytes of data."""
        return max((stored.end for stored in self.tensors.values()), default=0)


def encode_header(
    tensors: Mapping[str, tuple[torch.dtype, Shape]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, Header]:
    """The first bytes of a file, up to its data, and the same as a `Header`.

    Args:
        tensors: Dtype and shape by name, in any order.
        metadata: Texts for other readers. None: {"format": "pt"}, which is what transformers looks for.

    Raises:
        ValueError: A dtype that safetensors lacks, a name that cannot be one, or a header that is too long.
    """
    metadata = {"format": "pt"} if metadata is None else dict(metadata)
    stored = _laid_out(tensors)
    entries: dict[str, object] = {_METADATA: metadata} if metadata else {}
    for name, each in stored.items():
        entries[name] = {
            "dtype": safetensors_name(each.dtype, name),
            "shape": each.shape,
            "data_offsets": (each.begin, each.end),
        }
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    if len(text) > MAX_HEADER:
        raise ValueError(f"a header of {len(text)} bytes is over {MAX_HEADER}; lower max_shard_size to have more files")
    return len(text).to_bytes(8, "little") + text, Header(stored, metadata, 8 + len(text))


def decode_header(read: Callable[[int, int], bytes], size: int, file: str) -> Header:
    """Reads and checks a header.

    Args:
        read: Gives the file's bytes from a first one up to, and without, a last one.
        size: Bytes of the file.
        file: Its name, for messages.

    Raises:
        CorruptError: Anything that is not exactly as safetensors would have written it.
        CheckpointError: A tensor whose elements are smaller than a byte.
    """
    length = int.from_bytes(read(0, 8), "little") if size >= 8 else -1
    if not 2 <= length <= min(MAX_HEADER, size - 8):
        raise corrupt(file, f"{size} bytes with a header of {length}, which must be 2 to {MAX_HEADER} and fit the file")
    entries = parse_object(read(8, 8 + length), file)
    metadata = text_map(entries.pop(_METADATA, {}), f"{file}, {_METADATA}")
    tensors = {name: _stored(name, entry, file) for name, entry in entries.items()}
    header = Header(dict(sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end))), metadata, 8 + length)
    _check_contiguous(header, size, file)
    return header


def _laid_out(tensors: Mapping[str, tuple[torch.dtype, Shape]]) -> dict[str, Stored]:
    for name, (dtype, _) in tensors.items():
        safetensors_name(dtype, name)  # before any dtype is asked for its place
        if name == _METADATA or not _is_utf8(name):
            raise ValueError(f"{name!r} cannot be the name of a tensor in a safetensors file; rename it")
    stored, begin = {}, 0
    for name in sorted(tensors, key=lambda name: (place_of(tensors[name][0]), name)):
        dtype, shape = tensors[name]
        end = begin + _product(shape) * dtype.itemsize
        stored[name] = Stored(dtype, tuple(shape), begin, end)
        begin = end
    return stored


def _stored(tensor: str, entry: object, file: str) -> Stored:
    where = f"{file}, tensor {tensor!r}"
    if not _is_utf8(tensor):
        raise corrupt(where, "has a name that is no text in UTF-8")
    if not isinstance(entry, dict) or sorted(entry) != _FIELDS:
        raise corrupt(where, f"{entry!r:.80} does not have exactly dtype, shape and data_offsets")
    name, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(name, str) or not _is_counts(shape) or not _is_counts(offsets) or len(offsets) != 2:
        raise corrupt(where, f"{entry!r:.80} has other values than a dtype's name and whole numbers from 0 on")
    begin, end = offsets
    try:
        dtype = dtype_of(name)
    except CheckpointError as error:
        raise type(error)(f"{where}: {error}") from error
    if end - begin != _product(shape, end + 1) * dtype.itemsize:
        raise corrupt(where, f"a {name} of shape {shape!r:.80} cannot lie in bytes {begin} to {end}")
    return Stored(dtype, tuple(shape), begin, end)


def _check_contiguous(header: Header, size: int, file: str) -> None:
    begin = 0
    for name, stored in header.tensors.items():
        if stored.begin != begin:
            kind = "leaves a hole after" if stored.begin > begin else "overlaps"
            raise corrupt(f"{file}, tensor {name!r}", f"begins at byte {stored.begin} and {kind} what ends at {begin}")
        begin = stored.end
    if header.data_begin + begin != size:
        raise corrupt(file, f"has {size} bytes, but by its header it ends at {header.data_begin + begin}")


def _product(shape: Iterable[int], limit: int | None = None) -> int:
    """The number of elements; once it is over the limit, any number over it, so that numbers stay small."""
    count = 1
    shape = tuple(shape)
    if 0 in shape:
        return 0
    for length in shape:
        count *= length
        if limit is not None and count > limit:
            break
    return count


def _is_counts(value: object) -> bool:
    return isinstance(value, list) and all(map(is_count, value))


def _is_utf8(text: str) -> bool:
    return text.encode(errors="replace").decode() == text
