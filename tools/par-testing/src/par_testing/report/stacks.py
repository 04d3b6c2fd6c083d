"""Read the stack dumps of faulthandler. Pure: text in, answer out."""

import linecache
import re
from dataclasses import dataclass

_THREAD = re.compile(r"^(Current thread|Thread) 0x")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')

# Frames between a collective and C++ that say nothing about it.
_PLUMBING = ("/torch/_ops.py", "/torch/utils/_contextlib.py", "/torch/distributed/c10d_logger.py")


@dataclass(frozen=True)
class Frame:
    """One line of a stack dump."""

    file: str
    line: int
    function: str


def waits_in_collective(dump: str) -> bool:
    """Whether the main thread waits for other ranks, as far as its innermost Python frames tell.

    DistributedDataParallel waits in C++ below the autograd engine, which is therefore taken for waiting.
    """
    frames = (frame for frame in main_thread(dump) if not frame.file.endswith(_PLUMBING))
    innermost = next(frames, None)
    if innermost is None:
        return False
    if "/torch/distributed/" in innermost.file or innermost.function == "_engine_run_backward":
        return True
    return ".wait(" in linecache.getline(innermost.file, innermost.line)  # `work.wait()` has no Python frame


def main_thread(dump: str) -> list[Frame]:
    """The frames of the main thread, innermost first.

    The kernel hands a signal to the main thread, which faulthandler calls the current one; it comes last in the dump.
    """
    frames: list[Frame] = []
    for line in dump.splitlines():
        if _THREAD.match(line):
            frames = []
        elif match := _FRAME.match(line):
            frames.append(Frame(match["file"], int(match["line"]), match["function"]))
    return frames
