"""What rank 0 does beside training: it writes lines, shows progress, and tells trackers."""

import sys
from collections.abc import Sequence
from typing import Any, Protocol

from .files import RunFiles
from .metrics import Line, MetricsFile, numbers_of, texts_of
from .output import say
from .progress import Progress


class Tracker(Protocol):
    """Whatever takes numbers by name, such as a run of Weights & Biases."""

    def log(self, values: dict[str, Any], step: int) -> object:
        """Takes the values of a line of the metrics file.

        Args:
            values: Numbers by name.
            step: Steps done.
        """


class Records:
    """The records of a run. Rank 0 alone has them.

    Args:
        files: The files of the run.
        progress: Shows each line; None shows nothing.
        trackers: Each gets every line, and one that has `log_texts(texts, step)` the texts that a model wrote. One that
            raises is told of once and gets no more lines: training goes on. One that has `close()` is closed.
    """

    def __init__(self, files: RunFiles, progress: Progress | None, trackers: Sequence[Tracker] = ()) -> None:
        self._progress = progress
        self._trackers = list(trackers)
        self._metrics = MetricsFile(files.metrics)

    def write(self, line: Line) -> None:
        """Writes a line everywhere."""
        self._metrics.append(line)
        if self._progress is not None:
            self._progress.show(line)
        values = {name: value for name, value in numbers_of(line).items() if name != "step"}
        for tracker in list(self._trackers):
            try:
                tracker.log(dict(values), line["step"])
                if (texts := texts_of(line)) and hasattr(tracker, "log_texts"):
                    tracker.log_texts(texts, line["step"])
            except Exception as error:  # whatever a service raises, it does not end hours of training
                self._trackers.remove(tracker)
                name = f"{type(tracker).__name__}.log()"
                say(f"par-train: {name} failed at step {line['step']} and gets no more lines: {error!r}", sys.stderr)

    def close(self) -> None:
        """Ends the display of progress, the metrics file and the trackers; a second call does nothing."""
        if self._progress is not None:
            self._progress.close()
            self._progress = None
        self._metrics.close()
        trackers, self._trackers = self._trackers, []
        for tracker in trackers:
            try:
                if hasattr(tracker, "close"):
                    tracker.close()
            except Exception as error:  # as in `write`: what follows is the last checkpoint
                say(f"par-train: {type(tracker).__name__}.close() failed: {error!r}", sys.stderr)
