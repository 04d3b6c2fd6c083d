"""`MetricsLog`: the lines of metrics of a run, from what ranks log to files, trackers and progress."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from par_groups import agree, number_on_device, together

from ..strategy.strategy import Strategy
from .files import RunFiles
from .metrics import Line, MetricsFile, numbers_of, read_metrics, texts_of, truncate_metrics
from .monitor import Monitor
from .output import say
from .policies import LoggingPolicy
from .progress import Progress, make_progress
from .stop import Stop
from .trackers import Tracker, make_trackers

Value = Tensor | float | int | np.integer[Any] | np.floating[Any]
"""A number that a loop can log."""


@dataclass(kw_only=True)
class _Sum:
    """The sum of the values under one name, their number, and whether one of them was floating-point."""

    total: Tensor | float = 0
    times: int = 0
    floating: bool = False

    def add(self, number: Tensor | float, *, floating: bool) -> None:
        # The sum is new memory, because the caller may overwrite its tensor, as a CUDA graph does.
        if floating and not self.floating:
            self.floating = True
            self.total = self.total.double() if isinstance(self.total, Tensor) else float(self.total)
        self.total = self.total + (number.double() if self.floating and isinstance(number, Tensor) else number)
        self.times += 1


class Gathered:
    """Sums of the values that ranks logged since the last line. They stay on the device, so that no step waits.

    Floating-point values are averaged over steps and data ranks, and integers are summed. Ranks may log different
    names. All ranks keep the same table of names, so that each name has the same index in their sums. The ranks of a
    tensor group log the same values, and in a pipeline perhaps only the last stage logs. So only the data ranks of the
    lowest rank that logs a name count for it.

    Args:
        device: Device on which the ranks communicate.
        group: Data ranks of this rank. Each rank of the world belongs to one such group.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup) -> None:
        self._device = device
        self._first = dist.get_process_group_ranks(group)[0]  # identifies this group of data ranks
        self._sums: dict[str, _Sum] = {}
        self._table: dict[str, tuple[bool, int]] = {}  # is it a mean, and whose data ranks count

    def add(self, values: Mapping[str, Value]) -> None:
        """Add the values of a step. Nothing is copied to the host.

        Raises:
            ValueError: A tensor has several elements, or a name is "step" or "seconds".
            TypeError: A value is not a number.
        """
        for name, given in values.items():
            if name in ("step", "seconds"):
                raise ValueError(f"log() was given {name!r}, which every line has already; give it another name")
            if isinstance(given, Tensor):
                if given.numel() != 1:
                    raise ValueError(f"log() was given {name} of shape {tuple(given.shape)}; give one number: its mean")
                # Without detach, the graph of every logged step would stay alive until the next line.
                number = given.detach().reshape(())
                # A sum of many steps in bf16 would soon ignore what is added, and an int32 count of tokens would
                # overflow.
                number = number.double() if given.is_floating_point() else number.long()
                self._sums.setdefault(name, _Sum()).add(number, floating=given.is_floating_point())
            elif isinstance(given, int | float | np.integer | np.floating):
                floating = isinstance(given, float | np.floating)
                self._sums.setdefault(name, _Sum()).add(float(given) if floating else int(given), floating=floating)
            else:
                raise TypeError(f"log() was given {name} as a {type(given).__name__}; give a number or a tensor of one")

    def take(self) -> tuple[dict[str, float], dict[str, int]]:
        """Return means and counts over steps and data ranks, and reset the sums. Collective over the world.

        All-reduce of two fp64 numbers for each name, after one flag: whether a rank needs another table. A rank needs
        another table for a new name, for a floating-point value of a count, or if it is below the ranks that logged a
        name before. If the flag is set, the ranks agree on a new table, and reduce again. Waits for the device.
        """
        # The flag is summed with the values: either all ranks agree on a new table, or none does.
        news = False
        for name, each in self._sums.items():
            is_mean, lowest = self._table.get(name, (False, self._first + 1))
            news |= each.floating > is_mean or self._first < lowest
        found = self._reduced(news)
        if found[0]:
            mine = {name: each.floating for name, each in self._sums.items()}
            for first, theirs in agree(None, (self._first, mine), None).values():
                for name, floating in theirs.items():
                    is_mean, lowest = self._table.get(name, (False, first))
                    self._table[name] = is_mean or floating, min(lowest, first)
            found = self._reduced(news)
        # A name that no rank has logged since the last line has no values, and is not in the line.
        means: dict[str, float] = {}
        counts: dict[str, int] = {}
        for (name, (is_mean, _)), total, times in zip(self._table.items(), found[1::2], found[2::2], strict=True):
            if times and is_mean:
                means[name] = total / times
            elif times:
                counts[name] = round(total)
        self._sums = {}
        return means, counts

    def _reduced(self, news: bool) -> list[float]:
        """Return the reduced flag, then the sum and the number of values for each name of the table."""
        none = _Sum()
        table = self._table.items()
        # Ranks of all other groups add nothing: what they logged under the name is the same value again.
        sums = [self._sums.get(name, none) if first == self._first else none for name, (_, first) in table]
        numbers: list[Tensor | float] = [news, *(number for each in sums for number in (each.total, each.times))]
        packed = torch.stack([number_on_device(each, self._device) for each in numbers])
        if dist.get_world_size() > 1:
            dist.all_reduce(packed)
        found: list[float] = packed.tolist()
        return found


