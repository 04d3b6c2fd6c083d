"""Checkpoints of a job: one folder, which par-checkpoint writes and which the next checkpoint replaces.

With tiers there is a folder of this kind for each step, `checkpoints/step-00000500`, in each of them.

    checkpoint/model.safetensors     weights by name
    checkpoint/config.json           of the byte GPT: all options, and the format; else the model's own
    checkpoint/optimizer/            moments by name
    checkpoint/par_checkpoint.json   checksums, param groups, and what training needs to go on

No file mentions the number of ranks that wrote it.
"""

import dataclasses
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, cast

from par_checkpoint import CheckpointError, Checkpoints, Save, Tiers, inspect, load, save
from par_precision import precision_of

from .._errors import UserError
from ..run.output import say
from .data import JobData
from .options import Options

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
        kept: Options that must stay the same when the run resumes, by name.
    """

    step: int
    samples: int
    seconds: float
    text: str
    model: str = ""
    kept: Mapping[str, Any] = dataclasses.field(default_factory=dict)


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


def check_resumes(kept: Mapping[str, Any], model: str, data: JobData, origin: Origin) -> None:
    """Make sure that resuming from a checkpoint continues the same run.

    The length of a run and its learning rate may change. The model, the dtype of its weights, its rows and the seed
    may not.

    Args:
        kept: Options that must stay the same, by name.
        model: Hash of the Hugging Face Transformers model that training starts from; "" for the byte GPT.
        data: Rows of tokens.
        origin: The checkpoint.

    Raises:
        UserError: Something differs; the message names it.
    """
    path, state = origin.folder, origin.state
    if bool(state.model) != bool(model):
        kinds = ["a byte-level GPT", "a Hugging Face Transformers model"]
        remedy = "set --model.path to the model" if state.model else "remove model.path and model.config"
        raise UserError(
            f"the checkpoint {path!r} is of {kinds[bool(state.model)]}, and the options train "
            f"{kinds[bool(model)]}; {remedy}, or {START_ANEW}"
        )
    if state.model != model:
        raise UserError(
            f"the checkpoint {path!r} was trained from another model than the one that the options name; restore the "
            f"folder as it was, or {START_ANEW}"
        )
    for name, now in kept.items():
        was = state.kept.get(name)
        if name == "precision" and precision_of(str(was)).weights == precision_of(now).weights:
            continue
        if was != now:
            raise UserError(
                f"the checkpoint {path!r} has {name} {was!r}, but the config has {now!r}; set it back, or {START_ANEW}"
            )
    if state.text != data.digest:
        raise UserError(
            f"the tokens of {' and '.join(data.names)} differ from the ones that the checkpoint {path!r} was trained "
            f"on; restore the files, their format and the tokenizer, or {START_ANEW}"
        )
