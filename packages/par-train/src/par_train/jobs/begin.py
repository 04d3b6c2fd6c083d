"""Where a run of the main job begins: what only one rank can see is made known to all, and all go on or none does."""

from contextlib import ExitStack
from dataclasses import dataclass

import torch.distributed as dist

from par_groups import agree

from .._errors import UserError
from ..run.attempt import is_restarted
from ..run.lock import Lock, lock_folder
from ..run.stop import Stop, StoppedEarly
from .checkpoint import TrainingState, check_continues, find_state
from .checks import check_files
from .options import Options
from .text import Text


@dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run starts from.

    Args:
        text: What to train on.
        state: What to go on from; None starts anew.
        lock: The lock of the output folder, on rank 0.
    """

    text: Text
    state: TrainingState | None
    lock: Lock | None


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """What a rank found on its machine."""

    error: str | None = None
    text: str = ""
    step: int | None = None


def find_start(options: Options, held: ExitStack) -> Start:
    """Reads the text and the checkpoint that there may be, and compares them between the ranks.

    Args:
        options: The options of the run, the same on every rank.
        held: Closed at the end of the run, it lets go of the lock that rank 0 takes on the output folder.

    Raises:
        UserError: A rank cannot use what it found, or found something else than the others; on every rank.
    """
    try:
        start = _look(options, held)
    except UserError as error:
        _compare(_Facts(error=str(error)))
        raise
    step = None if start.state is None else start.state.step
    _compare(_Facts(text=start.text.digest, step=step))
    return start


def leave_if_asked(stop: Stop) -> None:
    """All ranks leave if one was asked to. All-gather of a number over the world.

    Raises:
        StoppedEarly: This rank, or another, was asked to leave; on every rank.
    """
    number = max(agree(None, stop.signal, None).values())
    if number:
        raise StoppedEarly(number)


def _look(options: Options, held: ExitStack) -> Start:
    lock = None
    if dist.get_rank() == 0:
        lock = held.enter_context(lock_folder(options.files, "name another folder with --output"))
    if lock is not None and not is_restarted():
        lock.note("")  # of a launch before this one
    text = check_files(options)
    checkpoint = options.files.checkpoint
    state = None if options.resume == "no" else find_state(checkpoint)
    if state is not None:
        check_continues(checkpoint, options, state, text.digest)
    return Start(text=text, state=state, lock=lock)


def _compare(mine: _Facts) -> None:
    """Raises what a rank has to complain about; a difference between ranks is everybody's complaint."""
    every = list(agree(None, mine, None).values())
    for rank, facts in enumerate(every):
        if facts.error is not None:
            common = all(each.error == facts.error for each in every)
            raise UserError(facts.error if common else f"rank {rank}: {facts.error}")
    texts = [rank for rank, facts in enumerate(every) if facts.text != every[0].text]
    if texts:
        raise UserError(
            f"data.folder holds another text on ranks {texts} than on rank 0; give all of them the same files"
        )
    steps = [rank for rank, facts in enumerate(every) if facts.step != every[0].step]
    if steps:
        raise UserError(
            f"ranks {steps} do not find the checkpoint that rank 0 does (step {every[0].step}); put the output folder "
            f"on a file system that all ranks share"
        )
