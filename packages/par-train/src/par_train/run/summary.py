"""`Summary`: what rank 0 prints and draws before and after a run."""

import signal
import sys
from typing import Protocol

from .files import RunFiles
from .metrics import draw_load, draw_loss, read_metrics
from .monitor import Monitor
from .output import say


class Summary(Protocol):
    """What is printed and drawn before and after a run."""

    def begin(self, step: int, until: int) -> None:
        """Print what is about to happen, on rank 0, before a folder's earlier run is removed."""

    def collect(self) -> None:
        """Gather what `finish` needs from the other ranks. Collective, after the last step."""

    def finish(self, step: int, until: int, ended_by: int) -> None:
        """Print and draw what has happened, on rank 0, when everything is saved."""


class CurveSummary:
    """The summary of a `Run`: the loss curve, and why the run ended early.

    Args:
        files: Files of the run.
        monitor: Has the shares of time.
    """

    def __init__(self, files: RunFiles, monitor: Monitor) -> None:
        self._files, self._monitor = files, monitor

    def begin(self, step: int, until: int) -> None:
        """Print that nothing is left to do, if so."""
        if step >= until:
            say(
                f"par-train: {str(self._files.folder)!r} is at step {step} of {until} already, so no step is taken; "
                "raise until to train on, or pass another folder or overwrite=True to start again",
                sys.stderr,
            )

    def collect(self) -> None:
        """Gather nothing: rank 0 has all lines."""

    def finish(self, step: int, until: int, ended_by: int) -> None:
        """Draw the curves, and print why the run ended early."""
        lines = read_metrics(self._files.metrics)
        if any(line.get("loss") is not None for line in lines):
            draw_loss(self._files.curve, lines)
        draw_load(self._files.load, lines)
        if self._monitor.goodput is not None:
            say(f"par-train: {self._monitor.goodput.summary()}", sys.stderr)
        if step < until:
            why = f"{signal.Signals(ended_by).name}: " if ended_by else ""
            say(f"par-train: {why}saved after step {step} of {until}; resume='auto' goes on", sys.stderr)
