"""`MetricsLog`: the lines of metrics of a run, from what ranks log to files, trackers and progress."""

import time
from collections.abc import Mapping

from par_groups import together

from ..strategy.strategy import Strategy
from .files import RunFiles
from .line import Gathered, Value
from .metrics import Line, read_metrics, truncate_metrics
from .monitor import Monitor
from .policies import LoggingPolicy
from .progress import make_progress
from .records import Records, Tracker
from .stop import Stop
from .trackers import make_trackers


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

    def open(self, until: int, step: int, *, fresh: bool, seconds: float | None = None) -> None:
        """Open the metrics file and show progress, on rank 0. A fresh run removes what the folder has.

        Args:
            until: Step at which training ends.
            step: Steps done.
            fresh: Whether nothing in the folder is this run's.
            seconds: Time spent by earlier runs; default: what the last line says.
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
        self._totals = {name: value for name, value in last.items() if isinstance(value, int)}
        self._written = time.monotonic()
        self._began = self._written - (last.get("seconds", 0.0) if seconds is None else seconds)

    def add(self, values: Mapping[str, Value]) -> None:
        """Add values of this rank to the next line."""
        self._gathered.add(values)
        self._monitor.activity.log(values)

    def write_line(self, step: int) -> None:
        """Write a line of what ranks have logged since the last one. Collective."""
        self._monitor.enter(step, "log")
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
            self._records.write(line)
        except Exception as error:  # such as a full disk: all ranks raise it when the step has ended
            self._stop.fail(error)

    def close(self) -> bool:
        """Close file, progress and trackers; return whether this rank has had them open."""
        records, self._records = self._records, None
        if records is not None:
            records.close()
        return records is not None
