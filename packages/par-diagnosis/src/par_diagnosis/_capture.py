"""What this rank is doing, seen from another of its threads while the one that trains may be stuck."""

import linecache
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from par_groups import FlightRecorder, attributes
from par_groups.live.trace import is_foreign, short_path, sites_of

from ._dump import Dump, Frame
from ._place import Place

_FRAMES = 60
"""How many frames of a stack are kept, the innermost ones."""


def capture(
    recorder: FlightRecorder,
    place: Place,
    thread: int,
    *,
    rank: int,
    world: int,
    reason: str,
    error: BaseException | None = None,
) -> Dump:
    """Makes this rank's dump. No communication.

    Args:
        recorder: The communicators.
        place: What the program has told of its progress.
        thread: The identifier of the thread that trains.
        rank: This rank.
        world: The number of ranks.
        reason: Why, as `Dump.reason`.
        error: What the program has failed with.
    """
    now = time.time()
    stack = list(_stack(thread))
    frames = [_frame(frame, line) for frame, line in stack[:_FRAMES]]
    doing, waits_for = "", tuple[int, ...]()
    for frame, _ in stack:
        doing, waits_for = doing or _doing_of(frame), waits_for or _waits_of(frame)
    sites: tuple[str, ...] = ()
    if error is not None:
        calls = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        sites = sites_of(calls[::-1])
    return Dump(
        rank=rank,
        world=world,
        host=socket.gethostname(),
        pid=os.getpid(),
        time=now,
        reason=reason,
        step=place.step,
        phase=place.phase,
        seconds=time.monotonic() - place.since,
        frames=tuple(frames),
        doing=doing,
        waits_for=waits_for,
        error="" if error is None else _first_line(error),
        error_sites=sites,
        not_finite=place.not_finite(),
        facts=dict(place.facts),
        communicators=recorder.communicators(),
        no_record=recorder.missing,
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}" if lines[0] else type(error).__name__


def _stack(thread: int) -> Iterator[tuple[FrameType, int]]:
    """The frames of a thread and the lines that they are at, innermost first; none if the thread has ended."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame, frame.f_lineno
        frame = frame.f_back


def _frame(frame: FrameType, line: int) -> Frame:
    path = frame.f_code.co_filename
    foreign = is_foreign(path) or _is_of_diagnosis(path)
    return Frame(
        site=f"{short_path(path)}:{line}",
        function=frame.f_code.co_name,
        code=linecache.getline(path, line).strip(),
        is_foreign=foreign,
    )


def _is_of_diagnosis(path: str) -> bool:
    return Path(path).parent == Path(__file__).parent


# Objects of ours that know what a thread is in say so by two methods, which are looked for in the frames of its stack:
# so nothing is noted while all is well.


def _doing_of(frame: FrameType) -> str:
    holder = frame.f_locals.get("self")
    tell = attributes.DOING.of(type(holder))
    return "" if tell is None else str(tell(holder))


def _waits_of(frame: FrameType) -> tuple[int, ...]:
    holder = frame.f_locals.get("self")
    tell = attributes.WAITS_FOR.of(type(holder))
    return () if tell is None else tuple(tell(holder))
