"""The start of a job: ranks compare the data that each of them found, and all continue or all raise."""

from dataclasses import dataclass

from par_data import FolderText
from par_groups import agree

from .._errors import UserError
from ..run.stop import Stop, StoppedEarly
from .byte_rows import text_rows
from .checks import read_files
from .existing.data import read_data
from .existing.folder import ModelFolder
from .options import Options
from .recipe import JobData


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """The findings of a rank on its host."""

    error: str | None = None
    is_model: bool = False
    data: str = ""


def read_start(options: Options, stop: Stop) -> tuple[JobData, ModelFolder | None]:
    """Read the text or tokenize the data, and compare it between the ranks. Collective.

    Args:
        options: Options of the run, the same on every rank.
        stop: Requests to this rank; a request ends tokenization.

    Returns:
        The rows to train on, and the folder of the model; None for the byte GPT.

    Raises:
        UserError: A rank cannot use a file, or its files differ from the files of rank 0; on every rank.
        StoppedEarly: A rank was asked to leave while it tokenized; on every rank.
    """
    try:
        found = read_files(options)
        facts = _Facts(is_model=not isinstance(found, FolderText), data=found.digest)
    except UserError as error:
        # The other ranks wait in the comparison, so a rank that cannot go on takes part in it, too.
        _compare(_Facts(error=str(error)))
        raise
    _compare(facts)
    if isinstance(found, FolderText):
        return text_rows(options, found), None
    try:
        return read_data(options, found, stop), found
    except Exception:  # every rank raises one, each with its own message
        leave_if_asked(stop)
        raise


def leave_if_asked(stop: Stop) -> None:
    """Leave on all ranks if one rank was asked to leave. All-gather of a number over the world.

    Raises:
        StoppedEarly: A rank was asked to leave; on every rank.
    """
    number = max(agree(None, stop.signal, None).values())
    if number:
        raise StoppedEarly(number)


def _compare(mine: _Facts) -> None:
    """Raise the error of any rank, or an error if the ranks found different files. All-gather over the world."""
    every = list(agree(None, mine, None).values())
    for rank, facts in enumerate(every):
        if facts.error is not None:
            # A mistake that all ranks have found is not one rank's.
            common = all(each.error == facts.error for each in every)
            raise UserError(facts.error if common else f"rank {rank}: {facts.error}")
    others = [rank for rank, facts in enumerate(every) if facts.data != every[0].data]
    if others:
        what = "model.path holds another model" if mine.is_model else "data.folder holds another text"
        raise UserError(f"{what} on ranks {others} than on rank 0; copy the same files to all hosts")
