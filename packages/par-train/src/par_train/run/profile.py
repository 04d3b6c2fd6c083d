"""One trace of some steps of all ranks for Perfetto: each rank runs torch's profiler, and rank 0 merges the traces.

A rank is a process of the trace, with torch's names of threads and streams. par-pipeline names its actions while a
profiler runs. They get a track of their own, so that pipeline bubbles are visible at once.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._errors import UserError

if TYPE_CHECKING:
    import torch

    from .files import RunFiles

ACTION = "pipeline "
"""The prefix of a pipeline action's name in a trace."""

_STEPS = re.compile(r"steps=(\d+):(\d+)")


def read_steps(text: str) -> tuple[int, int]:
    """Return the first step, and the step after the last one, of a text such as "steps=10:15".

    Raises:
        UserError: The text has another form, or its range is empty.
    """
    match = _STEPS.fullmatch(text)
    if match is None or int(match[1]) >= int(match[2]):
        raise UserError(f"profile={text!r}: it must be the first step and the step after the last, such as steps=10:15")
    return int(match[1]), int(match[2])


class Profile:
    """The profiler of a run.

    Args:
        steps: Range of steps to record, such as "steps=10:15".
        files: Files of the run, which include the trace.

    Raises:
        UserError: `steps` is not a range of steps.
    """

    def __init__(self, steps: str, files: "RunFiles") -> None:
        self._first, self._last = read_steps(steps)
        self._files = files
        self._profiler: torch.profiler.profile | None = None

    def at(self, step: int) -> None:
        """Start or stop the recording after `step` steps. Collective if it stops."""
        if self._profiler is None and self._first <= step < self._last:
            from torch.profiler import profile  # noqa: PLC0415 - slow to import

            self._profiler = profile()
            self._profiler.start()
        elif step >= self._last:
            self.end()

    def drop(self) -> None:
        """Stop the recording of a failed run, and write nothing."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def end(self) -> None:
        """Stop the recording, if it runs, and write the trace. Collective over the world."""
        if self._profiler is None:
            return
        import torch.distributed as dist  # noqa: PLC0415

        from par_groups import together  # noqa: PLC0415

        profiler, self._profiler = self._profiler, None
        self._first = self._last
        rank, world = dist.get_rank(), dist.get_world_size()
        parts = [self._files.folder / f"trace-{number}.json.part" for number in range(world)]
        with together("writing a trace", None):
            profiler.stop()
            profiler.export_chrome_trace(str(parts[rank]))
        with together("merging traces", None):
            if rank == 0:
                merge(parts, self._files.trace)
        parts[rank].unlink()


def merge(parts: Sequence[Path], target: Path) -> None:
    """Merge the traces of all ranks into one file. Does not communicate.

    Args:
        parts: Traces that torch's profiler exported, in the order of the ranks.
        target: Path of the merged trace.
    """
    traces = [json.loads(part.read_text(encoding="utf-8")) for part in parts]
    bases = [int(trace.get("baseTimeNanoseconds", 0)) for trace in traces]
    events = [
        event for rank, trace in enumerate(traces) for event in _events(rank, trace, (bases[rank] - bases[0]) / 1e3)
    ]
    merged = {"traceEvents": events, "displayTimeUnit": "ms", "baseTimeNanoseconds": bases[0], "ranks": len(parts)}
    target.write_text(json.dumps(merged), encoding="utf-8")


_TRACKS = 1 << 20
"""The track number of a pipeline; no thread of a process has it."""


def _events(rank: int, trace: Mapping[str, Any], shift: float) -> Iterator[dict[str, Any]]:
    """Yield the events of a rank as one process of the trace.

    Args:
        rank: The rank, which becomes the process id.
        trace: The trace that torch exported.
        shift: Microseconds from the start of rank 0's clock to the start of this rank's clock.
    """
    yield _named("process_name", rank, 0, f"rank {rank}")
    yield {**_named("process_sort_index", rank, 0, ""), "args": {"sort_index": rank}}
    threads: dict[tuple[Any, Any], int] = {}
    is_pipelined = False
    for event in trace["traceEvents"]:
        if event.get("name") in ("process_name", "process_labels", "process_sort_index"):
            continue
        place = (event.get("pid"), event.get("tid"))
        thread = threads.setdefault(place, len(threads) + 1)
        moved = {**event, "pid": rank, "tid": thread}
        if "ts" in event:
            moved["ts"] = float(event["ts"]) + shift
        if "id" in event and event.get("ph") in ("s", "t", "f"):
            moved["id"] = f"{rank}.{event['id']}"
        yield moved
        if str(event.get("name", "")).startswith(ACTION) and event.get("ph") == "X":
            is_pipelined = True
            action = str(event["name"]).removeprefix(ACTION)
            yield {
                **{key: moved[key] for key in ("ts", "dur")},
                "ph": "X",
                "cat": "pipeline",
                "name": action,
                "pid": rank,
                "tid": _TRACKS,
                "cname": _COLORS.get(action[:1], "grey"),
            }
    if is_pipelined:
        yield _named("thread_name", rank, _TRACKS, "pipeline")


_COLORS = {"F": "thread_state_running", "B": "rail_response", "I": "rail_response", "W": "rail_animation"}
"""Perfetto's color names, by the first letter of an action."""


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
