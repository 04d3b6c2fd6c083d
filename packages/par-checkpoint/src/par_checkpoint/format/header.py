"""The header of a safetensors file: written as safetensors does but better aligned, and read more strictly."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from .._errors import CheckpointError, CorruptError, corrupt
from .bytes import other_kind
from .strict_json import is_count, parse_object, text_map

# In the order in which safetensors writes them: wider before narrower, so that every tensor is aligned to its elements.
_ORDERED = (
    ("U64", torch.uint64),
    ("I64", torch.int64),
    ("F64", torch.float64),
    ("C64", torch.complex64),
    ("F32", torch.float32),
    ("U32", torch.uint32),
    ("I32", torch.int32),
    ("BF16", torch.bfloat16),
    ("F16", torch.float16),
    ("U16", torch.uint16),
    ("I16", torch.int16),
    ("F8_E5M2FNUZ", torch.float8_e5m2fnuz),
    ("F8_E4M3FNUZ", torch.float8_e4m3fnuz),
    ("F8_E8M0", torch.float8_e8m0fnu),
    ("F8_E4M3", torch.float8_e4m3fn),
    ("F8_E5M2", torch.float8_e5m2),
    ("I8", torch.int8),
    ("U8", torch.uint8),
    ("BOOL", torch.bool),
)
_DTYPES = dict(_ORDERED)
_NAMES = {dtype: name for name, dtype in _ORDERED}
_ORDER = {dtype: place for place, (_, dtype) in enumerate(_ORDERED)}
_SUB_BYTE = ("F4", "F6_E2M3", "F6_E3M2")


def safetensors_name(dtype: torch.dtype, of: str) -> str:
    """Return the name of a dtype in safetensors files.

    Args:
        dtype: A torch dtype.
        of: The name of the tensor that has it, for the message.

    Raises:
        ValueError: safetensors has no such dtype.
    """
    if dtype not in _NAMES:
        raise ValueError(f"{of!r} is {dtype}, which safetensors files cannot hold; cast it, or give its parts instead")
    return _NAMES[dtype]


def is_dtype(value: object) -> bool:
    """Return whether a value is a dtype that safetensors files support."""
    return isinstance(value, torch.dtype) and value in _NAMES


def dtype_of(name: str) -> torch.dtype:
    """Return the torch dtype of a name in safetensors files.

    Args:
        name: A name such as "BF16".

    Raises:
        CheckpointError: A dtype of fewer than 8 bits.
        CorruptError: A name that safetensors does not know.
    """
    if name in _SUB_BYTE:
        raise CheckpointError(f"dtype {name} has elements of less than a byte, which are not read; unpack them first")
    if name not in _DTYPES:
        raise CorruptError(f"dtype {name!r} is none of {', '.join(_DTYPES)}; write the file again with safetensors")
    return _DTYPES[name]


def order_of(dtype: torch.dtype) -> int:
    """Return the sort key of a dtype's tensors in a file; lower numbers are first."""
    return _ORDER[dtype]


MAX_HEADER = 100_000_000
"""Bytes of JSON that a header may have."""

_METADATA = "__metadata__"
DATA_ALIGNMENT = 64  # of the data's first byte, as of torch's memory: a copy between unlike ones is a quarter slower

Shape = tuple[int, ...]


@dataclass(frozen=True)
class HeaderEntry:
    """One tensor of a file.

    Args:
        dtype: The dtype of its elements.
        shape: Shape of the full tensor, which is stored row-major.
        begin: First byte, counted from where the data begins.
        end: One past the last byte.
    """

    dtype: torch.dtype
    shape: Shape
    begin: int
    end: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """Content of a safetensors file.

    Args:
        tensors: Tensors by name, in the order of their bytes.
        metadata: Texts under `__metadata__`.
        data_begin: First byte of the data in the file.
    """

    tensors: dict[str, HeaderEntry]
    metadata: dict[str, str]
    data_begin: int

    @property
    def data_size(self) -> int:
        """Bytes of data."""
        return max((stored.end for stored in self.tensors.values()), default=0)


