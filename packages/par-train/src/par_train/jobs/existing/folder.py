"""The folder of a transformers model, as far as it is read before torch is imported: config and names of files."""

import hashlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from par_data import find_tokenizer_files

from ..._errors import UserError, as_user_error
from ..options import Options
from .sources import sources_of

_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length")
"""Names under which configs of model families store the number of positions."""

_USUAL_CONTEXT = 1024

_SAMPLE = 1 << 16  # bytes at each end of a file of weights that are hashed


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    """A transformers model on disk.

    Args:
        path: Folder of the model, with config.json and a tokenizer.
        config: Content of config.json.
        weights: Files of weights to load; empty for random weights.
        context: Tokens in a row.
    """

    path: Path
    config: Mapping[str, Any]
    weights: tuple[Path, ...]
    context: int

    @property
    def digest(self) -> str:
        """A hash of the config, and of the names, sizes and both ends of the files of weights."""
        # Hashing all weights would read the whole model on each rank; both ends of a file identify it in practice.
        digest = hashlib.sha256((self.path / "config.json").read_bytes())
        for path in self.weights:
            size = path.stat().st_size
            digest.update(f"\0{path.name} {size}\0".encode())
            with path.open("rb") as file:
                digest.update(file.read(_SAMPLE))
                file.seek(max(0, size - _SAMPLE))
                digest.update(file.read(_SAMPLE))
        return digest.hexdigest()

    @property
    def vocabulary(self) -> int | None:
        """The number of rows of the embedding; None if the config lacks it."""
        return number_in(self.config, "vocab_size")

    @property
    def dtype(self) -> str | None:
        """The dtype of the weights in the files, such as "bfloat16"; None if the config lacks it."""
        return self.config.get("dtype") or self.config.get("torch_dtype")

    @property
    def name(self) -> str:
        """The name of the model's class, such as LlamaForCausalLM."""
        return str((self.config.get("architectures") or [self.config.get("model_type", "model")])[0])


def read_folder(options: Options) -> ModelFolder:
    """Read the folder of the model, and check the options that depend on it, without making the model.

    Raises:
        UserError: The folder has no such model, a file of text does not exist, the context has more tokens than the
            model has positions, or a package is not installed.
    """
    model, data = options.model, options.data
    key = "model.path" if model.path else "model.config"
    sources = sources_of(data, f"{key} is {model.folder!r}")
    for package, wanted in (("transformers", "transformers jinja2"), ("peft", "peft")):
        if importlib.util.find_spec(package) is None and (package == "transformers" or options.adapter.rank):
            raise UserError(
                f"{key} {model.folder!r}{' with adapter.rank' if package == 'peft' else ''} needs {package}, which is "
                f"not installed; pip install {wanted}"
            )
    path = Path(model.folder).expanduser()
    config = read_config(path, key)
    # Folders of checkpoints may have these files next to the weights.
    others = ("adapter", "optimizer")
    weights = tuple(sorted(one for one in path.glob("*.safetensors") if not one.name.startswith(others)))
    if model.path and not weights:
        raise UserError(
            f"model.path {str(path)!r} holds no weights in safetensors; give a folder that has them, or name it as "
            "model.config to begin with random ones"
        )
    with as_user_error():
        find_tokenizer_files(path)
    for source in sources:
        source.check()
    if data.template and not Path(data.template).expanduser().is_file():
        raise UserError(f"data.template is {data.template!r}, where there is no file; correct the path")
    context = row_length(options, config)
    return ModelFolder(path=path, config=config, weights=weights if model.path else (), context=context)


def read_config(path: Path, key: str) -> Mapping[str, Any]:
    """Return the content of a folder's config.json.

    Args:
        path: The folder.
        key: The option that names it, for errors.

    Raises:
        UserError: The file does not exist, or is no JSON object.
    """
    file = path / "config.json"
    if not file.is_file():
        raise UserError(
            f"{key} {str(path)!r} holds no config.json; give the folder of a model, such as save_pretrained or "
            "huggingface_hub.snapshot_download leaves it"
        )
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{str(file)!r} cannot be read ({error}); mend it, or give another folder") from None
    if not isinstance(config, dict):
        raise UserError(f"{str(file)!r} holds a {type(config).__name__}, and must hold a table; give another folder")
    return config


def row_length(options: Options, config: Mapping[str, Any]) -> int:
    """Return the number of tokens in a row.

    Args:
        options: Options of the run.
        config: Config of the model.

    Raises:
        UserError: The options request more tokens than the model has positions.
    """
    positions, context = positions_of(config), options.data.context
    if context == "auto":
        return min(_USUAL_CONTEXT, positions or _USUAL_CONTEXT)
    if positions is not None and context > positions:
        raise UserError(
            f"data.context is {context}, but {options.model.folder!r} has {positions} positions; use at most as many"
        )
    return context


def positions_of(config: Mapping[str, Any]) -> int | None:
    """Return the number of positions of a model; None if its config lacks it."""
    return next((number for name in _POSITIONS if (number := number_in(config, name))), None)


def number_in(config: Mapping[str, Any], name: str) -> int | None:
    """Return a number of a config, or of the text config inside it; None if both lack it."""
    inner = config.get("text_config")
    value = config.get(name, inner.get(name) if isinstance(inner, dict) else None)
    return value if isinstance(value, int) else None