class Records:
    """The metrics file, progress and trackers of a run, on rank 0.

    Args:
        files: Files of the run.
        progress: Display of lines; None shows nothing.
        trackers: Receivers of each line. A tracker with `log_texts(texts, step)` also receives the texts that a model
            wrote. A tracker that raises is reported once and gets no more lines; training continues. A tracker with
            `close()` is closed.
    """

    def __init__(self, files: RunFiles, progress: Progress | None, trackers: Sequence[Tracker] = ()) -> None:
        self._progress = progress
        self._trackers = list(trackers)
        self._metrics = MetricsFile(files.metrics)

    def write(self, line: Line) -> None:
        """Write a line to the file, to progress and to the trackers."""
        self._metrics.append(line)
        if self._progress is not None:
            self._progress.show(line)
        values = {name: value for name, value in numbers_of(line).items() if name != "step"}
        for tracker in list(self._trackers):
            try:
                tracker.log(dict(values), line["step"])
                if (texts := texts_of(line)) and hasattr(tracker, "log_texts"):
                    tracker.log_texts(texts, line["step"])
            except Exception as error:  # no error of a service may end hours of training
                self._trackers.remove(tracker)
                name = f"{type(tracker).__name__}.log()"
                say(f"par-train: {name} failed at step {line['step']} and gets no more lines: {error!r}", sys.stderr)

    def close(self) -> None:
        """Close progress, the metrics file and the trackers. A second call does nothing."""
        if self._progress is not None:
            self._progress.close()
            self._progress = None
        self._metrics.close()
        trackers, self._trackers = self._trackers, []
        for tracker in trackers:
            try:
                if hasattr(tracker, "close"):
                    tracker.close()
            except Exception as error:  # as in `write`, because the last checkpoint is still to be written
                say(f"par-train: {type(tracker).__name__}.close() failed: {error!r}", sys.stderr)


class MetricsLog:
    """The lines of metrics of a run; rank 0 writes them.

    Args:
        strategy: Strategy of the run.
        files: Files of the run.
        policy: How often lines are due, and who receives them.
        monitor: Adds the shares of time to each line.
        stop: Receives an error of writing, so that all ranks raise it after the step.
    """

    def __init__(
        self, strategy: Strategy, files: RunFiles, policy: LoggingPolicy, monitor: Monitor, stop: Stop
    ) -> None:
        self._files, self._policy, self._monitor, self._stop = files, policy, monitor, stop
        self._is_master = strategy.is_master
        self._gathered = Gathered(strategy.device, strategy.groups[strategy.data_axes])
        self._totals: dict[str, int] = {}
        self._began = self._written = 0.0  # readings of the clock: when the run began, and at the last line
        self._trackers: list[Tracker] = []
        self._records: Records | None = None

    @property
    def seconds(self) -> float:
        """Seconds spent in the loop so far, including earlier runs and excluding interruptions."""
        return time.monotonic() - self._began

    def open_trackers(self, step: int, *, fresh: bool) -> None:
        """Open the trackers. Collective: if one cannot, all ranks raise, and the run to be replaced still exists."""
        with together("the trackers", None):
            if self._is_master:
                if not fresh:
                    truncate_metrics(self._files.metrics, step)
                facts = self._monitor.activity.facts
                self._trackers = make_trackers(self._policy.trackers, self._files.folder, facts, replaces=fresh)

    def open(self, until: int, step: int, *, fresh: bool) -> None:
        """Open the metrics file and show progress, on rank 0. A fresh run removes what the folder has.

        Args:
            until: Step at which training ends.
            step: Steps done.
            fresh: Whether nothing in the folder is this run's.
        """
        earlier: list[dict[str, float]] = []
        if self._is_master:
            self._files.forget_dumps()
            if fresh:
                self._files.clear_records()
            else:
                earlier = read_metrics(self._files.metrics)
            progress = make_progress(until, step) if self._policy.progress else None
            self._records = Records(self._files, progress, self._trackers)
        last = earlier[-1] if earlier else {}
        # Counts continue from the last line of the run that is resumed.
        self._totals = {name: value for name, value in last.items() if isinstance(value, int)}
        self._written = time.monotonic()
        self._began = self._written - last.get("seconds", 0.0)

    def add(self, values: Mapping[str, Value]) -> None:
        """Add values of this rank to the next line."""
        self._gathered.add(values)
        self._monitor.activity.log(values)

    def write_line(self, step: int) -> None:
        """Write a line of what ranks have logged since the last one. Collective."""
        self._monitor.clock.enter(step, "log")
        means, counts = self._gathered.take()  # also if this rank has logged nothing, because another one may have
        if not means and not counts:
            return
        now, before = time.monotonic(), self._written
        self._written = now
        for name, count in counts.items():
            self._totals[name] = self._totals.get(name, 0) + count
        rates = {f"{name}_per_second": round(count / max(now - before, 1e-6), 1) for name, count in counts.items()}
        totals = {name: self._totals[name] for name in counts}
        goodput = {} if self._monitor.goodput is None else self._monitor.goodput.line(counts, now - before)
        self.write({"step": step, **means, **totals, "seconds": round(self.seconds, 3), **rates, **goodput})

    def write(self, line: Line) -> None:
        """Write a line as it is, on rank 0."""
        if self._records is None:
            return
        try:
            # Rank 0 alone would raise here while the others train on, so the error is passed to `Stop`.
            self._records.write(line)
        except Exception as error:  # such as a full disk: all ranks raise it when the step has ended
            self._stop.fail(error)

    def close(self) -> bool:
        """Close file, progress and trackers; return whether this rank has had them open."""
        records, self._records = self._records, None
        if records is not None:
            records.close()
        return records is not None
