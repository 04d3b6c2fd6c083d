"""Checkpoints: a folder with the weights, the config that rebuilds the model, and what training needs to go on.

    checkpoint/model.safetensors     weights by name
    checkpoint/config.json           all options, and the format
    checkpoint/training_state.pt     optimizer, place in the data, random state

No file mentions the number of ranks that wrote it.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from . import __version__
from ._config import build_options, to_tree
from ._errors import UserError
from ._files import existing_folder, replace_folder
from ._gpt import GPT
from ._options import Options

_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """What training needs beside the weights.

    Args:
        step: Optimizer steps taken.
        samples: Windows consumed by all ranks together: the position in the data.
        seconds: Time spent so far.
        text: The digest of the text.
        optimizer: Its state dict.
        rng: torch's random state on the CPU, uint8.
    """

    step: int
    samples: int
    seconds: float
    text: str
    optimizer: dict[str, Any]
    rng: torch.Tensor


def save_checkpoint(path: Path, weights: Mapping[str, torch.Tensor], options: Options, state: TrainingState) -> None:
    """Writes a checkpoint of whole weights, in place of the one that is there; a crash leaves one of them whole."""
    config = {"format": _FORMAT, "par_train": __version__, "options": to_tree(options)}
    record = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}

    def fill(folder: Path) -> None:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, _weights(folder))
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        torch.save(record, folder / "training_state.pt")

    replace_folder(path, fill)


def load_model(path: str | Path) -> GPT:
    """The model of a checkpoint, on the CPU.

    Args:
        path: The checkpoint folder, such as `runs/gpt/checkpoint`.

    Raises:
        ValueError: There is no checkpoint, or its format is not this version's.
    """
    folder = _folder(Path(path))
    model = GPT(load_options_of(folder).model, seed=None)
    model.load_state_dict(load_file(_weights(folder)))
    return model


def load_options_of(path: Path) -> Options:
    """The options that a checkpoint was trained with.

    Raises:
        ValueError: As `load_model`.
    """
    file = _folder(path) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        version = config["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{str(file)!r} is not a checkpoint's config: {error!r}; take another checkpoint") from None
    if version != _FORMAT:
        raise UserError(
            f"{str(file)!r} has format {version!r}, this par-train reads {_FORMAT}; use the one that wrote it"
        )
    return build_options(config["options"])


def load_state(path: Path) -> TrainingState:
    """The training state of a checkpoint.

    Raises:
        ValueError: There is no checkpoint, or it cannot be read.
    """
    file = _folder(path) / "training_state.pt"
    try:
        return TrainingState(**torch.load(file, map_location="cpu", weights_only=True))
    except (OSError, EOFError, RuntimeError, TypeError, UnpicklingError) as error:
        raise UserError(f"{str(file)!r} cannot be read: {error!r:.200}; start anew with --overwrite") from None


def check_continues(path: Path, options: Options, state: TrainingState, text: str) -> None:
    """Makes sure that going on from the checkpoint is going on with the same run.

    How long and how fast to train may change; the model, the seed and the text may not.

    Raises:
        UserError: Something differs; the message names it.
    """
    before = load_options_of(path)
    pairs = {"seed": (before.seed, options.seed)}
    for field in dataclasses.fields(options.model):
        pairs[f"model.{field.name}"] = (getattr(before.model, field.name), getattr(options.model, field.name))
    for key, (was, now) in pairs.items():
        if was != now:
            raise UserError(
                f"the checkpoint {str(path)!r} has {key} {was}, but the config says {now}; set it back, or start anew "
                f"with --overwrite"
            )
    if state.text != text:
        raise UserError(
            f"the text is not what the checkpoint {str(path)!r} was trained on; bring the folder and [data] back, or "
            f"start anew with --overwrite"
        )


def _folder(path: Path) -> Path:
    folder = existing_folder(path)
    if folder is None:
        raise UserError(f"there is no checkpoint {str(path)!r}; give the folder that holds model.safetensors")
    return folder


def _weights(folder: Path) -> Path:
    return folder / "model.safetensors"
