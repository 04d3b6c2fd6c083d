"""The small files beside a model's tensors: what describes it to transformers, and what the caller wants copied.

They go into the folder in the same step as the tensors. People edit them, so they have no checksums.
"""

import copy
import json
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from ..format.index import is_base_name
from ..format.manifest import CONFIG, GENERATION_CONFIG, MANIFEST, OBJECTS
from ..storage.owned import is_of_tokenizer
from .model import Model
from .transformers import pretrained_of


def check_config(config: Any) -> None:
    """Raises TypeError unless a config can be written as a mapping of plain JSON; None is written nowhere."""
    if config is not None and not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
        raise TypeError(f"config is a {type(config).__name__}; give a mapping, or an object with to_dict()")


def files_beside(
    model: Model | None,
    *,
    config: Any,
    assets: Sequence[str | PathLike[str]],
    stem: str,
    style: str,
    dtype: torch.dtype | None,
) -> dict[str, bytes]:
    """The files that a save writes beside those of the tensors. The arguments are those of `par_checkpoint.save`.

    Returns:
        Their bytes by name: the config that was given, what was asked for in `assets`, and what transformers would
        write of a model of its own; of several for one name the first of these.

    Raises:
        ValueError: An asset that is not there, that a file of ours or another asset has the name of, or whose name has
            no place in a folder of this kind; a stem that the style has no use for; or a config that transformers
            refuses to write.
        TypeError: A config that JSON cannot say.
    """
    if style == "torch" and stem != "model":
        raise ValueError(f"stem is {stem!r}, but style 'torch' names its files itself; leave stem, or the style")
    found: dict[str, bytes] = {}
    if config is not None:
        values = config.to_dict() if hasattr(config, "to_dict") else config
        found[CONFIG] = (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()
    for path in _files(assets):
        if path.name in found:
            raise ValueError(
                f"assets has {str(path)!r}, but {path.name} comes from elsewhere too; leave one of the two"
            )
        _check_asset(path)
        found[path.name] = path.read_bytes()
    pretrained = pretrained_of(model)
    if pretrained is not None and style == "huggingface" and stem == "model":
        for name, data in _of_transformers(pretrained, dtype, found.keys()):
            found.setdefault(name, data)
    return found


def _files(assets: Sequence[str | PathLike[str]]) -> Iterator[Path]:
    """The files that are asked for; of a folder, those of its tokenizer and processor."""
    for path in map(Path, assets):
        if not path.is_dir():
            yield path
            continue
        inside = sorted(file for file in path.iterdir() if file.is_file() and is_of_tokenizer(file.name))
        if not inside:
            raise ValueError(f"assets has the folder {str(path)!r}, which holds no file of a tokenizer; name the files")
        yield from inside


def _check_asset(path: Path) -> None:
    """Raises ValueError unless a file can be copied into a checkpoint."""
    if not path.is_file():
        raise ValueError(f"assets has {str(path)!r}, where there is no file; correct the path, as rank 0 sees it")
    if not is_base_name(path.name):
        raise ValueError(
            f"assets has {str(path)!r}, whose name is hidden or cannot be shown; copy it under another one"
        )
    ours = path.name in {MANIFEST, *OBJECTS.values()}
    if ours or path.name.endswith((".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json")):
        raise ValueError(f"assets has {str(path)!r}, but files of that name hold tensors here; give `model` for those")


def _of_transformers(model: Any, dtype: torch.dtype | None, given: Collection[str]) -> Iterator[tuple[str, bytes]]:
    """What `save_pretrained` writes beside the weights: the config, and how the model generates if it does.

    Args:
        model: A model of transformers.
        dtype: The dtype of the tensors in the files; None: the model's.
        given: Names of files that are not needed.
    """
    with tempfile.TemporaryDirectory() as folder:
        if CONFIG not in given:
            config = copy.deepcopy(model.config)
            config.dtype = str(dtype or model.dtype).removeprefix("torch.")
            config.architectures = [type(model).__name__.removeprefix("FSDP")]
            config.save_pretrained(folder)
        if GENERATION_CONFIG not in given and model.can_generate():
            model.generation_config.save_pretrained(folder)
        for path in sorted(Path(folder).iterdir()):
            yield path.name, path.read_bytes()
