"""The start of a job: ranks compare the data that each of them found, and all continue or all raise."""

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
    found: FolderText | ModelFolder | None = None
    problem = ""
    try:
        found = read_files(options)
    except UserError as error:
        problem = str(error)
    # A rank that cannot go on takes part in the comparison, too, because the others wait for it there.
    every = agree(None, (problem, "" if found is None else found.digest), None)
    for rank, (text, _) in every.items():
        if text:
            # A mistake that all ranks have found is not one rank's.
            common = all(each == text for each, _ in every.values())
            raise UserError(text if common else f"rank {rank}: {text}")
    others = [rank for rank, (_, digest) in every.items() if digest != every[0][1]]
    if others:
        what = "model.path holds another model" if options.model.folder else "data.folder holds another text"
        raise UserError(f"{what} on ranks {others} than on rank 0; copy the same files to all hosts")
    assert found is not None  # noqa: S101 - otherwise there was a problem
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
