"""When each rank did what: simulated, or recorded."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ..schedules.actions import Action

KEEPS = {"F": 1, "B": -1, "I": 0, "W": -1}  # by how much an action changes the number of activations that are kept


class Event(NamedTuple):
    """One action as it ran.

    Attributes:
        rank: Within the pipeline.
        action: What ran.
        start: Seconds on a clock that all ranks share, or the simulator's unit.
        end: Likewise.
    """

    rank: int
    action: Action
    start: float
    end: float


class Track(NamedTuple):
    """One rank's events in sum.

    Args:
        start: Of its first action.
        end: Of its last.
        busy: The sum of its actions' times.
        peak: The most activations it kept at once, each of one stage and microbatch.
    """

    start: float
    end: float
    busy: float
    peak: int


class Timeline:
    """A step of all ranks.

    Args:
        events: In any order.
        tracks: One for each rank, if known; the events are then looked at only when asked for. Default: summed up
            from the events.

    Raises:
        ValueError: A rank without events.
    """

    def __init__(self, events: Iterable[Event], tracks: Sequence[Track] | None = None) -> None:
        self.events = tuple(events) if tracks is None else events
        self._tracks = sum_up(self.events) if tracks is None else tracks

    def __repr__(self) -> str:
        return f"Timeline({self.ranks} ranks, makespan {self.makespan:g}, bubble {self.bubble:.1%})"

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self._tracks)

    @property
    def start(self) -> float:
        """The start of the first action."""
        return min(track.start for track in self._tracks)

    @property
    def makespan(self) -> float:
        """From the start of the first action to the end of the last, of all ranks."""
        return max(track.end for track in self._tracks) - self.start

    @property
    def bubble(self) -> float:
        """The share of time that the pipeline loses: 1 - most busy time / longest span, over the ranks."""
        longest = max(self.span(rank) for rank in range(self.ranks))
        return 1 - max(track.busy for track in self._tracks) / longest if longest else 0.0

    def span(self, rank: int) -> float:
        """From the start of a rank's first action to the end of its last."""
        return self._tracks[rank].end - self._tracks[rank].start

    def busy(self, rank: int) -> float:
        """The time in which a rank runs actions."""
        return self._tracks[rank].busy

    def idle(self, rank: int) -> float:
        """The time in which a rank waits, between its first action and its last."""
        return self.span(rank) - self.busy(rank)

    def peak(self, rank: int) -> int:
        """The most activations that a rank keeps at once, each of one stage and microbatch.

        They are kept from the forward to the end of the backward, or of the weight gradient.
        """
        return self._tracks[rank].peak

    def draw(self, path: str | Path, title: str = "") -> None:
        """Draws the step, a row a rank.

        Args:
            path: Where to; the ending decides the format (.png, .svg, .pdf).
            title: In front of the figures in the title, such as the schedule's name.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from .draw import draw  # noqa: PLC0415 - only who draws pays the import

        draw(self, path, title)

    def trace(self, path: str | Path) -> None:
        """Writes the step as JSON that ui.perfetto.dev and chrome://tracing open, a track a rank."""
        from .trace import write_trace  # noqa: PLC0415 - it takes a Timeline

        write_trace(self, path)


def sum_up(events: Iterable[Event]) -> list[Track]:
    """The tracks of all ranks."""
    by_rank: dict[int, list[Event]] = {}
    for event in events:
        by_rank.setdefault(event.rank, []).append(event)
    if not by_rank:
        raise ValueError("a timeline needs events")
    ranks = range(1 + max(by_rank))
    for rank in ranks:
        if rank not in by_rank:
            raise ValueError(f"rank {rank} of {len(ranks)} has no events; gather those of all ranks")
    return [_track(sorted(by_rank[rank], key=lambda event: event.start)) for rank in ranks]


def _track(events: Sequence[Event]) -> Track:
    kept = peak = 0
    for event in events:
        kept += KEEPS[event.action.op]
        peak = max(peak, kept)
    busy = sum(event.end - event.start for event in events)
    return Track(events[0].start, max(event.end for event in events), busy, peak)
