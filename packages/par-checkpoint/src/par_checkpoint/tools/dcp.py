"""Reading what torch.distributed.checkpoint wrote, without a process group, and without running what it may contain."""

import math
import pickle
from collections.abc import Callable
from enum import Enum, EnumMeta
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from .._errors import CheckpointError, corrupt
from ..format.header import is_dtype
from ..format.manifest import is_base_name
from ..format.pickled import load_bytes
from ..format.strict_json import is_count

FILE = ".metadata"
"""The file by which such a folder is known."""

_KINDS = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "collections": {"OrderedDict"},
}
"""By module: what torch itself puts into that file, beside dtypes and a path. torch lets pickle do anything."""

_MOST = 1 << 60
"""Elements of a tensor: with more of them, torch cannot count its bytes."""

_PATHS = {
    "PosixPath": PurePosixPath,
    "PurePosixPath": PurePosixPath,
    "PureWindowsPath": PureWindowsPath,
    "WindowsPath": PureWindowsPath,
}
"""The path under which the folder was written, which any system can read as a name alone."""


def open_dcp(source: str) -> tuple[dict[str, Any], Callable[[torch.Tensor], torch.Tensor]]:
    """Looks what tensors a folder of torch.distributed.checkpoint holds.

    Each is compared with what the files hold before memory is made for it: the metadata may come from strangers, or
    belong to files that were copied by half.

    Args:
        source: The folder.

    Returns:
        Tensors on the meta device, by name; where the names' parts are known, nested mappings, such as one for "model".
        And a function that reads one of them.

    Raises:
        CheckpointError: Its metadata is not what torch writes, would run code, or names files outside the folder; or
            items that are compressed.
        CorruptError: Its metadata or a file is broken, or they do not fit each other.
    """
    files = _DcpFiles(Path(source))
    path = files.path(FILE)
    tensors, paths, items = _read_metadata(path)
    _check_ranges(items, files)
    nested: dict[str, Any] = {}
    names: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        _check_chunks(name, tensor, items)
        # {"model": state dict} was flattened; where the path is known, it is nested again
        *above, last = paths.get(name, (name,))
        into = nested
        for key in above:
            into = into.setdefault(key, {})
            if not isinstance(into, dict):
                raise corrupt(str(path), f"says that {name!r:.80} lies in a tensor")
        if last in into:
            raise corrupt(str(path), f"has two entries for {name!r:.80}")
        into[last] = torch.empty(tuple(tensor.size), dtype=tensor.properties.dtype, device="meta")
        # The tensor is kept next to its name, so that no other object can get its id.
        names[id(into[last])] = name, into[last]

    def read(tensor: torch.Tensor) -> torch.Tensor:
        name, _ = names[id(tensor)]
        return _read_tensor(name, tensors[name], items, files)

    return nested, read


class _DcpItem(NamedTuple):
    """Location of a chunk.

    Args:
        file: Name of the file.
        begin: First byte.
        size: Size, in bytes.
    """

    file: str
    begin: int
    size: int


_Items = dict[tuple[str, tuple[int, ...]], _DcpItem]
"""By name and first index of a chunk: where it is stored."""


class _DcpFiles:
    """The files of such a folder, each opened once.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._sizes: dict[str, int] = {}

    def path(self, name: str) -> Path:
        """Return the path of a file."""
        return self._folder / name

    def size(self, name: str) -> int:
        """Return the size of a file, in bytes.

        Raises:
            CorruptError: It is not there.
        """
        if name not in self._sizes:
            try:
                self._sizes[name] = self.path(name).stat().st_size
            except OSError as error:
                raise corrupt(str(self.path(name)), f"is missing, but {FILE} lists it ({error.strerror})") from error
        return self._sizes[name]

    def read(self, item: _DcpItem) -> bytes:
        """Return the bytes of an item."""
        with self.path(item.file).open("rb") as file:
            file.seek(item.begin)
            data = file.read(item.size)
        if len(data) < item.size:
            raise corrupt(str(self.path(item.file)), "was cut while it was read")
        return data


def _read_metadata(path: Path) -> tuple[dict[str, TensorStorageMetadata], dict[str, tuple[str, ...]], _Items]:
    """Read the folder's metadata, after a check that every part has the type that torch writes.

    Returns:
        The tensors by name, the keys of the mappings around each tensor by name, and the location of each chunk.

    Raises:
        CheckpointError: The metadata would run code, or names files outside the folder.
        CorruptError: The metadata is corrupt.
    """
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise corrupt(str(path), f"holds a {type(metadata).__name__} where torch's Metadata belongs")
        tensors = {
            name: stored
            for name, stored in metadata.state_dict_metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }
        for name, tensor in tensors.items():
            if not _is_sound(name, tensor):
                raise corrupt(str(path), f"says of {name!r:.80} what cannot be: chunks that leave it, or no dtype")
        known = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
        paths = {name: tuple(map(str, keys)) for name, keys in known.items() if isinstance(keys, tuple) and keys}
        items: _Items = {}
        for index, info in metadata.storage_data.items():
            file_name, begin, size = info.relative_path, info.offset, info.length
            # Metadata from an unknown source must not name files outside of its folder.
            if not is_base_name(file_name):
                raise CheckpointError(f"{path} names the file {file_name!r:.80}, which is not beside it")
            if not (isinstance(index.fqn, str) and is_count(begin) and is_count(size)):
                raise corrupt(str(path), f"places {index.fqn!r:.80} at byte {begin!r:.40}, {size!r:.40} long")
            if index.fqn in tensors and getattr(info, "transform_descriptors", None):
                raise CheckpointError(
                    f"{path}: {index.fqn!r:.80} is compressed by an extension of torch.distributed.checkpoint; load it "
                    "there, and save it without extensions"
                )
            items[index.fqn, tuple(index.offset or ())] = _DcpItem(file_name, begin, size)
    except (OSError, CheckpointError):
        raise
    except Exception as error:  # a broken pickle can fail in any way
        raise corrupt(str(path), f"cannot be read ({type(error).__name__}: {str(error)[:200]})") from error
    return tensors, paths, items


def _is_sound(name: object, tensor: TensorStorageMetadata) -> bool:
    """Return whether a tensor's metadata is consistent: its dtype, its shape, and chunks inside the shape."""
    shape = tuple(tensor.size)
    dtype = tensor.properties.dtype
    if not isinstance(name, str) or not (dtype is torch.complex128 or is_dtype(dtype)):
        return False
    return (
        all(map(is_count, shape))
        and math.prod(shape) < _MOST
        and all(
            len(chunk.offsets) == len(chunk.sizes) == len(shape)
            and all(map(is_count, (*chunk.offsets, *chunk.sizes)))
            and all(at + n <= most for at, n, most in zip(chunk.offsets, chunk.sizes, shape, strict=True))
            for chunk in tensor.chunks
        )
    )


