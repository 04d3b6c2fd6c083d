"""One trace of some steps of all ranks for Perfetto: each rank runs torch's profiler, and rank 0 merges the traces.

A rank is a process of the trace, with torch's names of threads and streams. par-pipeline names its actions while a
profiler runs. They get a track of their own, so that pipeline bubbles are visible at once.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from par_groups import together

if TYPE_CHECKING:
    import torch

ACTION = "pipeline "
"""The prefix of a pipeline action's name in a trace."""


class StepProfiler:
    """torch's profiler for a range of steps on all ranks of torch.distributed, with one trace for Perfetto.

    Args:
        steps: Steps to record, such as `range(10, 15)`; an empty range records nothing.
        path: File of the trace, such as "trace.json". Every rank writes its part beside it, so that the folder must be
            one that all ranks share.

    Example:
        profiler = StepProfiler(range(10, 15), "trace.json")
        for step, batch in enumerate(batches):
            profiler.update(step)
            train(batch)
        profiler.stop()
    """

    def __init__(self, steps: range, path: str | PathLike[str]) -> None:
        self._steps, self._path = steps, Path(path)
        self._profiler: torch.profiler.profile | None = None

    def update(self, step: int) -> None:
        """Start or stop the recording before a step. Collective if it stops.

        Args:
            step: Number of finished steps.
        """
        if self._profiler is None and step in self._steps:
            from torch.profiler import profile  # noqa: PLC0415 - slow to import

            self._profiler = profile()
            self._profiler.start()
        elif step >= self._steps.stop:
            self.stop()

    def cancel(self) -> None:
        """Stop the recording of a failed job, and write nothing."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def stop(self) -> None:
        """Stop the recording, if it runs, and write the trace. Collective over the world."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        self._steps = range(0)
        rank, world = dist.get_rank(), dist.get_world_size()
        parts = [self._path.with_name(f"{self._path.stem}-{number}.json.part") for number in range(world)]
        with together("writing a trace", None):
            profiler.stop()
            profiler.export_chrome_trace(str(parts[rank]))
        with together("merging traces", None):
            if rank == 0:
                merge_traces(parts, self._path)
        parts[rank].unlink()


def merge_traces(parts: Sequence[str | PathLike[str]], target: str | PathLike[str]) -> None:
    """Merge the traces of all ranks into one file. Does not communicate.

    Args:
        parts: Traces that torch's profiler exported, in the order of the ranks.
        target: Path of the merged trace.
    """
    traces = [json.loads(Path(part).read_text(encoding="utf-8")) for part in parts]
    bases = [int(trace.get("baseTimeNanoseconds", 0)) for trace in traces]
    events = [
        event for rank, trace in enumerate(traces) for event in _events(rank, trace, (bases[rank] - bases[0]) / 1e3)
    ]
    merged = {"traceEvents": events, "displayTimeUnit": "ms", "baseTimeNanoseconds": bases[0], "ranks": len(parts)}
    Path(target).write_text(json.dumps(merged), encoding="utf-8")


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
