"""Printing that never ends a run: training continues when the reader of its output is gone."""

import os
import sys
from typing import TextIO


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line and flush. If that fails, drop the line and everything that the stream receives later.

    Args:
        text: Line without its newline.
        stream: Stream to print to; default: standard output.
    """
    stream = sys.stdout if stream is None else stream
    try:
        print(text, file=stream, flush=True)
    except OSError:  # the reader is gone, or the disk is full
        drop_output(stream.fileno())


def open_missing_streams() -> None:
    """Open the null device for each standard stream that the process lacks (`>&-`), and for its children.

    Otherwise the next opened file or socket gets the stream's descriptor, and prints are written into it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            drop_output(descriptor)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - for the whole life of the process
    sys.stdout = sys.stdout or open(1, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115


def drop_output(descriptor: int) -> None:
    """Discard everything that is written to a descriptor."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, descriptor, inheritable=True)
    if nowhere == descriptor:  # the descriptor was closed, and open() reused its number
        os.set_inheritable(descriptor, True)
    else:
        os.close(nowhere)


def end_of(text: str, columns: int = 69) -> str:
    """Return the end of a path that fits into a line of the banner, which has 80 columns with its label."""
    return text if len(text) <= columns else "..." + text[3 - columns :]
