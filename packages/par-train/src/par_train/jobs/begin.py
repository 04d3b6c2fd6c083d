"""Where a run of the main job begins: what only one rank can see is made known to all, and all go on or none does."""

import json
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch.distributed as dist

from par_checkpoint import CheckpointError, Checkpoints
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
from .text import Text


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run starts from.

    Args:
        data: Rows of tokens to train on.
        folder: Folder of the Hugging Face Transformers model to train; None trains the byte GPT.
        origin: What to go on from; None starts anew.
        lock: The lock of the output folder, on rank 0.
        checkpoints: The run's checkpoints in its tiers; None if it has none.
    """

    data: JobData
    folder: ModelFolder | None
    origin: Origin | None
    lock: Lock | None
    checkpoints: Checkpoints | None = None


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """What a rank found on its machine."""

    error: str | None = None
    is_model: bool = False
    data: str = ""
    step: int | None = None


def after_restart(options: Options) -> Options:
    """The options of ranks of which some are started again. All-gather of a flag over the world.

    They go on from the checkpoint, if their own launch has written it. So do ranks of a node that has taken the place
    of a lost one, which were never started before. A launch that was refused, or that had not begun yet, has written
    none: for it, what was said about the first start holds.
    """
    restarted = any(agree(None, is_restarted(), None).values())
    if restarted and has_begun(options.files):
        return replace(options, resume="auto", overwrite=False)
    return options


def find_start(options: Options, stop: Stop, held: ExitStack) -> Start:
    """Reads the text, or makes the tokens, and the checkpoint that there may be; compares them between the ranks.

    Args:
        options: The options of the run, the same on every rank.
        stop: What this rank was asked for, which ends the making of tokens.
        held: Closed at the end of the run, it lets go of the lock that rank 0 takes on the output folder.

    Raises:
        UserError: A rank cannot use what it found, or found something else than the others; on every rank.
        StoppedEarly: A rank was asked to leave while it made the tokens; on every rank.
    """
    try:
        lock, found, origin = _look(options, held)
        digest = found.digest
    except UserError as error:
        _compare(_Facts(error=str(error)))
        raise
    step = None if origin is None else origin.state.step
    _compare(_Facts(is_model=not isinstance(found, Text), data=digest, step=step))
    checkpoints, origin = _look_into_tiers(options, origin)
    if isinstance(found, Text):
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
    _compare(_Facts())
    return Start(data=data, folder=folder, origin=origin, lock=lock, checkpoints=checkpoints)


def leave_if_asked(stop: Stop) -> None:
    """All ranks leave if one was asked to. All-gather of a number over the world.

    Raises:
        StoppedEarly: This rank, or another, was asked to leave; on every rank.
    """
    number = max(agree(None, stop.signal, None).values())
    if number:
        raise StoppedEarly(number)


def _look(options: Options, held: ExitStack) -> tuple[Lock | None, Text | ModelFolder, Origin | None]:
    """What this rank finds by itself: the lock on rank 0, the text or the model's folder, and the checkpoint."""
    lock = None
    if dist.get_rank() == 0:
        lock = held.enter_context(lock_folder(options.files, "name another folder with --output"))
    if lock is not None and not is_restarted():
        lock.note("")  # of a launch before this one
    found = check_files(options)
    if options.resume == "no":
        return lock, found, None
    _check_tiers_are_given(options)
    checkpoint = options.files.checkpoint
    state = find_state(checkpoint)
    return lock, found, None if state is None else Origin(path=str(checkpoint), folder=str(checkpoint), state=state)


def _check_tiers_are_given(options: Options) -> None:
    """Raises UserError where the run's checkpoints are in tiers of which this start knows nothing."""
    try:
        before = json.loads(options.files.tiers.read_text())
    except (OSError, ValueError):
        return
    if not set(before) & set(options.checkpoint.tiers):
        raise UserError(
            f"the checkpoints of the run in {options.output_folder!r} are in {', '.join(before)}; give them with "
            f"--checkpoint.tiers, or, if they are gone, remove {str(options.files.tiers)!r}"
        )


def _look_into_tiers(options: Options, origin: Origin | None) -> tuple[Checkpoints | None, Origin | None]:
    """Makes sure that the tiers can be saved to, and finds what to go on from, in them or in the output. Collective.

    Args:
        options: The options of the run.
        origin: The checkpoint in the output folder, of a run that had no tiers yet.

    Returns:
        The run's checkpoints in its tiers, and what to go on from.

    Raises:
        UserError: A tier cannot be, or holds a run that is neither gone on with nor replaced; on every rank.
    """
    try:
        checkpoints = checkpoints_of(options)
        if checkpoints is None:
            return None, origin
        checkpoints.check()
        found = None if options.overwrite else find_in_tiers(checkpoints)
    except (ValueError, TypeError, ImportError, CheckpointError) as error:
        raise UserError(f"checkpoint.tiers: {error}") from None
    if found is None or (origin is not None and origin.state.step > found.state.step):
        return checkpoints, origin
    if options.resume == "no":
        raise UserError(
            f"a tier holds a run already ({found.folder}); go on with --resume auto, replace it with --overwrite, or "
            "name others with --checkpoint.tiers"
        )
    return checkpoints, found


def _compare(mine: _Facts) -> None:
    """Raises what a rank has to complain about; a difference between ranks is everybody's complaint."""
    every = list(agree(None, mine, None).values())
    for rank, facts in enumerate(every):
        if facts.error is not None:
            common = all(each.error == facts.error for each in every)
            raise UserError(facts.error if common else f"rank {rank}: {facts.error}")
    others = [rank for rank, facts in enumerate(every) if facts.data != every[0].data]
    if others and mine.is_model:
        raise UserError(
            f"model.path holds another model on ranks {others} than on rank 0; give all of them the same files"
        )
    if others:
        raise UserError(
            f"data.folder holds another text on ranks {others} than on rank 0; give all of them the same files"
        )
    steps = [rank for rank, facts in enumerate(every) if facts.step != every[0].step]
    if steps:
        raise UserError(
            f"ranks {steps} do not find the checkpoint that rank 0 does (step {every[0].step}); put the output folder "
            f"on a file system that all ranks share"
        )
