"""The dump of this rank, made by another thread while the program may be stuck."""

import linecache
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from par_groups import FlightRecorder, attributes, call_sites, is_library_path, shorten_path

from ._activity import Activity
from ._dump import Dump, StackFrame

_FRAMES = 60
"""Number of frames of a stack that are kept, the innermost ones."""


def capture(
    recorder: FlightRecorder,
    activity: Activity,
    thread: int,
    *,
    rank: int,
    world: int,
    reason: str,
    error: BaseException | None = None,
) -> Dump:
    """Make the dump of this rank, without communication.

    Args:
        recorder: Recorder of the process groups.
        activity: Progress that the program has reported.
        thread: Identifier of the thread that trains.
        rank: Global rank.
        world: Number of ranks.
        reason: Reason for the dump; see `Dump.reason`.
        error: Exception that the program has raised.
    """
    # The first reading of the recorder takes a second, so the time is taken before it.
    now = time.time()
    stack = list(_stack(thread))
    doing, waits_for = "", tuple[int, ...]()
    for frame, _ in stack:
        # An object of the stack can describe what it does. Its method is called here only, so it costs a step nothing.
        # The class is searched, and not the object, because an object's own `__getattr__` could have side effects.
        holder = frame.f_locals.get("self")
        describe, list_ranks = attributes.DOING.of(type(holder)), attributes.WAITS_FOR.of(type(holder))
        doing = doing or ("" if describe is None else describe(holder))
        waits_for = waits_for or (() if list_ranks is None else list_ranks(holder))
    failure, sites = "", tuple[str, ...]()
    if error is not None:
        # The report is one line, so it has only the first line of the error.
        first = next(iter(str(error).splitlines()), "")
        failure = f"{type(error).__name__}: {first}" if first else type(error).__name__
        calls = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        # A traceback begins with the outermost call, and a place in the program with the innermost.
        sites = call_sites(calls[::-1])
    return Dump(
        rank=rank,
        world=world,
        host=socket.gethostname(),
        pid=os.getpid(),
        time=now,
        reason=reason,
        step=activity.step,
        phase=activity.phase,
        seconds=time.monotonic() - activity.since,
        frames=tuple(_frame(frame, line) for frame, line in stack[:_FRAMES]),
        doing=doing,
        waits_for=waits_for,
        error=failure,
        error_sites=sites,
        non_finite=activity.non_finite(),
        facts=dict(activity.facts),
        communicators=recorder.communicators(),
        no_record=recorder.missing,
    )


def _stack(thread: int) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of a thread and their lines, innermost first; nothing if the thread has ended."""
    # This works although the thread is stuck in C code, because its Python frames do not change there.
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _frame(frame: FrameType, line: int) -> StackFrame:
    path = frame.f_code.co_filename
    return StackFrame(
        site=f"{shorten_path(path)}:{line}",
        function=frame.f_code.co_name,
        code=linecache.getline(path, line).strip(),
        is_library=is_library_path(path) or Path(path).parent == Path(__file__).parent,
    )
