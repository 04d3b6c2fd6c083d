"""The failure of a job in one report: the first rank that fails prints its error, and the other ranks end silently.

This module imports torch late, so that a rank can use it before torch is imported.
"""

import os
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from par_groups import read_environment

_LOST = re.compile(r"(closed|reset) by (remote )?peer|broken pipe|was likely closed|ncclRemoteError", re.IGNORECASE)


class FailureReported(Exception):  # noqa: N818 - not an error to handle, but the end of one
    """The end of a rank whose failure is printed already."""


@contextmanager
def report_first_failure(
    report: Callable[[str], object],
    *,
    common: tuple[type[Exception], ...] = (),
    summarize: Callable[[Exception], str | None] = lambda _: None,
) -> Iterator[None]:
    """Print the failure of the first rank that fails, and end the other ranks silently.

    A lost connection is printed as one sentence. A rank that lost a connection has not failed itself: the launcher
    names the rank that is gone. Use it inside the process group, so that a rank prints before it leaves its groups and
    the other ranks fail, too.

    Args:
        report: Function that prints a text, such as `print`.
        common: Errors that all ranks raise identically. They pass unchanged. Default: none.
        summarize: Function from an error to one sentence in place of its traceback, or None. Default: every error has
            its traceback.

    Raises:
        FailureReported: In place of every exception except `common`.
    """
    try:
        yield
    except FailureReported:
        raise
    except common:
        raise
    except Exception as error:
        if _is_first():
            rank = read_environment(os.environ).rank
            sentence = summarize(error)
            text = f": {sentence}" if sentence is not None else f"\n{traceback.format_exc()}"
            what = "lost its connection to another rank" if _lost_connection(error) else f"failed{text}"
            report(f"rank {rank} {what}")
        raise FailureReported from error


def _lost_connection(error: BaseException) -> bool:
    """Return whether the error or its cause is a lost connection. Only the text of torch's errors says so."""
    import torch.distributed as dist  # noqa: PLC0415 - this module is loaded before torch

    text = str(error)
    of_torch = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo/" in text)
    if of_torch and _LOST.search(text):
        return True
    return error.__cause__ is not None and _lost_connection(error.__cause__)


def _is_first() -> bool:
    """Count failures in the store of the rendezvous. If it is unreachable, every rank counts as first and prints."""
    import torch.distributed as dist  # noqa: PLC0415 - this module is loaded before torch

    place = read_environment(os.environ)
    if place.world_size == 1:
        return True
    # torchrun keeps the store over restarts of the job, so each attempt needs its own counter.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]  # torch exports it late
            place.address, place.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10)
        )
        first: int = store.add(f"par_diagnosis/failures/{attempt}", 1)
    except dist.DistError:
        return True
    return first == 1
