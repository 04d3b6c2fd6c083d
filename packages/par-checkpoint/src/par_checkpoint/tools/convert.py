"""From one format of files to another: Hugging Face, torch, and torch.distributed.checkpoint."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from .._errors import CheckpointError
from .._save import save
from ..format.pickled import load_object
from ..storage.consistent import read_consistently
from ..storage.folder import Folder, open_folder
from ..storage.outline import read_outline
from ..storage.verify import check_blocks
from .read import reader_of

_MODELS = ("model", "state_dict", "model_state_dict")
FORMATS = ("huggingface", "torch", "dcp")


def convert_checkpoint(
    source: str, target: str, *, to: str, dtype: str | None = None, max_shard_size: str = "5GB"
) -> None:
    """Writes a model's tensors in another format, through memory; an optimizer's state is not converted.

    Args:
        source: A Hugging Face folder, one of ours in either style, a file that torch.load opens, or a folder of
            torch.distributed.checkpoint.
        target: A folder that does not exist.
        to: "huggingface", "torch" or "dcp".
        dtype: The name of a floating-point dtype to cast to.
        max_shard_size: Of Hugging Face files.

    Raises:
        ValueError: An unknown format or dtype.
        CheckpointError: The source cannot be read, or is corrupt.
        FileExistsError: The target is there.
    """
    if to not in FORMATS:
        raise ValueError(f"format {to!r}; it can be {', '.join(map(repr, FORMATS))}")
    cast = _dtype(dtype)
    if os.path.lexists(target):
        raise FileExistsError(f"{target!r} exists; choose another path")
    tensors = _tensors(source)
    if to != "dcp":
        save(target, model=tensors, style=to, dtype=cast, max_shard_size=max_shard_size)
        return
    from torch.distributed.checkpoint.state_dict_saver import save as save_dcp  # noqa: PLC0415 - slow to import

    state = {name: each.to(cast) if cast and each.is_floating_point() else each for name, each in tensors.items()}
    save_dcp(state, checkpoint_id=target, no_dist=True)


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype {name!r} is none of torch's floating-point ones, such as bfloat16")
    return dtype


def _tensors(source: str) -> dict[str, torch.Tensor]:
    """All tensors of a model, whole."""
    if Path(source).is_file():
        return _of_model(load_object(Path(source)))
    if (Path(source) / ".metadata").is_file():
        from .dcp import read_dcp  # noqa: PLC0415 - slow to import

        return _of_model(read_dcp(source))
    folder = open_folder(source)
    return read_consistently(folder, lambda: _read(folder))


def _read(folder: Folder) -> dict[str, torch.Tensor]:
    """All tensors of the model in a checkpoint."""
    found = read_outline(folder)
    check_blocks(folder, found)  # corrupt bytes must not get new checksums
    read = reader_of(folder, found)
    tensors = {name: read(name) for name in found.places("model")}
    return {**tensors, **{name: tensors[stored] for name, stored in found.tied.items()}}


def _of_model(value: object) -> dict[str, torch.Tensor]:
    """The tensors of nested mappings; what trainers call the model at the top is not a part of the names.

    Raises:
        CheckpointError: No tensors, or some that one name would not tell apart.
    """
    if isinstance(value, Mapping):
        value = next((value[key] for key in _MODELS if isinstance(value.get(key), Mapping)), value)
    pairs = _flat(value)
    if not pairs:
        raise CheckpointError("the file holds no tensors by name; give the state dict of a model")
    found: dict[str, torch.Tensor] = {}
    for name, tensor in pairs:
        if name in found:
            raise CheckpointError(f"two tensors would have the name {name!r}; give the state dict of a model alone")
        found[name] = tensor
    return found


def _flat(value: object, prefix: str = "") -> list[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        return [(prefix, value)]
    if isinstance(value, list | tuple) and any(_flat(each) for each in value):
        raise CheckpointError(f"{prefix!r} is a list with tensors in it, which have no names; give them as a mapping")
    if not isinstance(value, Mapping):
        return []
    return [pair for key, each in value.items() for pair in _flat(each, f"{prefix}.{key}" if prefix else str(key))]
