"""Reading what torch.distributed.checkpoint wrote, without a process group, and without running what it may contain."""

import pickle
from enum import Enum, EnumMeta
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from .._errors import CheckpointError, corrupt
from ..format.index import is_base_name

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

_PATHS = {
    "PosixPath": PurePosixPath,
    "PurePosixPath": PurePosixPath,
    "PureWindowsPath": PureWindowsPath,
    "WindowsPath": PureWindowsPath,
}
"""The path under which the folder was written, which any system can read as a name alone."""


def read_dcp(source: str) -> dict[str, Any]:
    """Reads the state dict in a folder of torch.distributed.checkpoint.

    Args:
        source: The folder.

    Returns:
        Tensors by name; where the names' parts are known, one mapping for each first part, such as "model".

    Raises:
        CheckpointError: Its metadata is not what torch writes, would run code, or names files outside the folder.
        CorruptError: Its metadata is broken.
    """
    reader = _Reader(source)
    metadata = reader.read_metadata()
    state = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype, device="cpu")
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    load(state, storage_reader=reader, no_dist=True)
    nested: dict[str, Any] = {}
    for name, tensor in state.items():
        # {"model": state dict} was flattened; where the path is known, it is nested again
        first, *rest = (metadata.planner_data or {}).get(name, (name,))
        if rest:
            nested.setdefault(first, {})[".".join(map(str, rest))] = tensor
        else:
            nested[first] = tensor
    return nested


class _Reader(FileSystemReader):
    """Torch's, but for the metadata, which it would unpickle as it comes."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The folder's metadata.

        Raises:
            CheckpointError: It would run code, or names files outside the folder.
            CorruptError: It is broken.
        """
        path = Path(self.path) / FILE
        try:
            with path.open("rb") as file:
                metadata = _Unpickler(file).load()
            if not isinstance(metadata, Metadata):
                raise corrupt(str(path), f"holds a {type(metadata).__name__} where torch's Metadata belongs")
            for info in (metadata.storage_data or {}).values():
                if not is_base_name(info.relative_path):
                    raise CheckpointError(f"{path} names the file {info.relative_path!r:.80}, which is not beside it")
        except (OSError, CheckpointError):
            raise
        except Exception as error:  # a broken pickle can fail in any way
            raise corrupt(str(path), f"cannot be read ({type(error).__name__}: {str(error)[:200]})") from error
        return metadata


class _Unpickler(pickle.Unpickler):
    """Makes nothing but what torch writes."""

    def find_class(self, module: str, name: str) -> Any:
        """The class or function that a pickle names.

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
    """The member of an enumeration, in the place of `getattr`, which could reach anything.

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
