"""The start of a job: ranks share what each of them found, and all continue or all raise."""

import json
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch.distributed as dist

from par_checkpoint import CheckpointError, Checkpoints
from par_data import FolderText
from par_groups import agree

from .._errors import UserError
from ..run.lock import Lock, has_begun, is_restarted, lock_folder
from ..run.stop import Stop, StoppedEarly
from . import byte_gpt
from .byte_rows import text_rows
from .checkpoint import Origin, check_resumes, checkpoints_of, find_in_tiers, find_state
from .checks import check_files
from .data import JobData
from .existing import model as pretrained
from .existing.data import read_data
from .existing.folder import ModelFolder
from .options import Options


@dataclass(frozen=True, kw_only=True)
class Start:
    """The start of a run: data, model, and the checkpoint to resume from.

    Args:
        data: Rows of tokens to train on.
        folder: Folder of the Hugging Face Transformers model to train; None trains the byte GPT.
        origin: Checkpoint to resume from; None starts at step 0.
        lock: Lock of the output folder, on rank 0.
        checkpoints: Checkpoints of the run in its tiers; None without tiers.
    """

    data: JobData
    folder: ModelFolder | None
    origin: Origin | None
    lock: Lock | None
    checkpoints: Checkpoints | None = None


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """The findings of a rank on its host."""

    error: str | None = None
    is_model: bool = False
    data: str = ""
    step: int | None = None


def after_restart(options: Options) -> Options:
    """Return the options to use if the launcher restarted a rank. All-gather of a flag over the world.

    Restarted ranks resume from the checkpoint that their own launch has written. So do the new ranks of a node that
    replaces a lost node. If the launch has not begun a run yet, it has no checkpoint, and the options stay unchanged.
    """
    restarted = any(agree(None, is_restarted(), None).values())
    if restarted and has_begun(options.files):
        return replace(options, resume="auto", overwrite=False)
    return options


def find_start(options: Options, stop: Stop, held: ExitStack) -> Start:
    """Read the text or tokenize the data, find a checkpoint, and compare both between the ranks.

    Args:
        options: Options of the run, the same on every rank.
        stop: Requests to this rank; a request ends tokenization.
        held: Stack that holds rank 0's lock of the output folder until the end of the run.

    Raises:
        UserError: A rank cannot use a file, or its files differ from the files of rank 0; on every rank.
        StoppedEarly: A rank was asked to leave while it tokenized; on every rank.
    """
    try:
        lock, found, origin = _look(options, held)
        digest = found.digest
    except UserError as error:
        # The other ranks wait in this comparison, so a rank that cannot go on takes part in it once more.
        _compare(_Facts(error=str(error)))
        raise
    # Each of the comparisons below is reached by all ranks or by none, since a failed one raises on all.
    step = None if origin is None else origin.state.step
    _compare(_Facts(is_model=not isinstance(found, FolderText), data=digest, step=step))
    checkpoints, origin = _look_into_tiers(options, origin)
    if isinstance(found, FolderText):
        folder, data = None, text_rows(options, found)
        model, kept = "", byte_gpt.kept_options(options)
    else:
        try:
            folder, data = found, read_data(options, found, stop)
        except Exception:  # every rank raises one, each with its own message
            leave_if_asked(stop)
            raise
        model, kept = found.digest, pretrained.kept_options(options, data.context)
    try:
        if origin is not None:
            check_resumes(kept, model, data, origin)
    except UserError as error:
        _compare(_Facts(error=str(error)))
        raise
    # Here the ranks whose checkpoint fits meet those that have just reported an error.
    _compare(_Facts())
    return Start(data=data, folder=folder, origin=origin, lock=lock, checkpoints=checkpoints)


def leave_if_asked(stop: Stop) -> None:
    """Leave on all ranks if one rank was asked to leave. All-gather of a number over the world.

    Raises:
        StoppedEarly: A rank was asked to leave; on every rank.
    """
    number = max(agree(None, stop.signal, None).values())
    if number:
        raise StoppedEarly(number)


def _look(options: Options, held: ExitStack) -> tuple[Lock | None, FolderText | ModelFolder, Origin | None]:
    """Take the lock on rank 0; return it with the text or the model's folder, and the checkpoint, of this rank."""
    lock = None
    if dist.get_rank() == 0:
        lock = held.enter_context(lock_folder(options.files, "name another folder with --output"))
    # A restarted rank needs the note: it says whether this launch had begun its run.
    if lock is not None and not is_restarted():
        lock.note("")  # erases the note of an earlier launch
    found = check_files(options)
    if options.resume == "no":
        return lock, found, None
    _check_tiers_are_given(options)
    checkpoint = options.files.checkpoint
    state = find_state(checkpoint)
    return lock, found, None if state is None else Origin(path=str(checkpoint), folder=str(checkpoint), state=state)


def _check_tiers_are_given(options: Options) -> None:
    """Raise UserError if the run's checkpoints are in tiers that the options do not name."""
    try:
        before = json.loads(options.files.tiers.read_text())
    except (OSError, ValueError):
        return
    if not set(before) & set(options.checkpoint.tiers):
        raise UserError(
            f"the checkpoints of the run in {options.output_folder!r} are in {', '.join(before)}; pass them as "
            f"--checkpoint.tiers, or, if they are gone, remove {str(options.files.tiers)!r}"
        )


def _look_into_tiers(options: Options, origin: Origin | None) -> tuple[Checkpoints | None, Origin | None]:
    """Check the tiers, and find the checkpoint to resume from, in them or in the output folder. Collective.

    Args:
        options: Options of the run.
        origin: Checkpoint in the output folder, from a run without tiers.

    Returns:
        The run's checkpoints in its tiers, and the checkpoint to resume from.

    Raises:
        UserError: A tier is not usable, or has a run that is neither resumed nor replaced; on every rank.
    """
    try:
        checkpoints = checkpoints_of(options)
        if checkpoints is None:
            return None, origin
        checkpoints.check()
        found = None if options.overwrite else find_in_tiers(checkpoints)
    except (ValueError, TypeError, ImportError, CheckpointError) as error:
        raise UserError(f"checkpoint.tiers: {error}") from None
    # A run that began without tiers may be ahead of them; the newer checkpoint counts.
    if found is None or (origin is not None and origin.state.step > found.state.step):
        return checkpoints, origin
    if options.resume == "no":
        raise UserError(
            f"a tier holds a run already ({found.folder}); resume it with --resume auto, replace it with --overwrite, "
            "or pass other tiers as --checkpoint.tiers"
        )
    return checkpoints, found


def _compare(mine: _Facts) -> None:
    """Raise the error of any rank, or an error if the ranks found different files. All-gather over the world."""
    every = list(agree(None, mine, None).values())
    for rank, facts in enumerate(every):
        if facts.error is not None:
            # A mistake that all ranks have found is not one rank's.
            common = all(each.error == facts.error for each in every)
            raise UserError(facts.error if common else f"rank {rank}: {facts.error}")
    others = [rank for rank, facts in enumerate(every) if facts.data != every[0].data]
    if others and mine.is_model:
        raise UserError(
            f"model.path holds another model on ranks {others} than on rank 0; copy the same files to all hosts"
        )
    if others:
        raise UserError(
            f"data.folder holds another text on ranks {others} than on rank 0; copy the same files to all hosts"
        )
    steps = [rank for rank, facts in enumerate(every) if facts.step != every[0].step]
    if steps:
        raise UserError(
            f"ranks {steps} do not find the checkpoint that rank 0 does (step {every[0].step}); put the output folder "
            f"on a file system that all ranks share"
        )
