"""`Run`: what keeps a training loop of one's own alive. It knows no model; a loop without it loses nothing else."""

import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from os import PathLike, fspath
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from torch.utils.data import DataLoader

from par_checkpoint import Format, Save, Tiers
from par_diagnosis import Activity, Watchdog
from par_groups import agree, check_alike, together

from .._errors import TrainingError, UserError
from ..strategy.files import RunCheckpoints
from ..strategy.strategy import Strategy
from .attempt import BEGUN, NEAR, SAVED, has_begun, is_restarted, note_of
from .files import RunFiles, writing
from .goodput import Clock, Exposed, Goodput, peak_of
from .line import Gathered, Value
from .lock import Lock, lock_folder
from .metrics import Line, draw_load, draw_loss, read_metrics, truncate_metrics
from .output import say
from .profile import Profile
from .progress import make_progress
from .records import Records, Tracker
from .stop import FAILED, LEAVE, Stop, StoppedEarly, exit_code, following_torchrun
from .trackers import check_trackers, make_trackers
from .vote import Vote

Batch = TypeVar("Batch")


class Run:
    """A training run in a folder: it goes on where the last one stopped, and leaves when it is asked to, saved.

    Used as a context manager, on all ranks, after `Strategy.initialize`. SIGTERM, SIGUSR1, SIGHUP and Ctrl-C let
    `steps` end after the step that runs (on a GPU after the next one), with a checkpoint written; a torchrun that died
    does so too. What the folder has afterwards:

        checkpoints/step-00000500   as `Strategy.checkpoint` writes them
        metrics.jsonl               one object of JSON a line
        trace.json                  what `profile` recorded, for Perfetto
        diagnosis/                  what every rank was doing, if they hung or one failed; see `par_diagnosis`
        loss.png                    the curve of `loss` and `validation_loss`
        expert-load.png             each expert's tokens over the steps, if lines have an `expert_load`
        .par-train.lock             keeps a second run out; it ends with the process, however that ends

    Args:
        folder: The folder of the run, on a file system that all ranks share; it is made if it is not there.
        strategy: The strategy that has initialized what is trained.
        resume: "auto" goes on from the newest checkpoint in the folder, and starts anew if there is none. The path of
            another run's folder, of a folder of checkpoints, or of one checkpoint goes on from there. None starts anew;
            but ranks that torchrun starts again go on from what they had saved.
        overwrite: Replaces the run that the folder has, as soon as training begins.
        checkpoint_every: Steps between two checkpoints; None saves at the end alone.
        keep_last: Number of the newest checkpoints that stay; None keeps all. With tiers also a list of one for each.
        tiers: Storage tiers of this run, such as `Tiers(["/dev/shm/llama", "s3://bucket/llama"])`, which each get a
            folder `checkpoints`. The folder of the run may be one of them. Training waits only for the first tier, and
            the run ends when the last one has everything. A run resumes from the nearest tier that has the newest step.
        async_: Whether training goes on while a checkpoint is written, as in `Strategy.checkpoint`. The last one is
            waited for.
        log_every: Steps between two lines of metrics. At each line, and no sooner, the host waits for the device.
        trackers: What gets each line on rank 0: "tensorboard", "wandb" or "mlflow", which must be installed, or objects
            with `log(values, step)`.
        profile: Steps whose trace torch's profiler takes, such as "steps=10:15", of which 15 is not one: trace.json has
            all ranks' for Perfetto, with a pipeline's actions as tracks of their own. None: none.
        diagnose: Seconds without progress after which one line names the rank that hangs, the place and the cause. The
            line is printed at once after SIGQUIT, or if a rank fails. None: no watchdog.
        goodput: Whether lines have where the time since the line before went, as shares: `time_data`, `time_step`,
            `time_checkpoint` and so on of rank 0's, `exposed_tensor` and so on of waiting in collectives of each
            axis, where a host can know that: on CPUs. A summary is printed at the end.
        flops: Operations of the whole model for one token, such as `model_flops` gives: lines then have
            `flops_per_second` and `mfu`, too, of what is logged as `tokens`.
        peak_flops: Operations a second of one device; None: those of GPUs that are known. Without, there is no `mfu`.
        progress: Whether rank 0 shows progress: a bar on a terminal, else a line every ten seconds.
        format: Files of the checkpoints, such as `Format(assets=["Qwen3-8B"])` with those of a tokenizer. Default:
            `Format()`.

    Attributes:
        step: Steps done, those of earlier runs included.
        ended_by: The signal that ended the run, such as `signal.SIGTERM`; 0 if there was none.
        exit_code: What the process should exit with: 0 if the run is done or saved; 130 if Ctrl-C has ended it; 128 and
            the signal if one ended it before the first step, so that nothing was changed.

    Raises:
        ValueError: What cannot be: on every rank, in words. Another run has the folder, or there is one in it and
            neither `resume` nor `overwrite` is said, or both are; there is nothing to resume from; a number below 1.

    Example:
        with Run("runs/llama", strategy, resume="auto", checkpoint_every=500, keep_last=3) as run:
            for inputs, targets in run.steps(dataloader, until=10_000):
                loss = criterion(model(inputs), targets)
                strategy.backward(loss, optimizer)
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss, tokens=inputs.numel())
        sys.exit(run.exit_code)
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        strategy: Strategy,
        *,
        resume: str | PathLike[str] | None = None,
        overwrite: bool = False,
        checkpoint_every: int | None = None,
        keep_last: int | Sequence[int | None] | None = None,
        tiers: Tiers | None = None,
        async_: bool = False,
        log_every: int = 10,
        trackers: Sequence[Tracker | str] = (),
        progress: bool = True,
        format: Format | None = None,  # noqa: A002
        profile: str | None = None,
        diagnose: float | None = 300.0,
        goodput: bool = False,
        flops: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        self.files = RunFiles(Path(folder).expanduser())
        self.strategy = strategy
        self.step = self.ended_by = self.exit_code = 0
        self._resume = None if resume is None else fspath(resume)
        self._overwrite = overwrite
        self._tiers = tiers
        self._copies = tiers.copies if isinstance(tiers, Tiers) else None  # else `_check` raises, on every rank
        self._root = self.files.checkpoints if tiers is None else Path(self.files.checkpoints.name)
        self._checkpoint_every, self._keep_last, self._async = checkpoint_every, keep_last, async_
        self._log_every, self._progress = log_every, progress
        is_list = isinstance(trackers, Iterable) and not isinstance(trackers, str)
        self._trackers = list(trackers) if is_list else trackers  # else `_check` raises, on every rank
        self._format = format
        self._stop = Stop()
        self._lock: Lock | None = None
        self._records: Records | None = None
        self._fresh = True  # nothing in the folder is this run's
        self._saved: int | None = None  # the step of the newest checkpoint of this run
        self._on_their_way: list[Save] = []
        self._asked = 0  # what the ranks agreed on: a signal, or LEAVE
        self._began = self._written = 0.0  # seconds of the clock: of the run's beginning, of the line before
        self._totals: dict[str, int] = {}
        self._vote = Vote(strategy.device)
        self._gathered = Gathered(strategy.device, strategy.groups[strategy.data_axes])
        self._activity = Activity({"options": strategy.options.described(), "arguments": sys.argv[1:]})
        self._clock = Clock(self._activity)
        self._profile = None if profile is None else Profile(profile, self.files)
        self._diagnose = diagnose
        self._watchdog: Watchdog | None = None
        self._goodput = self._make_goodput(wanted=goodput, flops=flops, peak=peak_flops)
        self._held = ExitStack()

    def _make_goodput(self, *, wanted: bool, flops: float | None, peak: float | None) -> Goodput | None:
        """What tells the share of time and of the devices' peak; None if nobody asks."""
        if not wanted and flops is None:
            return None
        peak = peak or peak_of(self.strategy.device, self.strategy.options.precision_name)
        exposed = Exposed(self.strategy.groups) if self.strategy.device.type == "cpu" else None
        world = None if peak is None else peak * self.strategy.groups.topology.world_size
        return Goodput(clock=self._clock, exposed=exposed, flops=flops, peak=world)

    def _check(self) -> None:
        check_trackers(self._trackers)
        if self._diagnose is not None and self._diagnose <= 0:
            raise UserError(f"diagnose is {self._diagnose}; give seconds above 0, or None")
        kept = self._keep_last if isinstance(self._keep_last, Sequence) else [self._keep_last]
        for name, number in (
            ("checkpoint_every", self._checkpoint_every),
            *(("keep_last", number) for number in kept),
            ("log_every", self._log_every),
        ):
            if number is not None and (not isinstance(number, int) or number < 1):
                remedy = "1 or more" if name == "log_every" else "1 or more, or None"
                raise UserError(f"{name} is {number!r}; give {remedy}")
        if self._format is not None and not isinstance(self._format, Format):
            raise UserError(f"format={self._format!r}: it must be a policy; pass a par_checkpoint.Format, or None")
        if self._tiers is not None and not isinstance(self._tiers, Tiers):
            raise UserError(f"tiers={self._tiers!r}: it must be a policy; pass par_checkpoint.Tiers([...]), or None")
        if self._resume is not None and self._overwrite:
            raise UserError(f"resume={self._resume!r} goes on with a run and overwrite=True replaces it; give only one")

    # The beginning

    def __enter__(self) -> Self:
        with ExitStack() as held:
            if held.enter_context(self._stop.caught()):
                held.enter_context(self.strategy.worker_signals.caught())
            held.enter_context(following_torchrun(self._stop))
            self._open(held)
            if self._goodput is not None and self._goodput.exposed is not None:
                held.enter_context(self._goodput.exposed.sampled())
            if self._diagnose is not None:
                self._watchdog = self._make_watchdog(self._diagnose).__enter__()
            self._held = held.pop_all()
        return self

    def _make_watchdog(self, seconds: float, *, report_errors: bool = True) -> Watchdog:
        """Make the watchdog of this rank.

        Args:
            seconds: Seconds without progress after which a rank hangs.
            report_errors: Whether the watchdog reports an exception that leaves the block.
        """
        return Watchdog(
            self.files.diagnosis,
            self.strategy.groups,
            timeout=seconds,
            report=lambda line: say(line, sys.stderr),
            report_errors=report_errors,
            activity=self._activity,
        )

    def _open(self, held: ExitStack) -> None:
        """Takes the folder, and goes on from the checkpoint that is asked for. Collective."""
        problem: Exception | None = None
        present: list[str] = []
        saved: list[str] = []
        try:
            self._check()
            if self.strategy.is_master:
                self._lock = held.enter_context(lock_folder(self.files))
                present, saved = [path.name for path in self.files.present()], self.files.saved()
                if is_restarted() and has_begun(self.files):
                    self._resume, self._overwrite = "auto", False
                if not is_restarted():
                    self._lock.note("")  # what an earlier launch has noted
        except Exception as error:  # whatever it is, the other ranks must hear of it
            problem = error
        numbers = (self._checkpoint_every, self._keep_last, self._log_every, self._copies)
        options = (str(self.files.folder), numbers, len(self._tiers.folders) if isinstance(self._tiers, Tiers) else 0)
        said = agree(problem, (options, present, saved, self._resume, self._overwrite), None)
        check_alike({rank: each[0] for rank, each in said.items()}, "options of a Run")
        _, present, saved, self._resume, self._overwrite = said[0]
        if self._tiers is not None:
            self._check_tiers(self._tiers)
        self._go_on(present, saved)

    @property
    def _run_checkpoints(self) -> RunCheckpoints:
        return self.strategy.checkpoints(self._root, keep_last=self._keep_last, tiers=self._tiers)

    def _check_tiers(self, tiers: Tiers) -> None:
        """Refuses tiers that cannot be saved to, or that hold a run that is neither gone on with nor replaced."""
        self._run_checkpoints.check()
        if self._resume == "auto" or self._overwrite:
            return
        newest = self._run_checkpoints.latest_step()
        if newest is not None:
            raise UserError(
                f"a tier of {[fspath(tier) for tier in tiers.folders]} holds a run already, of step {newest}; go "
                "on with resume='auto', replace it with overwrite=True, or name other tiers"
            )

    def _go_on(self, present: Sequence[str], saved: Sequence[str]) -> None:
        """Restores the checkpoint that `resume` means. Every rank finds the same, so all raise or none does.

        Args:
            present: What the folder has of a run.
            saved: What it has of checkpoints, of any run.
        """
        with together("finding a checkpoint", None):
            source, step = self._source()
        fresh = source != self.files.checkpoints or step is None
        if present and fresh and self._resume != "auto" and not self._overwrite:
            raise UserError(
                f"the folder {str(self.files.folder)!r} has a run already ({present[0]}); go on with resume='auto', "
                "replace it with overwrite=True, or name another folder"
            )
        if saved and fresh and self._resume == "auto":  # it would be removed by a run that starts anew
            raise UserError(
                f"the folder {str(self.files.folder)!r} has a checkpoint ({saved[0]}) that this run cannot go on from: "
                "another number of models was saved, or par-train run has written it; initialize what was saved, "
                "replace the run with overwrite=True, or name another folder"
            )
        if step is None:
            return
        newest = None if fresh else self._run_checkpoints.latest_step()
        if newest is not None and newest > step:
            raise UserError(
                f"{str(self.files.folder)!r} has a checkpoint of step {newest}, later than step {step} of resume; name "
                "another folder for the run that goes on from there, or move the later checkpoints away"
            )
        self.step = step
        if fresh:
            self.strategy.resume(source, step=step)
        else:
            self._run_checkpoints.resume(step)
            self._fresh, self._saved = False, step
        if self.strategy.is_master:
            where = "" if self._tiers is None else f", from {self._run_checkpoints.resumed_from}"
            say(f"par-train: goes on after step {step}{where}", sys.stderr)

    def _source(self) -> tuple[Path, int | None]:
        """The folder of checkpoints and the step to go on from; None: there is none, and the run starts anew."""
        own = self.files.checkpoints
        if self._resume is None:
            return own, None
        if self._resume == "auto":
            return own, self._run_checkpoints.latest_step()
        given = Path(self._resume).expanduser()
        name, _, number = given.name.rpartition("-")
        if name == "step" and number.isdecimal():
            root, found = given.parent, int(number) if given.is_dir() else None
        else:
            root, found = given / own.name, self.strategy.checkpoints(given / own.name).latest_step()
            if found is None:
                root, found = given, self.strategy.checkpoints(given).latest_step()
        if found is None:
            raise UserError(
                f"resume is {self._resume!r}, where no whole checkpoint is; give the folder of a run or of one of its "
                "checkpoints, or resume='auto', which starts anew if there is nothing"
            )
        if self._tiers is not None:
            return root.absolute(), found  # as another run's, for this one's are in tiers
        return (own if root.absolute() == own.absolute() else root), found

    def _begin(self, until: int) -> None:
        """What was in the folder, and does not belong to this run, goes; rank 0 opens the records. Collective.

        Trackers begin first: if one cannot, all ranks raise, and the run that was to be replaced is still there.
        """
        earlier: list[dict[str, float]] = []
        trackers: list[Tracker] = []
        with together("the trackers", None):
            if self.strategy.is_master:
                if not self._fresh:
                    truncate_metrics(self.files.metrics, self.step)
                facts = self._activity.facts
                trackers = make_trackers(self._trackers, self.files.folder, facts, replaces=self._fresh)
        if self._fresh and self._tiers is not None:
            self._run_checkpoints.clear()
        with together("the records", None):
            if self.strategy.is_master:
                self.files.forget_dumps()
                if self._fresh:
                    self.files.clear_records()
                else:
                    earlier = read_metrics(self.files.metrics)
                if self._lock is not None:
                    self._lock.note(note_of(BEGUN))
                progress = make_progress(until, self.step) if self._progress else None
                self._records = Records(self.files, progress, trackers)
        last = earlier[-1] if earlier else {}
        self._totals = {name: value for name, value in last.items() if isinstance(value, int)}
        self._began = self._written = time.monotonic() - last.get("seconds", 0.0)
        self._written += last.get("seconds", 0.0)
        self._fresh, self._stop.training = False, True

    # The loop

    def steps(self, batches: Iterable[Batch], until: int) -> Iterator[Batch]:
        """The batches, epoch after epoch, one a step, from where the last run stopped. Collective.

        After each turn of the loop a step is done: what is due is logged and saved. The loop ends at a step, or when
        a rank was asked to leave, with a checkpoint. One turn of the loop is one step of the optimizer; a loop that is
        left by `break` saves nothing, see `leave`.

        Args:
            batches: What gives batches each time it is iterated, such as the data loader that `Strategy.initialize`
                gave, whose position is saved and restored too.
            until: Steps at which training ends, those of earlier runs included.

        Raises:
            ValueError: `until` is below 1, or there are no batches.
        """
        if until < 1:
            raise UserError(f"until is {until}; give the number of steps at which training ends, 1 or more")
        if not self._asked:
            self._asked = self._agree_to_go_on()
        if not self._asked:
            self._begin(until)
        while self.step < until and not self._asked:
            before = self.step
            for batch in self._timed(batches):
                yield batch
                self.step += 1
                self._asked = self._agree_to_go_on()
                if self.step >= until or self._asked:
                    break
                if self._checkpoint_every and self.step % self._checkpoint_every == 0:
                    self._write_line()  # so that a run that goes on from here has counted every step
                    self._save(async_=self._async)
                elif self.step % self._log_every == 0:
                    self._write_line()
            if self.step == before:
                raise UserError(
                    f"there is no batch for step {before + 1} of {until}; give what has batches each time it is "
                    "iterated, such as a DataLoader, or a smaller until"
                )
        self.ended_by = 0 if self._asked == LEAVE else self._asked
        if self._stop.training:
            self._end(until)
            self.exit_code = exit_code(self.ended_by)
        elif self.ended_by:
            self.exit_code = 128 + self.ended_by
            if self.strategy.is_master:
                say(f"par-train: {signal.Signals(self.ended_by).name}: stopped before training began", sys.stderr)

    def _timed(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches, with the time that each is waited for on the clock."""
        with ExitStack() as starting:
            if isinstance(
                batches, DataLoader
            ):  # one that `initialize` was not given; a ShardedDataLoader does so itself
                starting.enter_context(self.strategy.worker_signals.starting(batches))
            iterator = iter(batches)
        while True:
            if self._profile is not None:
                self._profile.at(self.step)
            self._clock.enter(self.step, "data")
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._clock.enter(self.step, "step")
            yield batch

    def _agree(self) -> int:
        """The signal that any rank got, `LEAVE`, `FAILED` or 0: the same on every rank."""
        return self._vote.cast(self._stop.signal)

    def _agree_to_go_on(self) -> int:
        """As `_agree`; raises on every rank if any rank has failed to write records."""
        asked = self._agree()
        if asked == FAILED:
            problem, self._stop.problem = self._stop.problem, None
            agree(problem, None, None)
        return asked

    def leave(self) -> None:
        """Asks to leave after this step, saved, as a signal does. One rank suffices. For early stopping."""
        self._stop.ask(LEAVE)

    @property
    def seconds(self) -> float:
        """Seconds spent in the loop so far, those of earlier runs included and interruptions not."""
        return time.monotonic() - self._began

    # What is written

    def log(self, **values: Value) -> None:
        """Adds numbers to the next line of metrics. Ranks may log different names, in any order.

        Nothing waits for the device before a line is due. In the line stand the step, the values, the seconds so far,
        and for each count its number a second, such as `tokens_per_second`.

        Args:
            **values: Numbers, or tensors of one element. The line has the mean of all floating-point values that the
                data ranks have logged under a name since the last line. An integer, such as `tokens=inputs.numel()`,
                counts something: the line has what all data ranks have counted since training began. Where several
                ranks of a tensor group or a pipeline log a name, it counts once. A name that receives an integer and a
                floating-point value is a mean. Where a sequence is cut, `strategy.context.ranks` times the number of
                this rank's tokens are counted.

        Raises:
            ValueError, TypeError: A value that is not one number, or the name of something that every line has.
        """
        self._gathered.add(values)
        self._activity.log(values)

    def _write_line(self) -> None:
        self._clock.enter(self.step, "log")
        means, counts = self._gathered.take()  # also where this rank has logged nothing: another one may have
        if not means and not counts:
            return
        now, before = time.monotonic(), self._written
        self._written = now
        for name, count in counts.items():
            self._totals[name] = self._totals.get(name, 0) + count
        rates = {f"{name}_per_second": round(count / max(now - before, 1e-6), 1) for name, count in counts.items()}
        totals = {name: self._totals[name] for name in counts}
        goodput = {} if self._goodput is None else self._goodput.line(counts, now - before)
        self.write({"step": self.step, **means, **totals, "seconds": round(self.seconds, 3), **rates, **goodput})

    def write(self, line: Line) -> None:
        """Writes a line as it is, on rank 0: to the metrics file, to TensorBoard, to the trackers, as progress.

        Args:
            line: `step`, `seconds`, and other numbers by name; `expert_load` may be each expert's tokens by the mean, a
                list for each router by name.
        """
        if self._records is None:
            return
        try:
            self._records.write(line)
        except Exception as error:  # such as a full disk: all ranks raise it when the step has ended
            self._stop.fail(error)

    def _remedy(self, resume: str) -> str:
        """What to do where a checkpoint cannot be written: an earlier one is still there, unless this is the first."""
        if self._saved is None:
            return "nothing is saved yet"
        return f"once that is mended, {resume} goes on after step {self._saved}"

    def _follow(self, saves: Sequence[Save]) -> None:
        """Remembers saves that may still be on their way to further tiers, to wait for them at the end."""
        self._on_their_way = [save for save in (*self._on_their_way, *saves) if not save.done()]

    def _arrive(self) -> None:
        """Waits until every checkpoint is in all tiers, and says what it waits for.

        Raises:
            CheckpointError, OSError: One could not be copied; on every rank.
        """
        for save in self._on_their_way:
            said: tuple[str, ...] | None = None
            while not save.done():
                if save.missing != said:
                    self._clock.enter(self.step, "checkpoint")
                    said = save.missing
                    where = " and ".join(said) or ("its neighbours' memory" if self._copies else "")
                    if self.strategy.is_master and where:
                        say(f"par-train: {save.path} is there; waits until it is in {where}, too", sys.stderr)
                time.sleep(0.02)
            save.wait()
        self._on_their_way = []

    def _save(self, *, async_: bool = False) -> None:
        """Writes a checkpoint. Collective."""
        self._clock.enter(self.step, "checkpoint")
        with writing(self._root, self._remedy("resume='auto'")):
            saves = self._run_checkpoints.save(self.step, async_=async_, format=self._format)
        self._follow(saves)
        self._saved = self.step

    # The end

    def _end(self, until: int) -> None:
        """Leaves everything saved. Collective."""
        self._write_line()
        with together("the records", None):
            if self._stop.problem is not None:
                raise self._stop.problem
            if self._records is not None:
                self._records.close()
        if self._profile is not None:
            self._profile.end()
        if self._saved != self.step:
            self._save()  # which waits for those before it, in the first tier
        if self._on_their_way and self._lock is not None:
            self._lock.note(note_of(NEAR))
        self._arrive()
        if self._lock is not None:
            self._lock.note(note_of(SAVED))
        with together("the end of the run", None):
            if self._records is not None:
                self._records = None
                self._finish(until)

    def _finish(self, until: int) -> None:
        """Draws the curve, and says why the run has ended early. On rank 0."""
        lines = read_metrics(self.files.metrics)
        if any(line.get("loss") is not None for line in lines):
            draw_loss(self.files.curve, lines)
        draw_load(self.files.load, lines)
        if self._goodput is not None:
            say(f"par-train: {self._goodput.summary()}", sys.stderr)
        if self.step < until:
            why = f"{signal.Signals(self.ended_by).name}: " if self.ended_by else ""
            say(f"par-train: {why}saved after step {self.step} of {until}; resume='auto' goes on", sys.stderr)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, TrainingError):  # which all ranks raise together, and which ends no copy
                self._arrive()
            if self._profile is not None:
                self._profile.drop()
            if self._watchdog is not None:
                told = isinstance(error, StoppedEarly)  # which all ranks raise together
                self._watchdog.__exit__(*(None, None, None) if told else (kind, error, trace))
            if self._records is not None:
                self._records.close()
            if error is None and self._stop.problem is not None:  # the loop was left before the ranks agreed on it
                raise self._stop.problem
        finally:
            self._held.close()  # signal handlers are put back, the lock is let go
