"""Checkpoints of the byte GPT: one folder, which par-checkpoint writes and which is replaced whole by the next.

With tiers there is a folder of this kind for each step, `checkpoints/step-00000500`, in each of them.

    checkpoint/model.safetensors     weights by name
    checkpoint/config.json           all options, and the format
    checkpoint/optimizer/            moments by name
    checkpoint/par_checkpoint.json   checksums, param groups, and what training needs to go on

No file mentions the number of ranks that wrote it.
"""

import dataclasses
import json
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, cast

from torch import nn

from par_checkpoint import CheckpointError, Checkpoints, Format, Save, Tiers, inspect, load, save
from par_precision import MixedOptimizer, precision_of

from .. import __version__
from .._errors import UserError
from ..config.settings import build
from ..run.output import say
from .gpt import GPT
from .options import DataOptions, Options

_FORMAT = 3
START_ANEW = "start anew with --overwrite, and without --resume"


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """What training needs beside the weights and the optimizer.

    Args:
        step: Optimizer steps taken.
        samples: Windows consumed by all ranks together: the position in the data.
        seconds: Time spent so far.
        text: The digest of the text.
        model: The digest of the model of transformers that the run began with; "" for the byte-level GPT.
        kept: Options that may not change when the run goes on, by their names, where the checkpoint's config.json does
            not say them.
        options: All options of a run of the byte-level GPT, as config.json has them, too, which cannot be read where
            hosts have parts of a checkpoint.
    """

    step: int
    samples: int
    seconds: float
    text: str
    model: str = ""
    kept: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A checkpoint that a run goes on from.

    Args:
        path: Its folder; with tiers, its name in each of them.
        folder: The folder, or that in the nearest tier that has it.
        state: What it says of training.
        tiers: The tiers that it is looked for in; None: it is in its folder.
    """

    path: str
    folder: str
    state: TrainingState
    tiers: Tiers | None = None

    def load(self, **parts: Any) -> None:
        """Fills what is given as `par_checkpoint.load` takes it; every rank takes its part. Collective."""
        load(self.path, tiers=self.tiers, **parts)


def checkpoints_of(options: Options) -> Checkpoints | None:
    """The run's checkpoints in its tiers; None if it has none.

    Raises:
        ValueError: The tiers cannot be; on every rank.
    """
    given = options.checkpoint
    if not given.tiers:
        return None
    keep_last = list(given.keep_last) if len(given.keep_last) > 1 else next(iter(given.keep_last), 1)
    tiers = [str(Path(tier).expanduser()) if "://" not in tier else tier for tier in given.tiers]
    name = options.files.checkpoints.name  # so that the output folder may be a tier
    return Checkpoints(name, tiers=Tiers(tiers, copies=given.copies or None), keep_last=keep_last)


def find_in_tiers(checkpoints: Checkpoints) -> Origin | None:
    """The newest step that a tier has whole, in the nearest one that has it; None if there is none. Collective.

    What is missing of a later step is said.

    Raises:
        UserError: It is no checkpoint of a run; on every rank.
    """
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        report = checkpoints.load(strict=False)  # fills nothing yet
    for each in said:
        say(f"par-train: {each.message}", sys.stderr)
    if report is None or report.step is None:
        return None
    try:
        state = TrainingState(**report.extra)
    except TypeError as error:
        raise UserError(f"{report.path!r} is no checkpoint of a run: {error}; {START_ANEW}") from None
    return Origin(path=checkpoints.name(report.step), folder=report.path, state=state, tiers=checkpoints.tiers)


def write_checkpoint(place: str | PathLike[str] | Checkpoints, state: TrainingState, **parts: Any) -> Save:
    """Writes a checkpoint in place of the one that is there, or in tiers one of this step. Collective.

    Args:
        place: Its folder, or the run's checkpoints in its tiers.
        state: Progress of the run, equal on every rank.
        **parts: What it has beside, and how it is written, as `par_checkpoint.save` takes it.
    """
    extra = dataclasses.asdict(state)
    if isinstance(place, Checkpoints):
        return cast("Save", place.save(state.step, force=True, extra=extra, **parts))
    return save(place, extra=extra, step=state.step, overwrite=True, **parts)


def save_checkpoint(
    path: str | PathLike[str] | Checkpoints,
    model: nn.Module,
    optimizer: MixedOptimizer,
    options: Options,
    state: TrainingState,
) -> Save:
    """Writes a checkpoint in place of the one that is there; a crash leaves one of them whole. Collective.

    Args:
        path: Its folder, or the run's checkpoints in its tiers.
        model: This rank's part.
        optimizer: The model's optimizer.
        options: The run's options.
        state: Progress of the run, equal on every rank.
    """
    config = {"format": _FORMAT, "par_train": __version__, "options": dataclasses.asdict(options)}
    files, scaling = Format(config=config), optimizer.scaling
    return write_checkpoint(path, state, model=model, optimizer=optimizer, scheduler=scaling, format=files)


def load_model(path: str | Path) -> GPT:
    """The model of a checkpoint, on the CPU. Where torch.distributed runs, every rank must call it.

    Args:
        path: The checkpoint folder, such as `runs/gpt/checkpoint`.

    Raises:
        ValueError: There is no checkpoint, or its format is not this version's.
    """
    load_state(Path(path))
    model = GPT(load_options_of(Path(path)).model, seed=None)
    load(path, model=model)
    return model


def load_options_of(path: Path) -> Options:
    """The options that a checkpoint was trained with.

    Raises:
        ValueError: Its config cannot be read, or its format is not this version's.
    """
    file = path / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        version = config["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{str(file)!r} is not a checkpoint's config: {error!r}; take another checkpoint") from None
    if version != _FORMAT:
        raise UserError(
            f"{str(file)!r} has format {version!r}, this par-train reads {_FORMAT}; use the one that wrote it"
        )
    return build(Options, config["options"])


def find_state(path: Path) -> TrainingState | None:
    """The training state of the checkpoint that there is, or None if there is none.

    Raises:
        ValueError: There is one, but it cannot be read.
    """
    try:
        return load_state(path)
    except UserError:
        if path.exists():
            raise
        return None


def load_state(path: Path) -> TrainingState:
    """The training state of a checkpoint.

    Raises:
        ValueError: There is no checkpoint, or it cannot be read.
    """
    try:
        extra = inspect(path).extra
        if extra is None:
            raise CheckpointError("it has no state of training")
        return TrainingState(**extra)
    except (CheckpointError, OSError, TypeError) as error:
        if not path.exists():
            raise UserError(f"there is no checkpoint {str(path)!r}; give the folder of one") from None
        raise UserError(f"{str(path)!r} is no checkpoint of a run: {error}; {START_ANEW}") from None


def kept_of_text(options: DataOptions) -> Mapping[str, Any]:
    """What a state of the byte GPT keeps of the text's options, by their names."""
    return {"data.packing": options.packing, "data.documents": options.documents}


