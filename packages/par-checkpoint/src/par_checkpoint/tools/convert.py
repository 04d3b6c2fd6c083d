"""From one format of files to another: Hugging Face, torch, and torch.distributed.checkpoint."""

import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .._errors import CheckpointError
from .._policies import Format
from .._save import save
from ..format.manifest import CONFIG, MANIFEST
from ..format.pickled import check_whole, load_object
from ..format.strict_json import parse_object
from ..state.quantised import check_cast
from ..storage.consistent import read_consistently
from ..storage.folder import Folder, open_folder
from ..storage.outline import read_outline
from ..storage.owned import check_name, is_beside_weights, is_of_tokenizer
from ..storage.verify import check_blocks
from ..tiers.gathered import open_checkpoint
from .read import reader_of

FORMATS = ("huggingface", "torch", "dcp")
"""The formats that are written."""

_MODELS = ("model", "state_dict", "model_state_dict", "module")
"""What trainers call the model in a file that holds more."""

_OTHERS = re.compile("optim(izer)?s?(_states?(_dicts?)?)?|(lr_)?schedulers?(_state_dicts?)?|ema|train_state|dataloader")
"""What else lies beside the model's tensors in such a file, where these have no mapping of their own."""

_DEPTH = 100  # mappings in mappings


def convert_checkpoint(
    source: str, target: str, *, to: str, dtype: str | None = None, max_shard_size: str = "5GB"
) -> list[str]:
    """Write a model's tensors in another format, through memory, with the config and tokenizer.

    It does not convert an optimizer's state or any other state that a run needs to resume.

    Args:
        source: A Hugging Face folder, one of our folders in either style, a folder with all parts of hosts, a file that
            torch.load opens, or a folder of torch.distributed.checkpoint.
        target: Folder that does not exist.
        to: "huggingface", "torch" or "dcp".
        dtype: Name of a floating-point dtype to cast to. Default: no cast.
        max_shard_size: Maximum size of the tensors in a Hugging Face file. Default: "5GB".

    Returns:
        Descriptions of everything in the source that is not in the target.

    Raises:
        ValueError: The format or dtype is unknown, or a dtype is set for quantized tensors.
        CheckpointError: The source cannot be read, or is corrupt.
        FileExistsError: The target exists.
    """
    if to not in FORMATS:
        raise ValueError(f"format {to!r}; it can be {', '.join(map(repr, FORMATS))}")
    cast = None if dtype is None else getattr(torch, dtype, None)
    if dtype is not None and not (isinstance(cast, torch.dtype) and cast.is_floating_point):
        raise ValueError(f"dtype {dtype!r} is none of torch's floating-point ones, such as bfloat16")
    open_folder(target)  # raises where it cannot be a target
    # lexists: a link that leads nowhere is something that must not be overwritten, either.
    if os.path.lexists(target):
        raise FileExistsError(f"{target!r} exists; choose another path")
    if to == "dcp" and "://" in target:
        raise ValueError(f"target={target!r}: a DCP folder is written to local disks; pass a local path")
    found = _read_model(source)
    if cast is not None:
        check_cast({name: each.dtype for name, each in found.tensors.items()}, list(found.tensors), cast)
        # Codes of other kinds are integers, which no cast touches; but their scales would lose digits.
        if CONFIG in found.beside and parse_object(found.beside[CONFIG], CONFIG).get("quantization_config"):
            raise ValueError(
                f"dtype={dtype}: config.json has a quantization_config, so these tensors are codes and scales; load "
                "the folder with transformers, with the config of its kind and dequantize=True, and use what "
                "save_pretrained writes; or leave dtype, which keeps the codes"
            )
    if to != "dcp":
        # `save` copies files by path, and those of an object store or with a new dtype have none.
        with tempfile.TemporaryDirectory() as beside:
            assets = _written(found.beside, Path(beside), cast)
            files = Format(style=to, dtype=cast, max_shard_size=max_shard_size, assets=assets)
            save(target, model=found.tensors, step=found.step, format=files)
        return found.left_out
    from torch.distributed.checkpoint.state_dict_saver import save as save_dcp  # noqa: PLC0415 - slow to import

    state = {name: each.to(cast) if cast and each.is_floating_point() else each for name, each in found.tensors.items()}
    # DCP stores tensors alone: whatever else was found is reported as left out.
    save_dcp(state, checkpoint_id=target, no_dist=True)
    return [*found.left_out, *found.beside, *(() if found.step is None else ("the step",))]


@dataclass(frozen=True, kw_only=True)
class _SourceState:
    """Content of a source.

    Args:
        tensors: Full tensors of the model.
        left_out: Descriptions of content that is not converted.
        beside: Files other than tensors, such as a config and a tokenizer.
        step: Training step.
    """

    tensors: dict[str, torch.Tensor]
    left_out: list[str]
    beside: Mapping[str, bytes] = field(default_factory=dict)
    step: int | None = None


def _read_model(source: str) -> _SourceState:
    """Return all full tensors of a model, and its other files."""
    if Path(source).is_file():
        tensors, left_out = named_tensors(load_object(Path(source)))
        check_whole(tensors, source)
        return _SourceState(tensors=tensors, left_out=left_out)
    if (Path(source) / ".metadata").is_file():
        from .dcp import open_dcp  # noqa: PLC0415 - slow to import

        nested, read = open_dcp(source)
        tensors, left_out = named_tensors(nested)
        return _SourceState(tensors={name: read(tensor) for name, tensor in tensors.items()}, left_out=left_out)
    folder = open_checkpoint(source)
    return read_consistently(folder, lambda: _read_checkpoint(folder))


