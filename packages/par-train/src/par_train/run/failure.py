"""The failure of a rank, said once: by the one that failed, not by those whose collectives broke when it left."""

import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from par_groups import read_environment

from .._errors import TrainingError, UserError
from .output import say
from .stop import StoppedEarly

_LOST = re.compile(r"(closed|reset) by (remote )?peer|broken pipe|was likely closed|ncclRemoteError", re.IGNORECASE)


class Reported(Exception):  # noqa: N818 - not an error to handle, but the end of one
    """A rank has failed, and everything that there is to say about it is printed."""


@contextmanager
def one_traceback() -> Iterator[None]:
    """Prints the failure of the rank that fails first, and ends the others silently.

    A failed disk and a lost connection are said in a sentence, anything else with its traceback. Who loses a
    connection has not failed itself: the launcher names the rank that is gone.

    Use it inside of the world, so that a rank speaks before it leaves its groups and the others fail too.

    Raises:
        Reported: In place of any exception but those that all ranks raise alike.
    """
    try:
        yield
    except (UserError, TrainingError, StoppedEarly, Reported):
        raise
    except Exception as error:
        if _is_first():
            rank = read_environment(os.environ).rank
            what = "lost its connection to another rank" if _lost_connection(error) else f"failed{_describe(error)}"
            say(f"par-train: rank {rank} {what}", sys.stderr)
        raise Reported from error


def _describe(error: Exception) -> str:
    """What comes behind the rank: one sentence where the error names the file and what is wrong with it."""
    from par_checkpoint import CheckpointError  # noqa: PLC0415 - this module is loaded before torch

    nameless = isinstance(error, OSError) and error.strerror is not None and error.filename is None
    if isinstance(error, CheckpointError | OSError) and not nameless:
        return f": {error}"
    return f"\n{traceback.format_exc()}"


def _lost_connection(error: BaseException) -> bool:
    """Whether the error, or what caused it, is the end of a connection, which torch's errors tell by their text."""
    import torch.distributed as dist  # noqa: PLC0415 - this module is loaded before torch

    text = str(error)
    of_torch = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/" in text)
    if of_torch and _LOST.search(text):
        return True
    return error.__cause__ is not None and _lost_connection(error.__cause__)


def _is_first() -> bool:
    """Counts the failures in the store that the ranks met in; if it cannot be reached, better twice than never."""
    import torch.distributed as dist  # noqa: PLC0415 - this module is loaded before torch

    place = read_environment(os.environ)
    if place.world_size == 1:
        return True
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]  # torch exports it late
            place.address, place.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10)
        )
        first: int = store.add(f"par_train/failures/{attempt}", 1)
    except dist.DistError:
        return True
    return first == 1
