"""`Saver`: the checkpoints of a run, and the copies to further tiers that are still in progress."""

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from par_checkpoint import Save

from ..strategy.files import RunCheckpoints
from ..strategy.strategy import Strategy
from .files import RunFiles, writing
from .output import say
from .policies import CheckpointPolicy


class Saver(ABC):
    """The checkpoints of a run.

    Args:
        resume: How a user resumes the run, for messages: "resume='auto'" or "--resume auto".
        speaks: Whether this rank prints what the run waits for.

    Attributes:
        saved: Step of the newest checkpoint of this run; None before the first one.
    """

    def __init__(self, resume: str, *, speaks: bool) -> None:
        self.saved: int | None = None
        self._resume, self._speaks = resume, speaks
        self._copying: list[Save] = []

    @abstractmethod
    def path(self, step: int) -> str | PathLike[str]:
        """Return where the checkpoint of a step is written, for messages."""

    @abstractmethod
    def write(self, step: int, *, async_: bool) -> Sequence[Save]:
        """Write the checkpoint of a step. Collective."""

    @abstractmethod
    def clear(self) -> None:
        """Remove the checkpoints of a run that this run replaces from its tiers. Collective."""

    def save(self, step: int, *, async_: bool = False) -> None:
        """Write the checkpoint of a step. Collective.

        Raises:
            OSError: A file cannot be written; the message says from which step the run can resume.
        """
        # A full disk is the usual error, and the user needs to know what is left.
        remedy = "nothing is saved yet"
        if self.saved is not None:
            remedy = f"once that is fixed, {self._resume} resumes after step {self.saved}"
        with writing(self.path(step), remedy):
            saves = self.write(step, async_=async_)
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
                    if self._speaks:
                        say(f"par-train: {save.path} is there; waits until it is in {where}, too", sys.stderr)
                time.sleep(0.02)
            save.wait()
        self._copying = []


class StrategySaver(Saver):
    """The checkpoints of `Strategy.checkpoints`, one folder for each step.

    Args:
        strategy: Strategy of the run.
        files: Files of the run.
        policy: Folder or tiers, and the number of checkpoints to keep.
    """

    def __init__(self, strategy: Strategy, files: RunFiles, policy: CheckpointPolicy) -> None:
        super().__init__("resume='auto'", speaks=strategy.is_master)
        self.root = files.checkpoints if policy.tiers is None else Path(files.checkpoints.name)
        self._strategy, self._policy = strategy, policy

    @property
    def checkpoints(self) -> RunCheckpoints:
        """The checkpoints of all models of the strategy."""
        # The strategy returns one object for equal arguments, so its newest step is not looked up each time.
        return self._strategy.checkpoints(self.root, keep_last=self._policy.keep_last, tiers=self._policy.tiers)

    def path(self, step: int) -> Path:
        """Return the folder of all checkpoints."""
        del step
        return self.root

    def write(self, step: int, *, async_: bool) -> Sequence[Save]:
        """Write the checkpoint of a step. Collective."""
        return self.checkpoints.save(step, async_=async_, format=self._policy.format)

    def clear(self) -> None:
        """Remove the checkpoints from the tiers; `RunFiles` removes those in the run's folder. Collective."""
        if self._policy.tiers is not None:
            self.checkpoints.clear()
