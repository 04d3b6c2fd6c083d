"""`RunHooks`: what a program adds to a run, which `par-train run` overrides, and how its options are spelled."""

import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .files import RunFiles
from .metrics import draw_load, draw_loss, read_metrics
from .monitor import Monitor
from .output import say


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """How a user passes the options of a run, for messages.

    Args:
        resume: Option that resumes the run of the folder.
        overwrite: Option that replaces it.
        folder: The option that names another folder.
        tiers: The option that names storage tiers.
    """

    resume: str = "resume='auto'"
    overwrite: str = "overwrite=True"
    folder: str = "another folder"
    tiers: str = "CheckpointPolicy(tiers=...)"


class RunHooks:
    """The output of a run on rank 0, and what its checkpoints hold besides the state of the strategy.

    Args:
        files: Files of the run.
    """

    def __init__(self, files: RunFiles) -> None:
        self.files = files

    def notes(self, step: int) -> Mapping[str, Any]:
        """Return values to store in the checkpoint of a step, identical on all ranks. Collective."""
        del step
        return {}

    def check(self, state: Mapping[str, Any], path: str) -> None:
        """Raise UserError if a checkpoint with this state, which has the `notes`, is of another run. Collective."""

    def begin(self, step: int, until: int) -> None:
        """Print what is about to happen, on rank 0, before a folder's earlier run is removed."""
        if step >= until:
            say(
                f"par-train: {str(self.files.folder)!r} is at step {step} of {until} already, so no step is taken; "
                "raise until to train on, or pass another folder or overwrite=True to start again",
                sys.stderr,
            )

    def collect(self) -> None:
        """Gather what `finish` needs from the other ranks. Collective, after the last step."""

    def finish(self, step: int, until: int, ended_by: int, monitor: Monitor) -> None:
        """Draw the curves, and print why the run ended early, on rank 0, when everything is saved."""
        lines = read_metrics(self.files.metrics)
        if any(line.get("loss") is not None for line in lines):
            draw_loss(self.files.curve, lines)
        draw_load(self.files.load, lines)
        if monitor.goodput is not None:
            say(f"par-train: {monitor.goodput.summary()}", sys.stderr)
        if step < until:
            why = f"{signal.Signals(ended_by).name}: " if ended_by else ""
            say(f"par-train: {why}saved after step {step} of {until}; resume='auto' goes on", sys.stderr)