def _check_ranges(items: _Items, files: _DcpFiles) -> None:
    """Check that items lie in their files, and do not share bytes, by which little data would become much.

    Raises:
        CorruptError: They do.
    """
    ranges: dict[str, list[tuple[int, int, str]]] = {}
    for (name, _), item in items.items():
        ranges.setdefault(item.file, []).append((item.begin, item.begin + item.size, name))
    for file, places in ranges.items():
        last = 0
        for begin, end, name in sorted(places):
            # Without this check, a small file could list the same bytes many times and fill the memory.
            if begin < last or end > files.size(file):
                what = f"ends at byte {files.size(file)}" if begin >= last else f"has something else before byte {last}"
                raise corrupt(
                    str(files.path(file)), f"{what}, but {FILE} places {name!r:.80} at bytes {begin} to {end}"
                )
            last = end


def _chunks(tensor: TensorStorageMetadata) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the first index and the size of each chunk that has elements."""
    return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.chunks if 0 not in tuple(chunk.sizes)]


def _check_chunks(name: str, tensor: TensorStorageMetadata, items: _Items) -> None:
    """Check that the files have room for all elements of a tensor.

    Raises:
        CorruptError: They have not.
    """
    where, total, found = f"{FILE}, tensor {name!r:.80}", math.prod(tensor.size), 0
    for offsets, size in _chunks(tensor):
        item, count = items.get((name, offsets)), math.prod(size)
        if item is None or count * tensor.properties.dtype.itemsize > item.size:
            there = "no place" if item is None else f"{item.size} bytes"
            raise corrupt(where, f"has {there} for its chunk of {count} elements at {offsets}")
        found += count
    if found < total:
        raise corrupt(where, f"has {total} elements, and its chunks {found} of them")


def _read_tensor(name: str, tensor: TensorStorageMetadata, items: _Items, files: _DcpFiles) -> torch.Tensor:
    """Read a full tensor from its chunks.

    Raises:
        CorruptError: The chunks do not cover the tensor, or differ from the files.
    """
    shape, dtype = tuple(tensor.size), tensor.properties.dtype
    whole = torch.empty(shape, dtype=dtype, device="cpu")
    # The number of elements may be right although chunks overlap and leave a gap.
    is_filled = torch.zeros(shape, dtype=torch.bool, device="cpu")
    for offsets, size in _chunks(tensor):
        item = items[name, offsets]
        # Names come from the file and may be long, so messages contain only their beginning.
        where = f"{files.path(item.file)}, tensor {name!r:.80}"
        part = load_bytes(files.read(item), where)
        if not isinstance(part, torch.Tensor) or part.layout != torch.strided or part.is_meta:
            raise corrupt(where, f"is a {type(part).__name__} that has no elements in the file")
        if (part.dtype, tuple(part.shape)) != (dtype, size):
            raise corrupt(where, f"is {part.dtype} {tuple(part.shape)}, but {FILE} says {dtype} {size}")
        box = tuple(slice(at, at + n) for at, n in zip(offsets, size, strict=True))
        whole[box].copy_(part.detach())
        is_filled[box] = True
    if not bool(is_filled.all()):
        raise corrupt(f"{FILE}, tensor {name!r:.80}", "has elements that none of its chunks holds")
    return whole


class _Unpickler(pickle.Unpickler):
    """Makes nothing but what torch writes."""

    def find_class(self, module: str, name: str) -> Any:
        """Return the class or function that a pickle names, if it is allowed.

        Raises:
            CheckpointError: It is none that torch writes.
        """
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11.0 to 3.11.3 writes a member of an enumeration
            return _member
        if module in ("pathlib", "pathlib._local") and name in _PATHS:  # the latter in Python 3.13
            return _PATHS[name]
        if name in _KINDS.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)):
            return super().find_class(module, name)
        raise CheckpointError(
            f"{FILE} refers to {module}.{name}, which torch.distributed.checkpoint never writes, so it might run code; "
            "where you trust it, load it with torch.distributed.checkpoint and save it anew"
        )


def _member(kind: object, name: str) -> Enum:
    """Return the member of an enumeration; it replaces `getattr`, which could reach any object.

    Raises:
        CheckpointError: It is no member of an enumeration.
    """
    if isinstance(kind, EnumMeta) and name in kind.__members__:
        member: Enum = kind.__members__[name]
        return member
    raise CheckpointError(
        f"{FILE} takes {name!r:.80} from {kind!r:.80}, which torch.distributed.checkpoint never does, so it might run "
        "code; where you trust it, load it with torch.distributed.checkpoint and save it anew"
    )
