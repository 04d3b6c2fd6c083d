"""From one format of files to another: Hugging Face, torch, and torch.distributed.checkpoint."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch

from .._errors import CheckpointError
from .._save import save
from ..format.pickled import load_object
from ..storage.consistent import read_consistently
from ..storage.folder import Folder
from ..storage.outline import read_outline
from ..storage.verify import check_blocks
from ..tiers.gathered import open_checkpoint
from .read import reader_of

FORMATS = ("huggingface", "torch", "dcp")
"""The formats that are written."""

_MODELS = ("model", "state_dict", "model_state_dict")
"""What trainers call the model in a file that holds more."""


def convert_checkpoint(
    source: str, target: str, *, to: str, dtype: str | None = None, max_shard_size: str = "5GB"
) -> None:
    """Writes a model's tensors in another format, through memory. An optimizer's state is not converted.

    Args:
        source: A Hugging Face folder, one of ours in either style, one with all parts of hosts in it, a file that
            torch.load opens, or a folder of torch.distributed.checkpoint.
        target: A folder that does not exist.
        to: "huggingface", "torch" or "dcp".
        dtype: The name of a floating-point dtype to cast to.
        max_shard_size: Bytes of tensors in a Hugging Face file, such as "5GB".

    Raises:
        ValueError: An unknown format or dtype.
        CheckpointError: The source cannot be read, or is corrupt.
        FileExistsError: The target is there.
    """
    if to not in FORMATS:
        raise ValueError(f"format {to!r}; it can be {', '.join(map(repr, FORMATS))}")
    cast = None if dtype is None else getattr(torch, dtype, None)
    if dtype is not None and not (isinstance(cast, torch.dtype) and cast.is_floating_point):
        raise ValueError(f"dtype {dtype!r} is none of torch's floating-point ones, such as bfloat16")
    if os.path.lexists(target):
        raise FileExistsError(f"{target!r} exists; choose another path")
    tensors = _read_model(source)
    if to != "dcp":
        save(target, model=tensors, style=to, dtype=cast, max_shard_size=max_shard_size)
        return
    from torch.distributed.checkpoint.state_dict_saver import save as save_dcp  # noqa: PLC0415 - slow to import

    state = {name: each.to(cast) if cast and each.is_floating_point() else each for name, each in tensors.items()}
    save_dcp(state, checkpoint_id=target, no_dist=True)


def _read_model(source: str) -> dict[str, torch.Tensor]:
    """All tensors of a model, whole."""
    if Path(source).is_file():
        return _named_tensors(load_object(Path(source)))
    if (Path(source) / ".metadata").is_file():
        from .dcp import read_dcp  # noqa: PLC0415 - slow to import

        return _named_tensors(read_dcp(source))
    folder = open_checkpoint(source)
    return read_consistently(folder, lambda: _read_checkpoint(folder))


def _read_checkpoint(folder: Folder) -> dict[str, torch.Tensor]:
    outline = read_outline(folder)
    check_blocks(folder, outline)  # corrupt bytes must not get new checksums
    read = reader_of(folder, outline)
    tensors = {name: read(name) for name in outline.places("model")}
    return {**tensors, **{name: tensors[stored] for name, stored in outline.tied.items()}}


def _named_tensors(value: object) -> dict[str, torch.Tensor]:
    """The tensors of nested mappings; what trainers call the model at the top is not a part of the names.

    Raises:
        CheckpointError: No tensors, or some that one name would not tell apart.
    """
    if isinstance(value, Mapping):
        value = next((value[key] for key in _MODELS if isinstance(value.get(key), Mapping)), value)
    pairs = _flat(value)
    if not pairs:
        raise CheckpointError("the file holds no tensors by name; give the state dict of a model")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in pairs:
        if name in tensors:
            raise CheckpointError(f"two tensors would have the name {name!r}; give the state dict of a model alone")
        tensors[name] = tensor
    return tensors


def _flat(value: object, prefix: str = "") -> list[tuple[str, torch.Tensor]]:
    """Names, joined by dots, and tensors of nested mappings."""
    if isinstance(value, torch.Tensor):
        return [(prefix, value)]
    if isinstance(value, list | tuple) and any(_flat(item) for item in value):
        raise CheckpointError(f"{prefix!r} is a list with tensors in it, which have no names; give them as a mapping")
    if not isinstance(value, Mapping):
        return []
    return [pair for key, item in value.items() for pair in _flat(item, f"{prefix}.{key}" if prefix else str(key))]
