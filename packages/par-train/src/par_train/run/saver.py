"""`Saver`: the checkpoints of a run, and the copies to further tiers that are still in progress."""

import json
import sys
import time
from os import fspath
from pathlib import Path
from typing import TYPE_CHECKING

from par_groups import together

from ..strategy.files import RunCheckpoints
from ..strategy.strategy import Strategy
from .files import RunFiles, write_file, writing
from .hooks import RunHooks
from .output import say
from .policies import CheckpointPolicy

if TYPE_CHECKING:
    from par_checkpoint import Save


class Saver:
    """The checkpoints of a run, one folder for each step.

    Args:
        strategy: Strategy of the run.
        files: Files of the run.
        policy: Folder or tiers, and the number of checkpoints to keep.
        hooks: Source of the notes in each checkpoint.
        resume: How a user resumes the run, for messages: "resume='auto'" or "--resume auto".

    Attributes:
        saved: Step of the newest checkpoint of this run; None before the first one.
    """

    def __init__(
        self, strategy: Strategy, files: RunFiles, policy: CheckpointPolicy, hooks: RunHooks, resume: str
    ) -> None:
        self.saved: int | None = None
        self._strategy, self._files, self._policy, self._hooks, self._resume = strategy, files, policy, hooks, resume
        self._copying: list[Save] = []
        self._has_listed = False  # the tiers, in the folder of the run

    @property
    def checkpoints(self) -> RunCheckpoints:
        """The checkpoints of all models of the strategy."""
        policy, root = self._policy, self._files.checkpoints
        # The strategy returns one object for equal arguments, so its newest step is not looked up each time.
        return self._strategy.checkpoints(
            root if policy.tiers is None else Path(root.name),
            keep_last=policy.keep_last,
            tiers=policy.tiers,
            plan=policy.plan,
        )

    def checkpoints_in(self, root: Path) -> RunCheckpoints:
        """Return the checkpoints of another folder, to resume from."""
        return self._strategy.checkpoints(root, plan=self._policy.plan)

    def save(self, step: int, *, async_: bool = False) -> None:
        """Write the checkpoint of a step. Collective.

        Raises:
            OSError: A file cannot be written; the message says from which step the run can resume.
        """
        tiers = self._policy.tiers
        # With this list, a later start that names no tiers is told where the checkpoints are.
        if tiers is not None and not self._has_listed:
            self._has_listed = True
            with together("the list of tiers", None):
                if self._strategy.is_master:
                    write_file(self._files.tiers, json.dumps([fspath(tier) for tier in tiers.folders]).encode())
        # A full disk is the usual error, and the user needs to know what is left.
        remedy = "nothing is saved yet"
        if self.saved is not None:
            remedy = f"once that is fixed, {self._resume} resumes after step {self.saved}"
        with writing(self.checkpoints.root, remedy):
            notes = self._hooks.notes(step)
            saves = self.checkpoints.save(step, async_=async_, format=self._policy.format, notes=notes)
        # Completed copies are dropped here, so that their handles free host memory.
        self._copying = [save for save in (*self._copying, *saves) if not save.done()]
        self.saved = step

    @property
    def is_copying(self) -> bool:
        """Whether a checkpoint may still be missing in a tier."""
        return bool(self._copying)

    def wait(self) -> None:
        """Wait until all tiers have every checkpoint, and print which tiers are missing.

        Raises:
            CheckpointError, OSError: A checkpoint could not be copied; on every rank.
        """
        for save in self._copying:
            printed: tuple[str, ...] | None = None
            while not save.done():
                if save.missing != printed:
                    printed = save.missing
                    where = " and ".join(printed) or "its neighbours' memory"
                    if self._strategy.is_master:
                        say(f"par-train: {save.path} is there; waits until it is in {where}, too", sys.stderr)
                # A copy ends in a thread of its own, which no event of this loop announces.
                time.sleep(0.02)
            # It raises what the copy has raised.
            save.wait()
        self._copying = []

    def clear(self) -> None:
        """Remove the checkpoints from the tiers; `RunFiles` removes those in the run's folder. Collective."""
        if self._policy.tiers is not None:
            self.checkpoints.clear()
