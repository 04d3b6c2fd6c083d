"""A trace of some steps of all ranks in one file for Perfetto: torch's profiler on each, merged by the first one.

A rank is a process of the trace. Its threads and streams are as torch has named them, and the actions of its part of a
pipeline, which par-pipeline names while a profiler runs, are one more track, so that bubbles are seen at once.
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
"""How the names of a pipeline's actions begin in a trace; behind it stands the action."""

_STEPS = re.compile(r"steps=(\d+):(\d+)")


def read_steps(text: str) -> tuple[int, int]:
    """The first step and the one after the last, of a text such as "steps=10:15".

    Raises:
        UserError: It is no such text, or has no step.
    """
    match = _STEPS.fullmatch(text)
    if match is None or int(match[1]) >= int(match[2]):
        raise UserError(f"profile is {text!r}; give the first step and the one after the last, such as steps=10:15")
    return int(match[1]), int(match[2])


class Profile:
    """The profiler of a run.

    Args:
        steps: What is recorded, such as "steps=10:15".
        files: Where the trace is written.

    Raises:
        UserError: That is no range of steps.
    """

    def __init__(self, steps: str, files: "RunFiles") -> None:
        self._first, self._last = read_steps(steps)
        self._files = files
        self._profiler: torch.profiler.profile | None = None

    def at(self, step: int) -> None:
        """Begins or ends the recording, as that many steps are done. Collective where it ends."""
        if self._profiler is None and self._first <= step < self._last:
            from torch.profiler import profile  # noqa: PLC0415 - slow to import

            self._profiler = profile()
            self._profiler.start()
        elif step >= self._last:
            self.end()

    def drop(self) -> None:
        """Ends the recording of a run that has failed, and writes nothing."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def end(self) -> None:
        """Ends the recording, if there is one, and writes the trace. Collective over the world."""
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
    """Writes one trace of those of all ranks. Pure but for the files.

    Args:
        parts: What torch's profiler exported, in the order of the ranks.
        target: The trace for Perfetto.
    """
    traces = [json.loads(part.read_text(encoding="utf-8")) for part in parts]
    bases = [int(trace.get("baseTimeNanoseconds", 0)) for trace in traces]
    events = [
        event for rank, trace in enumerate(traces) for event in _events(rank, trace, (bases[rank] - bases[0]) / 1e3)
    ]
    merged = {"traceEvents": events, "displayTimeUnit": "ms", "baseTimeNanoseconds": bases[0], "ranks": len(parts)}
    target.write_text(json.dumps(merged), encoding="utf-8")


_TRACKS = 1 << 20
"""The number of a pipeline's track, beside those of the threads of a process."""


def _events(rank: int, trace: Mapping[str, Any], shift: float) -> Iterator[dict[str, Any]]:
    """The events of a rank, as one process of the trace.

    Args:
        rank: Its number, which becomes that of the process.
        trace: What torch exported.
        shift: Microseconds that its clock began after that of rank 0.
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
"""Perfetto's names of colors, by an action's letter."""


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