def _read_checkpoint(folder: Folder) -> _SourceState:
    outline = read_outline(folder)
    check_blocks(folder, outline)  # corrupt bytes must not get new checksums
    read = reader_of(folder, outline)
    tensors = {name: read(name) for name in outline.places("model")}
    beside = [name for name in folder.sizes() if is_beside_weights(name) or is_of_tokenizer(name)]
    # All that no reader has asked for is named at the end, so that nothing gets lost in silence.
    known = {MANIFEST, *beside, *(place.file for place in outline.places("model").values())}
    known |= {outline.directories["model"].index or "", *outline.pickled.get("model", ())}
    left_out = []
    if outline.manifest is not None:
        known |= outline.manifest.files.keys()
        left_out += [f"the {part}" for part in ("optimizer", "scheduler", "extra") if getattr(outline.manifest, part)]
        left_out += [f"extra state of modules, such as {name!r}" for name in list(outline.objects())[:1]]
    return _SourceState(
        tensors={**tensors, **{name: tensors[stored] for name, stored in outline.tied.items()}},
        left_out=[*left_out, *sorted(folder.sizes().keys() - known)],
        beside={name: folder.read(name) for name in beside},
        step=None if outline.manifest is None else outline.manifest.step,
    )


def _written(files: Mapping[str, bytes], folder: Path, dtype: torch.dtype | None) -> list[Path]:
    """Write files to a folder for a save to copy; a config gets the dtype to which tensors are cast."""
    for name, data in files.items():
        path = folder / check_name(name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(_with_dtype(data, dtype) if name == CONFIG and dtype is not None else data)
    return sorted(folder.iterdir())


def _with_dtype(config: bytes, dtype: torch.dtype) -> bytes:
    """Return a config of transformers for tensors of another dtype, so that `from_pretrained` opens them."""
    values = parse_object(config, CONFIG)
    name = str(dtype).removeprefix("torch.")
    # Models with a part for text and one for images have a dtype in each part's own config.
    for part in (values, *(each for each in values.values() if isinstance(each, dict))):
        part.update({key: name for key in ("dtype", "torch_dtype") if isinstance(part.get(key), str)})
    return (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()


def named_tensors(value: object) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Return the tensors of a model in nested mappings; names that trainers use for the model are removed.

    Returns:
        The tensors by name, and descriptions of the other content.

    Raises:
        CheckpointError: There are no tensors, several models, or several tensors with one name.
    """
    model, left_out = _model_in(value)
    pairs = _flat(model)
    if not pairs:
        raise CheckpointError("the file holds no tensors by name; give the state dict of a model")
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in pairs:
        if name in tensors:
            raise CheckpointError(f"two tensors would have the name {name!r}; give the state dict of a model alone")
        tensors[name] = tensor
    return tensors, left_out


def _model_in(value: object, above: str = "") -> tuple[object, list[str]]:
    """Return the mapping of the model's tensors at any depth, and the paths of the content next to it.

    torch's own example saves an object with the model and the optimizer, {"app": {"model": ..., "optim": ...}}.
    """
    if not isinstance(value, Mapping):
        return value, []
    # A key that says "model" decides, even if other mappings beside it hold tensors: those of an EMA, say.
    own = next((key for key in _MODELS if isinstance(value.get(key), Mapping) and _flat(value[key])), None)
    if own is not None:
        return value[own], [f"{above}{key}" for key in value if key != own]
    inside = [key for key, item in value.items() if isinstance(item, Mapping) and _has_model(item)]
    if len(inside) > 1:
        raise CheckpointError(
            f"there are models in {', '.join(map(repr, inside))}; save the state dict of one of them, and convert that"
        )
    if inside:
        model, left_out = _model_in(value[inside[0]], f"{above}{inside[0]}.")
        return model, [*(f"{above}{key}" for key in value if key != inside[0]), *left_out]
    others = [key for key, item in value.items() if isinstance(item, Mapping | list) and _OTHERS.fullmatch(str(key))]
    return {key: item for key, item in value.items() if key not in others}, [f"{above}{key}" for key in others]


def _has_model(value: Mapping[Any, Any]) -> bool:
    """Return whether a mapping has an entry for the model's tensors, and one for other state of a trainer."""
    has_model = any(isinstance(value.get(key), Mapping) and _flat(value[key]) for key in _MODELS)
    return has_model and any(_OTHERS.fullmatch(str(key)) for key in value)


def _flat(value: object, prefix: str = "", depth: int = 0) -> list[tuple[str, torch.Tensor]]:
    """Names, joined by dots, and tensors of nested mappings."""
    if depth > _DEPTH:
        raise CheckpointError(f"{prefix:.80}... is nested deeper than {_DEPTH}; give the state dict of a model")
    if isinstance(value, torch.Tensor):
        return [(prefix, value)]
    if isinstance(value, list | tuple) and any(_flat(item, prefix, depth + 1) for item in value):
        raise CheckpointError(f"{prefix!r} is a list with tensors in it, which have no names; give them as a mapping")
    if not isinstance(value, Mapping):
        return []
    return [
        pair
        for key, item in value.items()
        for pair in _flat(item, f"{prefix}.{key}" if prefix else str(key), depth + 1)
    ]
