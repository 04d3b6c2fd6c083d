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


def drop_output(descriptor: int) -> None:
    """Lets what is written there vanish."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
