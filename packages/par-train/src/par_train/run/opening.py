"""How a `Run` takes its folder: the lock, what the folder holds, and the checkpoint to resume from."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from os import fspath
from pathlib import Path
from typing import Protocol

from par_checkpoint import Tiers
from par_groups import agree, check_alike, together

from .._errors import UserError
from ..strategy.strategy import Strategy
from .files import RunFiles
from .lock import Lock, has_begun, is_restarted, lock_folder
from .output import say
from .policies import CheckpointPolicy, LoggingPolicy, MonitoringPolicy
from .saver import StrategySaver


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A folder that a run has taken.

    Args:
        step: Steps done by earlier runs.
        fresh: Whether nothing in the folder is this run's.
        lock: Lock of the folder; None on all ranks but the first.
        seconds: Time spent by earlier runs; None: the last line of metrics has it.
    """

    step: int
    fresh: bool
    lock: Lock | None
    seconds: float | None = None


class Opening(Protocol):
    """The way in which a run takes its folder and restores the state to resume from."""

    def open(self, held: ExitStack) -> Opened:
        """Take the folder until `held` is closed. Collective."""


class FolderOpening:
    """The opening of a `Run`.

    Args:
        files: Files of the run.
        strategy: Strategy of the run, into which the checkpoint is loaded.
        saver: Receives the step that is resumed.
        resume: "auto", a path, or None, as in `Run`.
        overwrite: Whether to replace the run that the folder has.
        policies: Policies for checkpoints, lines and watchers, which are checked here.
    """

    def __init__(
        self,
        files: RunFiles,
        strategy: Strategy,
        saver: StrategySaver,
        *,
        resume: str | None,
        overwrite: bool,
        policies: tuple[CheckpointPolicy, LoggingPolicy, MonitoringPolicy],
    ) -> None:
        self._files, self._strategy, self._saver = files, strategy, saver
        self._resume, self._overwrite, self._policies = resume, overwrite, policies
        self._tiers = policies[0].tiers

    def open(self, held: ExitStack) -> Opened:
        """Take the folder, and load the checkpoint that `resume` names. Collective."""
        problem: Exception | None = None
        present: list[str] = []
        saved: list[str] = []
        lock: Lock | None = None
        try:
            for policy in self._policies:
                policy.check()
            if self._resume is not None and self._overwrite:
                raise UserError(
                    f"resume={self._resume!r} continues a run and overwrite=True replaces it; pass only one"
                )
            if self._strategy.is_master:
                lock = held.enter_context(lock_folder(self._files))
                present, saved = [path.name for path in self._files.present()], self._files.saved()
                # torchrun starts ranks again with the same arguments. They must go on with what this launch has saved,
                # also under overwrite=True.
                if is_restarted() and has_begun(self._files):
                    self._resume, self._overwrite = "auto", False
                if not is_restarted():
                    lock.note("")  # of an earlier launch
        except Exception as error:  # any kind, because the other ranks must raise it, too
            problem = error
        checkpoint, logging, _ = self._policies
        # Ranks with other numbers would save or log at other steps, and wait in different collectives.
        numbers = (checkpoint.every, checkpoint.keep_last, logging.every)
        tiers = (len(self._tiers.folders), self._tiers.copies) if isinstance(self._tiers, Tiers) else None
        options = (str(self._files.folder), numbers, tiers)
        every = agree(problem, (options, present, saved, self._resume, self._overwrite), None)
        check_alike({rank: each[0] for rank, each in every.items()}, "options of a Run")
        # Rank 0 decides by what it has found; the other ranks may not see the folder yet, as on NFS.
        _, present, saved, self._resume, self._overwrite = every[0]
        if self._tiers is not None:
            self._check_tiers(self._tiers)
        return self._restore(present, saved, lock)

    def _check_tiers(self, tiers: Tiers) -> None:
        """Raise UserError if a tier cannot be written, or holds a run that is neither resumed nor replaced."""
        self._saver.checkpoints.check()
        if self._resume == "auto" or self._overwrite:
            return
        newest = self._saver.checkpoints.latest_step()
        if newest is not None:
            raise UserError(
                f"a tier of {[fspath(tier) for tier in tiers.folders]} holds a run already, of step {newest}; pass "
                "resume='auto' to continue it, overwrite=True to replace it, or other tiers"
            )

    def _restore(self, present: Sequence[str], saved: Sequence[str], lock: Lock | None) -> Opened:
        """Load the checkpoint. Every rank finds the same one, so that all raise or none.

        Args:
            present: Names of a run's files in the folder.
            saved: Checkpoints that the folder has, of any run.
            lock: The lock of the folder.
        """
        with together("finding a checkpoint", None):
            source, step = self._source()
        # A checkpoint of another folder begins a run of its own here, whose records start anew.
        fresh = source != self._files.checkpoints or step is None
        if present and fresh and self._resume != "auto" and not self._overwrite:
            raise UserError(
                f"the folder {str(self._files.folder)!r} has a run already ({present[0]}); pass resume='auto' to "
                "continue it, overwrite=True to replace it, or another folder"
            )
        # A user who asks to resume must not lose a checkpoint because it did not fit.
        if saved and fresh and self._resume == "auto":  # a run that starts from step 0 would remove it
            raise UserError(
                f"the folder {str(self._files.folder)!r} has a checkpoint ({saved[0]}) that this run cannot resume "
                "from: another number of models was saved, or par-train run has written it; initialize what was "
                "saved, pass overwrite=True to replace the run, or another folder"
            )
        if step is None:
            return Opened(step=0, fresh=True, lock=lock)
        newest = None if fresh else self._saver.checkpoints.latest_step()
        if newest is not None and newest > step:
            raise UserError(
                f"{str(self._files.folder)!r} has a checkpoint of step {newest}, later than step {step} of resume; "
                "pass another folder for the run that continues from there, or move the later checkpoints elsewhere"
            )
        if fresh:
            self._strategy.checkpoints(source).resume(step)
        else:
            self._saver.checkpoints.resume(step)
            self._saver.saved = step
        if self._strategy.is_master:
            where = "" if self._tiers is None else f", from {self._saver.checkpoints.resumed_from}"
            say(f"par-train: resumes after step {step}{where}", sys.stderr)
        return Opened(step=step, fresh=fresh, lock=lock)

    def _source(self) -> tuple[Path, int | None]:
        """Return the folder of checkpoints and the step to resume from; None without a checkpoint."""
        own, checkpoints = self._files.checkpoints, self._strategy.checkpoints
        if self._resume is None:
            return own, None
        if self._resume == "auto":
            return own, self._saver.checkpoints.latest_step()
        given = Path(self._resume).expanduser()
        name, _, number = given.name.rpartition("-")
        if name == "step" and number.isdecimal():
            # A path such as .../step-00000500 names one checkpoint.
            root, found = given.parent, int(number) if given.is_dir() else None
        else:
            # Otherwise it is the folder of a run, or of checkpoints.
            root, found = given / own.name, checkpoints(given / own.name).latest_step()
            if found is None:
                root, found = given, checkpoints(given).latest_step()
        if found is None:
            raise UserError(
                f"resume={self._resume!r}: it holds no complete checkpoint; pass the folder of a run or of one of its "
                "checkpoints, or resume='auto', which starts from step 0 if there is none"
            )
        if self._tiers is not None:
            return root.absolute(), found  # of another run, because this run's checkpoints are in tiers
        # A path that leads back to this folder continues its run, whose records then stay.
        return (own if root.absolute() == own.absolute() else root), found
