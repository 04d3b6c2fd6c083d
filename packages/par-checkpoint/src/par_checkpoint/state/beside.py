"""The small files next to a model's tensors: its config for transformers, and the files of `assets`.

They go into the folder in the same step as the tensors. People edit them, so a load never compares their checksums,
unless it is asked for `verify="full"`.
"""

import copy
import json
import tempfile
import warnings
from collections.abc import Collection, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch

from ..format.manifest import CONFIG, GENERATION_CONFIG, MANIFEST, OBJECTS, TEMPLATES, is_base_name
from ..format.strict_json import check_no_pointer
from ..storage.owned import is_data, is_of_tokenizer, is_standard
from .model import Model
from .transformers import pretrained_of

_SHOWN = 10  # names in a warning
_DEPTH = 8  # calls from a warning up to whoever called `save`


def files_beside(
    model: Model | None,
    *,
    config: Any,
    assets: Sequence[str | PathLike[str]],
    stem: str,
    style: str,
    dtype: torch.dtype | None,
) -> dict[str, bytes]:
    """Return the files that a save writes in addition to the tensors' files.

    The arguments are those of `par_checkpoint.save` and the fields of `Format`.

    Returns:
        Bytes by name: the given config, the files of `assets`, and the files that transformers writes for a model of
            its
        own. If several files have one name, the first in this order is returned.

    Raises:
        ValueError: An asset does not exist, has the name of a file of ours or of another asset, or has a name that is
            not allowed in such a folder; the style does not use the stem; or transformers does not write the config.
        TypeError: JSON cannot represent the config.
    """
    if style == "torch" and stem != "model":
        raise ValueError(f"stem is {stem!r}, but style 'torch' names its files itself; leave stem, or the style")
    found: dict[str, bytes] = {}
    if config is not None:
        values = config.to_dict() if hasattr(config, "to_dict") else config
        found[CONFIG] = (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()
    for name, path in _files(assets):
        if name in found:
            raise ValueError(f"assets has {str(path)!r}, but {name} comes from elsewhere too; leave one of the two")
        _check_asset(path)
        found[name] = path.read_bytes()
        check_no_pointer(found[name], str(path))
    pretrained = pretrained_of(model)
    if pretrained is not None and style == "huggingface" and stem == "model":
        for name, data in _of_transformers(pretrained, dtype, found.keys()):
            # Files that the caller gave win over those that the model would write.
            found.setdefault(name, data)
    return found


def _files(assets: Sequence[str | PathLike[str]]) -> Iterator[tuple[str, Path]]:
    """Yield names and paths of the requested files; for a folder, the files of its tokenizer and processor.

    It warns about files of unknown kinds in such a folder, so that no file is omitted silently.
    """
    for path in map(Path, assets):
        if not path.is_dir():
            yield path.name, path
            continue
        if f"{path.name}/" == TEMPLATES:
            inside = {f"{TEMPLATES}{file.name}": file for file in sorted(path.iterdir())}
        else:
            templates = path / TEMPLATES
            further = sorted(templates.iterdir()) if templates.is_dir() else []
            inside = {file.name: file for file in sorted(path.iterdir()) if not file.is_dir()}
            inside |= {f"{TEMPLATES}{file.name}": file for file in further}
        wanted = {name: file for name, file in inside.items() if is_of_tokenizer(name)}
        if not wanted:
            raise ValueError(f"assets has the folder {str(path)!r}, which holds no file of a tokenizer; name the files")
        unknown = [name for name in inside if name not in wanted and not is_standard(name) and not is_data(name)]
        unknown = [name for name in unknown if not name.startswith((".", MANIFEST.partition(".")[0]))]
        if unknown:
            more = f" and {len(unknown) - _SHOWN} more" if len(unknown) > _SHOWN else ""
            warnings.warn(
                f"assets has the folder {str(path)!r}, of which {', '.join(unknown[:_SHOWN])}{more} are not known to "
                "belong to a tokenizer, and are not copied; name them in assets to have them copied",
                stacklevel=_DEPTH,
            )
        yield from wanted.items()


def _check_asset(path: Path) -> None:
    """Raise ValueError unless a file can be copied into a checkpoint."""
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
    """Yield the files that `save_pretrained` writes next to the weights: the config, and any generation config.

    Args:
        model: Model of transformers.
        dtype: dtype of the tensors in the files; None: the model's dtype.
        given: Names of files that are not needed.
    """
    with tempfile.TemporaryDirectory() as folder:
        if CONFIG not in given:
            config = copy.deepcopy(model.config)
            # The config names the dtype of the files, which may be cast.
            config.dtype = str(dtype or model.dtype).removeprefix("torch.")
            # `fully_shard` puts "FSDP" in front of the name of a module's class.
            config.architectures = [type(model).__name__.removeprefix("FSDP")]
            config.save_pretrained(folder)
        if GENERATION_CONFIG not in given and model.can_generate():
            model.generation_config.save_pretrained(folder)
        for path in sorted(Path(folder).iterdir()):
            yield path.name, path.read_bytes()
