"""How a run takes its folder: the lock, what the folder holds, and the checkpoint to resume from."""

import json
import sys
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from os import fspath
from pathlib import Path

from par_checkpoint import CheckpointError, Tiers
from par_groups import agree, check_alike, together

from .._errors import UserError, as_user_error
from ..strategy.files import RunCheckpoints
from .files import RunFiles
from .hooks import RunHooks, Spelling
from .lock import Lock, has_begun, is_restarted, lock_folder
from .output import say
from .policies import CheckpointPolicy, LoggingPolicy, MonitoringPolicy
from .saver import Saver


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A folder that a run has taken, and the point from which it continues.

    Args:
        step: Steps done by earlier runs.
        fresh: Whether nothing in the folder is this run's.
        lock: Lock of the folder; None on all ranks but the first.
    """

    step: int
    fresh: bool
    lock: Lock | None


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What rank 0 has found in the folder, and what it does with it. All ranks go by it.

    Args:
        present: Names of a run's files in the folder.
        saved: Checkpoints that the folder has, of any run.
        tiers: Tiers in which the run of the folder has its checkpoints.
        resume: "auto", a path, or None, as in `Run`.
        overwrite: Whether to replace the run that the folder has.
    """

    present: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    tiers: tuple[str, ...] = ()
    resume: str | None = None
    overwrite: bool = False