def check_continues(path: str | PathLike[str], options: Options, state: TrainingState, text: str) -> None:
    """Makes sure that going on from the checkpoint is going on with the same run.

    How long and how fast to train may change; the model, its dtype, the seed, the text and its documents may not.

    Raises:
        UserError: Something differs; the message names it.
    """
    if state.model:
        raise UserError(
            f"the checkpoint {str(path)!r} is of a model of transformers, and without model.path a byte-level GPT is "
            f"trained; add --model.path, or {START_ANEW}"
        )
    before = build(Options, state.options) if state.options else load_options_of(Path(path))
    pairs: dict[str, tuple[Any, Any]] = {"seed": (before.seed, options.seed)}
    for key, now in kept_of_text(options.data).items():
        pairs[key] = (state.kept.get(key, now if key == "data.documents" else "auto"), now)
    for field in dataclasses.fields(options.model):
        pairs[f"model.{field.name}"] = (getattr(before.model, field.name), getattr(options.model, field.name))
    for key, (was, now) in pairs.items():
        if was != now:
            raise UserError(
                f"the checkpoint {str(path)!r} has {key} {was}, but the config says {now}; set it back, or {START_ANEW}"
            )
    if precision_of(before.precision).weights != precision_of(options.precision).weights:
        raise UserError(
            f"the checkpoint {str(path)!r} has weights of precision {before.precision!r}, which {options.precision!r} "
            f"keeps in another dtype; set it back, or {START_ANEW}"
        )
    if state.text != text:
        raise UserError(
            f"the text is not what the checkpoint {str(path)!r} was trained on; bring the folder and [data] back, or "
            f"{START_ANEW}"
        )
