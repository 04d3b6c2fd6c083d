"""`Run`: a training loop of your own that resumes, saves and leaves together on all ranks. It needs no model.

Its parts: an opening takes the folder, a vote agrees on signals, a saver writes checkpoints, a log writes lines and a
monitor watches. The job of `par-train run` is the same loop with hooks of its own.
"""

import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from torch.utils.data import DataLoader

from par_groups import Vote, agree, together

from .._errors import TrainingError, UserError
from ..strategy.strategy import Strategy
from .files import RunFiles
from .hooks import RunHooks, Spelling
from .lock import BEGUN, NEAR, SAVED, note_of
from .log import MetricsLog, Value
from .metrics import Line
from .monitor import Monitor
from .opening import FolderOpening, Opened
from .output import say
from .policies import CheckpointPolicy, LoggingPolicy, MonitoringPolicy
from .saver import Saver
from .stop import FAILED, LEAVE, Stop, exit_code, following_torchrun

Batch = TypeVar("Batch")


class TrainingLoop:
    """A loop over batches that saves and leaves together on all ranks.

    Used as a context manager on all ranks.

    Args:
        files: Files of the run.
        strategy: Strategy that has initialized what is trained.
        opening: Taker of the folder, which restores a checkpoint; it may have taken the folder already.
        stop: Requests to this rank, such as signals.
        hooks: Output of rank 0, and notes in checkpoints.
        policies: Policies for checkpoints, lines and watchers.
        facts: Facts about the run for dumps and trackers, such as its options.
        report_errors: Whether the watchdog reports an error that leaves the run; otherwise the program does.

    Attributes:
        step: Steps done, including those of earlier runs.
        ended_by: Signal that ended the run, such as `signal.SIGTERM`; 0 without one.
        exit_code: Exit code for the process: 0 if the run is done or saved; 130 if Ctrl-C ended it; 128 plus the signal
            if a signal ended it before the first step, so that nothing changed.
        monitor: Watchers of the run.
    """

    def __init__(
        self,
        files: RunFiles,
        strategy: Strategy,
        *,
        opening: FolderOpening,
        stop: Stop,
        hooks: RunHooks,
        policies: tuple[CheckpointPolicy, LoggingPolicy, MonitoringPolicy],
        facts: Mapping[str, Any],
        report_errors: bool = True,
    ) -> None:
        checkpoint, logging, monitoring = policies
        self.files, self.strategy = files, strategy
        self.step = self.ended_by = self.exit_code = 0
        self._opening, self._stop, self._hooks = opening, stop, hooks
        # Signals reach ranks at different times, so that each rank by itself would leave after another step.
        self._vote = Vote(strategy.device)
        self._saver = Saver(strategy, files, checkpoint, hooks, opening.spelling.resume)
        self.monitor = Monitor(strategy, files, monitoring, facts, report_errors=report_errors)
        self._log = MetricsLog(strategy, files, logging, self.monitor, stop)
        self._due = (checkpoint.every, logging.every, checkpoint.async_)
        self._asked = 0  # what the ranks agreed on: a signal, or LEAVE
        self._opened = Opened(step=0, fresh=True, lock=None)
        self._held = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as held:
            if held.enter_context(self._stop.caught()):
                # Loader workers get the signals of a process group, too, and must outlive them for the last batches.
                held.enter_context(self.strategy.worker_signals.caught())
            held.enter_context(following_torchrun(self._stop))
            # A command has taken the folder before it read its data; then this does nothing.
            self._opening.take(held)
            self._opened = self._opening.restore(self._saver, self._hooks)
            self.step = self._opened.step
            self.monitor.start(held)
            self._held = held.pop_all()
        return self

    def _begin(self, until: int) -> None:
        """Remove what the folder has of a run that this one replaces, and open the records. Collective."""
        opened = self._opened
        self._log.open_trackers(self.step, fresh=opened.fresh)
        # Collective, and so not in the block below, in which only rank 0 works.
        if opened.fresh:
            self._saver.clear()
        with together("the records", None):
            if self.strategy.is_master:
                self._hooks.begin(self.step, until)
                self._log.open(until, self.step, fresh=opened.fresh)
                self._note(BEGUN)
        # A second call of `steps` continues this run, whatever the folder had before.
        self._opened, self._stop.training = replace(opened, fresh=False), True

    def _note(self, state: str) -> None:
        """Note in the lock file, on rank 0, how far this launch is."""
        if self._opened.lock is not None:
            self._opened.lock.note(note_of(state))

    def steps(self, batches: Iterable[Batch], until: int) -> Iterator[Batch]:
        """Iterate over batches, epoch after epoch, one a step, from where the last run stopped. Collective.

        One turn of the loop is one step of the optimizer. After it, the run logs and saves what is due. The loop ends
        at step `until`, or when a rank was asked to leave, with a checkpoint. A loop that is left by `break` saves
        nothing; see `leave`.

        Args:
            batches: Iterable of batches, such as the data loader that `Strategy.initialize` returned, whose position is
                saved and restored, too.
            until: Step at which training ends, including the steps of earlier runs.

        Raises:
            ValueError: `until` is below 1, or there are no batches.
        """
        if until < 1:
            raise UserError(f"until={until}: it is the step at which training ends; pass 1 or more")
        every, log_every, async_ = self._due
        if not self._asked:
            # A signal that arrived before the first step ends the run before it replaces anything.
            self._asked = self._agree_to_continue()
        if not self._asked:
            self._begin(until)
        while self.step < until and not self._asked:
            before = self.step
            # One pass of this loop is an epoch.
            for batch in self._timed(batches):
                yield batch
                self.step += 1
                self._asked = self._asked or self._agree_to_continue()
                if self.step >= until or self._asked:
                    break
                if every and self.step % every == 0:
                    self._log.write_line(self.step)  # so that a run that resumes here has counted every step
                    self._save(async_=async_)
                elif self.step % log_every == 0:
                    self._log.write_line(self.step)
            if self.step == before:
                raise UserError(
                    f"there is no batch for step {before + 1} of {until}; pass something that has batches each time "
                    "it is iterated, such as a DataLoader, or a smaller until"
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
        """Iterate over batches with the time that each one is waited for on the clock."""
        with ExitStack() as starting:
            if isinstance(batches, DataLoader):  # not from `initialize`; a ShardedDataLoader protects its own workers
                starting.enter_context(self.strategy.worker_signals.starting(batches))
            iterator = iter(batches)
        while True:
            # Stopping the profiler is collective, and between two steps all ranks get here.
            self.monitor.profiler.update(self.step)
            self.monitor.clock.enter(self.step, "data")
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self.monitor.clock.enter(self.step, "step")
            yield batch

    def _agree_to_continue(self) -> int:
        """Return what the ranks agree on; raise on every rank if one has failed to write records."""
        asked = self._vote.cast(self._stop.signal)
        if asked == FAILED:
            problem, self._stop.problem = self._stop.problem, None
            agree(problem, None, None)
        return asked

    def is_leaving(self) -> bool:
        """Return whether the ranks leave after this step, so that long work, such as a validation, is omitted.

        Collective: one all-reduce of a number.
        """
        self._asked = self._asked or self._agree_to_continue()
        return bool(self._asked)

    def leave(self) -> None:
        """Ask to leave after this step, with a checkpoint, as a signal does. One rank suffices. For early stopping."""
        self._stop.ask(LEAVE)

    @property
    def seconds(self) -> float:
        """Seconds spent in the loop so far, including earlier runs and excluding interruptions."""
        return self._log.seconds

    def log(self, **values: Value) -> None:
        """Add numbers to the next line of metrics. Ranks may log different names, in any order.

        Nothing waits for the device before a line is due. A line has the step, the values, the seconds so far, and for
        each count its number per second, such as `tokens_per_second`.

        Args:
            **values: Numbers, or tensors of one element. The line has the mean of all floating-point values that the
                data ranks have logged under a name since the last line. An integer, such as `tokens=inputs.numel()`, is
                a count: the line has the sum of what all data ranks have counted since training began. If several ranks
                of a tensor group or a pipeline log a name, it counts once. A name that receives an integer and a
                floating-point value is a mean. With a split sequence, a rank counts `strategy.context.ranks` times the
                number of its own tokens.

        Raises:
            ValueError, TypeError: A value that is not one number, or the name of something that every line has.
        """
        self._log.add(values)

    def write(self, line: Line) -> None:
        """Write a line as it is, on rank 0: to the metrics file, to the trackers, and as progress.

        Args:
            line: `step`, `seconds`, and other numbers by name; `expert_load` may be each expert's tokens divided by the
                mean, a list for each router by name.
        """
        self._log.write(line)

    def _save(self, *, async_: bool = False) -> None:
        self.monitor.clock.enter(self.step, "checkpoint")
        self._saver.save(self.step, async_=async_)

    def _end(self, until: int) -> None:
        """Leave everything saved. Collective."""
        self._hooks.collect()
        self._log.write_line(self.step)
        is_open = False
        with together("the records", None):
            if self._stop.problem is not None:
                raise self._stop.problem
            is_open = self._log.close()
        self.monitor.profiler.stop()
        # The last step may have saved already, by its interval.
        if self._saver.saved != self.step:
            self._save()  # which waits for earlier saves, in the first tier
        if self._saver.is_copying:
            # If the process is killed now, the launcher reports that the last checkpoint is in the first tier only.
            self._note(NEAR)
        self.monitor.clock.enter(self.step, "checkpoint")
        self._saver.wait()
        self._note(SAVED)
        with together("the end of the run", None):
            if is_open:
                self._hooks.finish(self.step, until, self.ended_by, self.monitor)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # An asynchronous save of an earlier step must complete, or the run would lose that step, too.
            if isinstance(error, TrainingError):  # all ranks raise it together, and it interrupts no copy
                self._saver.wait()
            self.monitor.stop(kind, error, trace)
            self._log.close()
            if error is None and self._stop.problem is not None:  # the loop was left before the ranks agreed on it
                raise self._stop.problem
        finally:
            self._held.close()  # signal handlers are restored, the lock is released


class Run(TrainingLoop):
    """A training run in a folder: it resumes where the last one stopped, and leaves when asked to, with a checkpoint.

    Used as a context manager, on all ranks, after `Strategy.initialize`. SIGTERM, SIGUSR1, SIGHUP and Ctrl-C let
    `steps` end after the current step (on a GPU after the next one), with a checkpoint written; so does the death of
    torchrun. The folder then has:

        checkpoints/step-00000500   a checkpoint, as `Strategy.checkpoint` writes it.
        metrics.jsonl               one JSON object a line.
        trace.json                  the trace of `MonitoringPolicy.profile`, for Perfetto.
        diagnosis/                  the state of every rank at a hang or a failure; see `par_diagnosis`.
        loss.png                    the curve of `loss` and `validation_loss`.
        expert-load.png             each expert's tokens over the steps, if lines have an `expert_load`.
        .par-train.lock             a lock that keeps a second run out, and that ends with its process.

    Args:
        folder: Folder of the run, on a file system that all ranks share; the run creates it if it does not exist.
        strategy: Strategy that has initialized what is trained.
        resume: "auto" resumes from the newest checkpoint in the folder, and starts at step 0 without one. The path of
            another run's folder, of a folder of checkpoints, or of one checkpoint resumes from there. None starts at
            step 0, but ranks that torchrun restarts resume from what they had saved.
        overwrite: Whether to replace the run that the folder has, as soon as training begins.
        checkpoint: Times and places of checkpoints; default: only at the end, in the folder.
        logging: Lines of metrics; default: a line every ten steps, and progress.
        monitoring: Watchers; default: the diagnosis of hangs.

    Attributes:
        step: Steps done, including those of earlier runs.
        ended_by: Signal that ended the run, such as `signal.SIGTERM`; 0 without one.
        exit_code: Exit code for the process: 0 if the run is done or saved; 130 if Ctrl-C ended it; 128 plus the signal
            if a signal ended it before the first step, so that nothing changed.

    Raises:
        ValueError: On every rank. Another run has the folder locked; the folder has a run, and neither `resume` nor
            `overwrite` is passed, or both are; there is nothing to resume from; a number is below 1.

    Example:
        with Run("runs/llama", strategy, resume="auto", checkpoint=CheckpointPolicy(every=500, keep_last=3)) as run:
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
        checkpoint: CheckpointPolicy | None = None,
        logging: LoggingPolicy | None = None,
        monitoring: MonitoringPolicy | None = None,
    ) -> None:
        checkpoint, logging = checkpoint or CheckpointPolicy(), logging or LoggingPolicy()
        monitoring = monitoring or MonitoringPolicy()
        files = RunFiles(Path(folder).expanduser())
        opening = FolderOpening(
            files,
            resume=None if resume is None else fspath(resume),
            overwrite=overwrite,
            policies=(checkpoint, logging, monitoring),
            is_master=strategy.is_master,
            spelling=Spelling(),
        )
        super().__init__(
            files,
            strategy,
            opening=opening,
            stop=Stop(),
            hooks=RunHooks(files),
            policies=(checkpoint, logging, monitoring),
            facts={"options": strategy.options.described(), "arguments": sys.argv[1:]},
        )
