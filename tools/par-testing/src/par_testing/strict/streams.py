"""Streams in virtual time, for programs that keep their order by torch's streams and events.

On a CPU torch's streams are there and do nothing, so whatever a program puts into a stream of its own holds up its
computation. These have a time each: an operation that is issued in one begins after what that stream has to do, and a
wait in it holds back that stream alone, as on a GPU.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from .clock import Clock, Line
from .player import clock_of_this_rank
from .sites import sites


class Event:
    """A moment of a stream. Methods are those of `torch.cpu.Event`."""

    def __init__(self) -> None:
        self.time = 0.0

    def record(self, stream: "Stream | None" = None) -> None:
        """Is when all is done that the stream, by default the current one, has been given."""
        self.time = (_current() if stream is None else stream).line.now

    def wait(self, stream: "Stream | None" = None) -> None:
        """Lets the stream, by default the current one, wait."""
        (_current() if stream is None else stream).wait_event(self)

    def synchronize(self) -> None:
        """The host has no time here, and waits for nothing."""

    def query(self) -> bool:
        """Whether it is over: yes, as what a stream does is done when it is told."""
        return True


class Stream:
    """A queue of work of this rank. Methods are those of `torch.cpu.Stream`.

    Args:
        line: Its time.
    """

    def __init__(self, line: Line) -> None:
        self.line = line

    def wait_stream(self, stream: "Stream") -> None:
        """What comes later begins when all is done that the other stream has been given until now."""
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        """The moment when all is done that it has been given until now."""
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """What comes later begins after that moment."""
        self.line.wait(event.time, next(iter(sites()), "an event"))


@contextmanager
def virtual_streams() -> Iterator[None]:
    """Inside, `torch.cpu`'s streams and events have times of their own, so that FSDP2, say, overlaps as on a GPU.

    The program's other computation goes on meanwhile, and takes as long as if it were alone. `strict_time()` reckons
    with what the program computes outside of any stream that it has made itself.

    Raises:
        RuntimeError: No time is reckoned.
    """
    clock = clock_of_this_rank()
    main = Stream(clock.main)
    with (
        patch.multiple(torch.cpu, Stream=_maker(clock), Event=Event, _current_stream=main, _default_cpu_stream=main),
        patch.object(clock, "current", lambda: _current().line),
    ):
        yield


def _maker(clock: Clock) -> Any:
    def make(priority: int = -1) -> Stream:  # noqa: ARG001 - torch's signature; work of all streams goes on at once
        line = Line(f"stream {len(clock.beside) + 1}")
        clock.beside.append(line)
        return Stream(line)

    return make


def _current() -> Stream:
    current: Any = torch.cpu.current_stream()
    return current  # type: ignore[no-any-return]
