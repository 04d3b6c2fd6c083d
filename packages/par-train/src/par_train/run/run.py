"""`Run`: a training loop of your own that resumes, saves and leaves together on all ranks. It needs no model."""

import signal
import sys
from os import PathLike, fspath
from pathlib import Path

from par_groups import Vote

from ..strategy.strategy import Strategy
from .files import RunFiles
from .log import MetricsLog
from .loop import TrainingLoop
from .metrics import draw_load, draw_loss, read_metrics
from .monitor import Monitor
from .opening import FolderOpening
from .output import say
from .policies import CheckpointPolicy, LoggingPolicy, MonitoringPolicy
from .saver import StrategySaver
from .stop import Stop


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
        files, stop = RunFiles(Path(folder).expanduser()), Stop()
        saver = StrategySaver(strategy, files, checkpoint)
        facts = {"options": strategy.options.described(), "arguments": sys.argv[1:]}
        monitor = Monitor(strategy, files, monitoring, facts)
        opening = FolderOpening(
            files,
            strategy,
            saver,
            resume=None if resume is None else fspath(resume),
            overwrite=overwrite,
            policies=(checkpoint, logging, monitoring),
        )
        super().__init__(
            files,
            strategy,
            opening=opening,
            stop=stop,
            vote=Vote(strategy.device).cast,
            saver=saver,
            log=MetricsLog(strategy, files, logging, monitor, stop),
            monitor=monitor,
            summary=CurveSummary(files, monitor),
            save_every=checkpoint.every,
            log_every=logging.every,
            async_=checkpoint.async_,
        )


class CurveSummary:
    """The summary of a `Run`: the loss curve, and why the run ended early.

    Args:
        files: Files of the run.
        monitor: Source of the shares of time.
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
