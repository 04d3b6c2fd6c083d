"""What is printed, which nobody has to read: a run goes on when its output is lost."""

import os
import sys
from typing import TextIO


def say(text: str, stream: TextIO | None = None) -> None:
    """Prints a line at once; if that fails, drops it and all that the stream gets from then on.

    Args:
        text: Without the end of the line.
        stream: Else the standard output.
    """
    stream = sys.stdout if stream is None else stream
    try:
        print(text, file=stream, flush=True)
    except OSError:  # the reader is gone, or the disk is full
        drop_output(stream.fileno())


def open_missing_streams() -> None:
    """Gives a process that was started without standard streams (`>&-`) some that lead nowhere, and its children.

    Else the next file or socket that is opened gets their numbers, and whatever is printed goes into it.
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
    """Lets what is written there vanish."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, descriptor, inheritable=True)
    if nowhere == descriptor:  # it was closed
        os.set_inheritable(descriptor, True)
    else:
        os.close(nowhere)


def end_of(text: str, columns: int = 69) -> str:
    """Return as much of the end of a path as fits into a line of the banner, which is 80 columns with its label."""
    return text if len(text) <= columns else "..." + text[3 - columns :]
