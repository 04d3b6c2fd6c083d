"""When each rank did what: simulated, or recorded."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..schedules.actions import KEPT_ACTIVATIONS, OPERATION_NAMES
from ..schedules.walk import Event, Track
from .draw import draw_step

_MICROSECONDS = 1e6  # the unit of traces; a simulated unit counts as a second


class Timeline:
    """Step of all ranks.

    Args:
        events: Actions with their times, in any order.
        tracks: Sum of every rank's events, if already known; the events are then read only for a picture or a trace.
            Default: computed from the events.

    Raises:
        ValueError: A rank has no events.
    """

    def __init__(self, events: Iterable[Event], tracks: Sequence[Track] | None = None) -> None:
        self.events = tuple(events) if tracks is None else events
        self._tracks = _sum_up(self.events) if tracks is None else tracks

    def __repr__(self) -> str:
        return f"Timeline({self.ranks} ranks, makespan {self.makespan:g}, bubble {self.bubble:.1%})"

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self._tracks)

    @property
    def start(self) -> float:
        """Start time of the first action, in the unit of the times."""
        return min(track.start for track in self._tracks)

    @property
    def makespan(self) -> float:
        """The time from the start of the first action to the end of the last, over all ranks."""
        return max(track.end for track in self._tracks) - self.start

    @property
    def bubble(self) -> float:
        """The share of time that the pipeline loses: 1 - most busy time / longest span, over the ranks."""
        longest = max(self.span(rank) for rank in range(self.ranks))
        return 1 - max(track.busy for track in self._tracks) / longest if longest else 0.0

    def span(self, rank: int) -> float:
        """Return the time from the start of a rank's first action to the end of its last action."""
        return self._tracks[rank].end - self._tracks[rank].start

    def busy(self, rank: int) -> float:
        """Return the time in which a rank runs actions."""
        return self._tracks[rank].busy

    def idle(self, rank: int) -> float:
        """Return the time in which a rank waits between its first and its last action."""
        return self.span(rank) - self.busy(rank)

    def peak(self, rank: int) -> int:
        """Return the maximum number of activations that a rank keeps at once, each of one stage and microbatch.

        They are kept from the forward to the end of the backward, or of the weight gradient.
        """
        return self._tracks[rank].peak

    def draw(self, path: str | Path, title: str = "") -> None:
        """Draw the step, one row per rank.

        Args:
            path: File to write; its suffix selects the format (.png, .svg, .pdf).
            title: Prefix of the title, such as the schedule's name.

        Raises:
            ImportError: matplotlib is not installed.
        """
        begin, peaks = self.start, [track.peak for track in self._tracks]
        figures = f"makespan {self.makespan:.4g}, bubble {self.bubble:.1%}, peak {max(peaks)} activations"
        draw_step(
            path,
            [event._replace(start=event.start - begin, end=event.end - begin) for event in self.events],
            makespan=self.makespan,
            peaks=peaks,
            title=f"{title}: {figures}" if title else figures,
        )

    def trace(self, path: str | Path) -> None:
        """Write the step as JSON that ui.perfetto.dev and chrome://tracing open, one track per rank.

        Source: Google, Trace Event Format, "Complete Events" and "Metadata Events".
        """
        begin = self.start
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
            for rank in range(self.ranks)
        ]
        events = [
            {
                "ph": "X",
                "name": str(action),
                "cat": OPERATION_NAMES[action.op],
                "pid": 0,
                "tid": rank,
                "ts": (start - begin) * _MICROSECONDS,
                "dur": (end - start) * _MICROSECONDS,
                "args": {"stage": action.stage, "microbatch": action.microbatch},
            }
            for rank, action, start, end in self.events
        ]
        Path(path).write_text(json.dumps({"traceEvents": [*names, *events]}), encoding="utf-8")


def _sum_up(events: Iterable[Event]) -> list[Track]:
    """Return the totals of every rank's events."""
    by_rank: dict[int, list[Event]] = {}
    for event in events:
        by_rank.setdefault(event.rank, []).append(event)
    if not by_rank:
        raise ValueError("a timeline needs events; give those of at least one rank")
    tracks = []
    for rank in range(1 + max(by_rank)):
        if rank not in by_rank:
            raise ValueError(f"rank {rank} of {1 + max(by_rank)} has no events; gather those of all ranks")
        # Events of several ranks are gathered, so their order over time is not given.
        mine = sorted(by_rank[rank], key=lambda event: event.start)
        kept = peak = 0
        for event in mine:
            kept += KEPT_ACTIVATIONS[event.action.op]
            peak = max(peak, kept)
        busy = sum(event.end - event.start for event in mine)
        tracks.append(Track(mine[0].start, max(event.end for event in mine), busy, peak))
    return tracks
