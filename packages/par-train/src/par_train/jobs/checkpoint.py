"""Checkpoints of a job: one folder, which par-checkpoint writes and which the next checkpoint replaces.

With tiers, each tier has such a folder for each step, `checkpoints/step-00000500`.

    checkpoint/model.safetensors     weights by name.
    checkpoint/config.json           options and format of the byte GPT, or the config of the other model.
    checkpoint/optimizer/            moments by name.
    checkpoint/par_checkpoint.json   checksums, param groups, and the `TrainingState`.

The files do not depend on the number of ranks.
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
    """The state of training in addition to weights and optimizer.

    Args:
        step: Number of optimizer steps.
        samples: Number of windows that all ranks consumed: the position in the data.
        seconds: Seconds of training so far.
        text: Hash of the text.
        model: Hash of the Hugging Face Transformers model that training started from; "" for the byte GPT.
        kept: Options that must stay the same when the run resumes, by name.
        numerics: What the bits of a canonical run depend on; empty for ordinary numerics.
        digest: Digest of the weights of a canonical run; "" for ordinary numerics.
    """

    step: int
    samples: int
    seconds: float
    text: str
    model: str = ""
    kept: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    numerics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    digest: str = ""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """A checkpoint to resume from.

    Args:
        path: Folder of the checkpoint; with tiers, its name in each tier.
        folder: Folder of the checkpoint; with tiers, the folder in the nearest tier that has it.
        state: State of training.
        tiers: Tiers to load from; None loads from the folder.
    """

    path: str
    folder: str
    state: TrainingState
    tiers: Tiers | None = None

    def load(self, **parts: Any) -> None:
        """Load into `parts`, as `par_checkpoint.load` does. Each rank loads its shard. Collective."""
        load(self.path, tiers=self.tiers, **parts)


def checkpoints_of(options: Options) -> Checkpoints | None:
    """Return the run's checkpoints in its tiers; None without tiers.

    Raises:
        ValueError: The tiers are not usable; on every rank.
    """
    given = options.checkpoint
    if not given.tiers:
        return None
    # One number is for all tiers; several are one for each tier.
    keep_last = list(given.keep_last) if len(given.keep_last) > 1 else next(iter(given.keep_last), 1)
    tiers = [str(Path(tier).expanduser()) if "://" not in tier else tier for tier in given.tiers]
    name = options.files.checkpoints.name  # so that the output folder may be a tier
    return Checkpoints(name, tiers=Tiers(tiers, copies=given.copies or None), keep_last=keep_last)


def find_in_tiers(checkpoints: Checkpoints) -> Origin | None:
    """Find the newest complete step, in the nearest tier that has it; None without one. Collective.

    Prints the missing parts of later steps.

    Raises:
        UserError: The step is not a checkpoint of a run; on every rank.
    """
    # Warnings would name a line of this file; the user gets their words as a line of the run instead.
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        report = checkpoints.load(strict=False)  # loads no tensors yet
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
    """Write a checkpoint. In a folder it replaces the last one; in tiers each step has its own. Collective.

    Args:
        place: Folder of the checkpoint, or the run's checkpoints in its tiers.
        state: Progress of the run, equal on every rank.
        **parts: Arguments of `par_checkpoint.save`, such as models and optimizers.
    """
    extra = dataclasses.asdict(state)
    if isinstance(place, Checkpoints):
        return cast("Save", place.save(state.step, force=True, extra=extra, **parts))
    return save(place, extra=extra, step=state.step, overwrite=True, **parts)


def find_state(path: Path) -> TrainingState | None:
    """Return the training state of a checkpoint; None if the path does not exist.

    Raises:
        ValueError: The path exists, but is not a readable checkpoint.
    """
    try:
        return load_state(path)
    except UserError:
        if path.exists():
            raise
        return None


def load_state(path: Path) -> TrainingState:
    """Return the training state of a checkpoint.

    Raises:
        ValueError: The checkpoint does not exist or is not readable.
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
        # Precisions with the same weights, such as fp32 and bf16-amp, may replace each other.
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