def encode_header(
    tensors: Mapping[str, tuple[torch.dtype, Shape]],
    metadata: Mapping[str, str] | None = None,
    alignment: int = DATA_ALIGNMENT,
) -> tuple[bytes, SafetensorsHeader]:
    """Return the header of a file with some tensors, as bytes and parsed.

    Args:
        tensors: Dtype and shape by name, in any order.
        metadata: Texts for other readers. None: {"format": "pt"}, which is what transformers looks for.
        alignment: Bytes at a multiple of which the data begins, itself a multiple of 8.

    Returns:
        The first bytes of the file, up to its data, and what they say.

    Raises:
        ValueError: safetensors has no such dtype, a name is not valid, or the header is too long.
    """
    metadata = {"format": "pt"} if metadata is None else dict(metadata)
    entries: dict[str, object] = {_METADATA: metadata} if metadata else {}
    dtypes = {name: safetensors_name(dtype, name) for name, (dtype, _) in tensors.items()}
    stored, begin = {}, 0
    # Wide dtypes come first, as in safetensors, so that every tensor is aligned to its element size without padding.
    for name in sorted(tensors, key=lambda name: (order_of(tensors[name][0]), name)):
        if name == _METADATA or not _is_utf8(name):
            raise ValueError(f"{name!r} cannot be the name of a tensor in a safetensors file; rename it")
        dtype, shape = tensors[name]
        end = begin + math.prod(shape) * dtype.itemsize
        stored[name] = HeaderEntry(dtype, tuple(shape), begin, end)
        entries[name] = {"dtype": dtypes[name], "shape": shape, "data_offsets": (begin, end)}
        begin = end
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    # JSON permits trailing spaces, so they pad the header up to the first byte of data.
    text += b" " * (-(8 + len(text)) % alignment)
    if len(text) > MAX_HEADER:
        raise ValueError(f"a header of {len(text)} bytes is over {MAX_HEADER}; lower max_shard_size to have more files")
    return len(text).to_bytes(8, "little") + text, SafetensorsHeader(stored, metadata, 8 + len(text))


def decode_header(read: Callable[[int, int], bytes], size: int, file: str) -> SafetensorsHeader:
    """Read and check a header, which other programs may have written.

    Args:
        read: Function of begin and end that returns the file's bytes from begin to end - 1.
        size: Size of the file, in bytes.
        file: Name of the file, for messages.

    Raises:
        CorruptError: The header is not exactly as safetensors would have written it.
        CheckpointError: A tensor whose elements are smaller than a byte.
    """
    first = read(0, 8) if size >= 8 else b""
    length = int.from_bytes(first, "little") if first else -1
    if not 2 <= length <= min(MAX_HEADER, size - 8):
        if first and (kind := other_kind(first)) is not None:
            raise CorruptError(f"{file} is {kind}")
        # torch.save writes zip files, which begin with these bytes.
        if first.startswith(b"PK\x03\x04"):
            raise CorruptError(f"{file} is a file of torch.save; use the name pytorch_model.bin for it")
        raise corrupt(file, f"{size} bytes with a header of {length}, which must be 2 to {MAX_HEADER} and fit the file")
    entries = parse_object(read(8, 8 + length), file)
    metadata = text_map(entries.pop(_METADATA, {}), f"{file}, {_METADATA}")
    stored = {name: _decode_entry(name, entry, f"{file}, tensor {name!r}") for name, entry in entries.items()}
    # By both ends: an empty tensor comes before the one that begins at the same byte.
    tensors = dict(sorted(stored.items(), key=lambda item: (item[1].begin, item[1].end)))
    begin = 0
    for name, tensor in tensors.items():
        # safetensors allows neither gaps nor overlaps. A gap could hide data, and an overlap could multiply it.
        if tensor.begin != begin:
            kind = "leaves a hole after" if tensor.begin > begin else "overlaps"
            raise corrupt(f"{file}, tensor {name!r}", f"begins at byte {tensor.begin} and {kind} what ends at {begin}")
        begin = tensor.end
    if 8 + length + begin != size:
        raise corrupt(file, f"has {size} bytes, but by its header it ends at {8 + length + begin}")
    return SafetensorsHeader(tensors, metadata, 8 + length)


def _decode_entry(name: str, entry: object, where: str) -> HeaderEntry:
    if not _is_utf8(name):
        raise corrupt(where, "has a name that is no text in UTF-8")
    if not isinstance(entry, dict) or sorted(entry) != ["data_offsets", "dtype", "shape"]:
        raise corrupt(where, f"{entry!r:.80} does not have exactly dtype, shape and data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or not _is_counts(shape) or not _is_counts(offsets) or len(offsets) != 2:
        raise corrupt(where, f"{entry!r:.80} has other values than a dtype's name and whole numbers from 0 on")
    begin, end = offsets
    try:
        dtype = dtype_of(kind)
    except CheckpointError as error:
        raise type(error)(f"{where}: {error}") from error
    elements, rest = divmod(end - begin, dtype.itemsize)
    if rest or not _has_elements(shape, elements):
        raise corrupt(where, f"a {kind} of shape {shape!r:.80} cannot lie in bytes {begin} to {end}")
    return HeaderEntry(dtype, tuple(shape), begin, end)


def _has_elements(shape: Sequence[int], count: int) -> bool:
    """Return whether a shape has a number of elements; the product stays small even for malicious shapes."""
    if 0 in shape:
        return count == 0
    product = 1
    for length in shape:
        product *= length
        if product > count:
            return False
    return product == count


def _is_counts(value: object) -> bool:
    return isinstance(value, list) and all(map(is_count, value))


def _is_utf8(text: str) -> bool:
    return text.encode(errors="replace").decode() == text
