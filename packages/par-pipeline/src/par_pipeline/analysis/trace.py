"""A timeline as a trace: the JSON that ui.perfetto.dev and chrome://tracing open."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .timeline import Timeline

_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_MICROSECONDS = 1e6  # the format's unit; a simulated unit counts as a second


def write_trace(timeline: "Timeline", path: str | Path) -> None:
    """See `Timeline.trace`.

    Source: Google, Trace Event Format, "Complete Events" and "Metadata Events".
    """
    tracks = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(timeline.ranks)
    ]
    events = [
        {
            "ph": "X",
            "name": str(action),
            "cat": _NAMES[action.op],
            "pid": 0,
            "tid": rank,
            "ts": (start - timeline.start) * _MICROSECONDS,
            "dur": (end - start) * _MICROSECONDS,
            "args": {"stage": action.stage, "microbatch": action.microbatch},
        }
        for rank, action, start, end in timeline.events
    ]
    Path(path).write_text(json.dumps({"traceEvents": [*tracks, *events]}), encoding="utf-8")
