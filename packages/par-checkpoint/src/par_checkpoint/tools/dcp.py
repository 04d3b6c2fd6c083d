"""Reading what torch.distributed.checkpoint wrote, without a process group, and without running what it may contain."""

import pickle
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from .._errors import CheckpointError, corrupt

FILE = ".metadata"
"""What tells such a folder."""

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
    "pathlib": {"PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath"},
}
"""By module: what torch itself puts into that file, beside dtypes. torch reads it with all that pickle can do."""


def read_dcp(source: str) -> dict[str, Any]:
    """The state dict in a folder of torch.distributed.checkpoint.

    Args:
        source: The folder.

    Raises:
        CheckpointError: Its metadata is not what torch writes, or would run code.
        CorruptError: Its metadata is broken.
    """
    reader = _Reader(source)
    metadata = reader.read_metadata()
    state = {
        name: torch.empty(each.size, dtype=each.properties.dtype, device="cpu")
        for name, each in metadata.state_dict_metadata.items()
        if isinstance(each, TensorStorageMetadata)
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
        path = Path(self.path) / FILE
        with path.open("rb") as file:
            return _read_metadata(file, str(path))


def _read_metadata(file: IO[bytes], path: str) -> Metadata:
    try:
        found = _Unpickler(file).load()
    except (OSError, CheckpointError):
        raise
    except Exception as error:  # a broken pickle can fail in any way
        raise corrupt(path, f"cannot be read ({type(error).__name__}: {str(error)[:200]})") from error
    if not isinstance(found, Metadata):
        raise corrupt(path, f"holds a {type(found).__name__} where torch's Metadata belongs")
    return found


class _Unpickler(pickle.Unpickler):
    """Makes nothing but what torch writes."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _KINDS.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)):
            return super().find_class(module, name)
        raise CheckpointError(
            f"{FILE} refers to {module}.{name}, which torch.distributed.checkpoint never writes, so it might run code; "
            "where you trust it, load it with torch.distributed.checkpoint and save it anew"
        )