class FolderOpening:
    """The opening of a run's folder, in two steps: `take` needs no model, and `restore` loads the checkpoint into it.

    Args:
        files: Files of the run.
        resume: "auto", a path, or None, as in `Run`.
        overwrite: Whether to replace the run that the folder has.
        policies: Policies for checkpoints, lines and watchers, which are checked here.
        is_master: Whether this is rank 0, which takes the lock.
        spelling: How the user passes the options, for messages.
    """

    def __init__(
        self,
        files: RunFiles,
        *,
        resume: str | None,
        overwrite: bool,
        policies: tuple[CheckpointPolicy, LoggingPolicy, MonitoringPolicy],
        is_master: bool,
        spelling: Spelling,
    ) -> None:
        self._files, self._policies, self._is_master, self.spelling = files, policies, is_master, spelling
        self._found = _Found(resume=resume, overwrite=overwrite)
        self._lock: Lock | None = None
        self._is_taken = False

    def take(self, held: ExitStack) -> None:
        """Lock the folder until `held` is closed, and look at what it holds; a second call does nothing. Collective.

        Raises:
            ValueError: An option is wrong, or differs between ranks, or another run has the folder; on every rank.
        """
        if self._is_taken:
            return
        # torchrun starts ranks again with the same arguments. They must go on with what this launch has saved, also
        # under overwrite=True. A rank on a node that replaces a lost one has not run before, but joins such ranks.
        restarted = any(agree(None, is_restarted(), None).values())
        problem: Exception | None = None
        found = self._found
        try:
            for policy in self._policies:
                policy.check()
            if found.resume is not None and found.overwrite:
                raise UserError(
                    f"resume={found.resume!r} continues a run and overwrite=True replaces it; pass only one"
                )
            if self._is_master:
                self._lock = held.enter_context(lock_folder(self._files, f"name {self.spelling.folder}"))
                found = self._look(restarted=restarted)
        except Exception as error:  # any kind, because the other ranks must raise it, too
            problem = error
        checkpoint, logging, _ = self._policies
        # Ranks with other numbers would save or log at other steps, and wait in different collectives.
        numbers = (checkpoint.every, checkpoint.keep_last, logging.every)
        # `check` has found a policy of another type, and the error comes with `problem`.
        given = checkpoint.tiers if isinstance(checkpoint.tiers, Tiers) else None
        tiers = None if given is None else (len(given.folders), given.copies)
        every = agree(problem, ((str(self._files.folder), numbers, tiers), found), None)
        check_alike({rank: options for rank, (options, _) in every.items()}, "options of a Run")
        # Rank 0 decides by what it has found; the other ranks may not see the folder yet, as on NFS.
        self._found = every[0][1]
        self._is_taken = True

    def _look(self, *, restarted: bool) -> _Found:
        """Return what the folder holds, on rank 0, which has the lock."""
        assert self._lock is not None  # noqa: S101 - `take` has it
        resume, overwrite = self._found.resume, self._found.overwrite
        tiers: tuple[str, ...] = ()
        if restarted and has_begun(self._files):
            resume, overwrite = "auto", False
        if not restarted:
            self._lock.note("")  # of an earlier launch
        with suppress(OSError, ValueError):  # a run without tiers has no list
            tiers = tuple(json.loads(self._files.tiers.read_text()))
        present = tuple(path.name for path in self._files.present())
        saved = tuple(self._files.saved())
        return _Found(present=present, saved=saved, tiers=tiers, resume=resume, overwrite=overwrite)

    def restore(self, saver: Saver, hooks: RunHooks) -> Opened:
        """Load the checkpoint to resume from. Every rank finds the same one, so that all raise or none. Collective.

        Args:
            saver: Checkpoints of the run; it receives the step that is resumed.
            hooks: Checks that the checkpoint belongs to the run.

        Raises:
            ValueError: The folder or a tier has a run that is neither resumed nor replaced, or there is no checkpoint
                to resume from.
        """
        found, words, tiers = self._found, self.spelling, self._policies[0].tiers
        folder = str(self._files.folder)
        if tiers is not None:
            self._check_tiers(tiers, saver)
        with together("finding a checkpoint", None):
            source, step = self._source(saver)
        named = {fspath(tier) for tier in (tiers.folders if tiers else ())}
        # Tiers that were moved hold the run under other names, so a checkpoint that was found in the tiers suffices.
        is_elsewhere = bool(found.tiers) and not named.intersection(found.tiers)
        if found.resume == "auto" and is_elsewhere and (tiers is None or step is None):
            raise UserError(
                f"the checkpoints of the run in {folder!r} are in {', '.join(found.tiers)}; pass them as "
                f"{words.tiers}, or, if they are gone, remove {str(self._files.tiers)!r}"
            )
        # A checkpoint of another folder begins a run of its own here, whose records start anew.
        fresh = step is None or (found.resume != "auto" and source is not saver.checkpoints)
        if found.present and fresh and found.resume != "auto" and not found.overwrite:
            raise UserError(
                f"the folder {folder!r} has a run already ({found.present[0]}); pass {words.resume} to continue it, "
                f"{words.overwrite} to replace it, or {words.folder}"
            )
        # A user who asks to resume must not lose a checkpoint because it did not fit.
        if found.saved and fresh and found.resume == "auto":  # a run that starts from step 0 would remove it
            raise UserError(
                f"the folder {folder!r} has a checkpoint ({found.saved[0]}) that this run cannot resume from: it is "
                "damaged, or another number of models was saved; initialize what was saved, pass "
                f"{words.overwrite} and not {words.resume} to replace the run, or {words.folder}"
            )
        if step is None:
            return Opened(step=0, fresh=True, lock=self._lock)
        # Rank 0 has found the step, and hosts may have other disks under the same path.
        sees = {} if source.tiers is not None else agree(None, Path(source.root).is_dir(), None)
        blind = [rank for rank, found_it in sees.items() if not found_it]
        if blind:
            raise UserError(
                f"ranks {blind} do not find {source.root!r}, from which rank 0 resumes after step {step}; put the "
                "folder on a file system that all ranks share"
            )
        newest = None if fresh else source.latest_step()
        if newest is not None and newest > step:
            raise UserError(
                f"{folder!r} has a checkpoint of step {newest}, later than step {step} of resume; pass another folder "
                "for the run that continues from there, or move the later checkpoints elsewhere"
            )
        hooks.check(source.state_of(step), f"{source.root}/step-{step:08d}")
        source.resume(step)
        if source is saver.checkpoints:
            saver.saved = step
        if self._is_master:
            where = "" if tiers is None else f", from {source.resumed_from}"
            say(f"par-train: resumes after step {step}{where}", sys.stderr)
        return Opened(step=step, fresh=fresh, lock=self._lock)

    def _check_tiers(self, tiers: Tiers, saver: Saver) -> None:
        """Raise UserError if a tier cannot be written, or holds a run that is neither resumed nor replaced."""
        with as_user_error("checkpoint.tiers: ", TypeError, ImportError, CheckpointError):
            saver.checkpoints.check()
            newest = None
            if self._found.resume != "auto" and not self._found.overwrite:
                newest = saver.checkpoints.latest_step()
        if newest is not None:
            raise UserError(
                f"a tier of {[fspath(tier) for tier in tiers.folders]} holds a run already, of step {newest}; pass "
                f"{self.spelling.resume} to continue it, {self.spelling.overwrite} to replace it, or other "
                f"{self.spelling.tiers}"
            )

    def _source(self, saver: Saver) -> tuple[RunCheckpoints, int | None]:
        """Return the checkpoints, and the step to resume from; None without a checkpoint."""
        resume, tiers, own = self._found.resume, self._policies[0].tiers, self._files.checkpoints
        if resume is None:
            return saver.checkpoints, None
        if resume == "auto":
            step = saver.checkpoints.latest_step()
            if tiers is not None:
                # A run that began without tiers may be ahead of them; the newer checkpoint counts.
                local = saver.checkpoints_in(own)
                before = local.latest_step()
                if before is not None and (step is None or before > step):
                    return local, before
            return saver.checkpoints, step
        given = Path(resume).expanduser()
        name, _, number = given.name.rpartition("-")
        if name == "step" and number.isdecimal():
            # A path such as .../step-00000500 names one checkpoint.
            root, found = given.parent, int(number) if given.is_dir() else None
        else:
            # Otherwise it is the folder of a run, or of checkpoints.
            root, found = given / own.name, saver.checkpoints_in(given / own.name).latest_step()
            if found is None:
                root, found = given, saver.checkpoints_in(given).latest_step()
        if found is None:
            raise UserError(
                f"resume={resume!r}: it holds no complete checkpoint; pass the folder of a run or of one of its "
                "checkpoints, or resume='auto', which starts from step 0 if there is none"
            )
        # A path that leads back to this folder continues its run, whose records then stay. With tiers it is another
        # run's, because this run's checkpoints are in the tiers.
        if tiers is None and root.absolute() == own.absolute():
            return saver.checkpoints, found
        return saver.checkpoints_in(root.absolute()), found
