"""`Run`: what keeps a training loop of one's own alive. It knows no model; a loop without it loses nothing else."""

import sys
from os import PathLike, fspath
from pathlib import Path

from ..strategy.strategy import Strategy
from .files import RunFiles
from .log import MetricsLog
from .loop import TrainingLoop
from .monitor import Monitor
from .opening import FolderOpening
from .policies import CheckpointPolicy, LoggingPolicy, MonitoringPolicy
from .saver import StrategySaver
from .stop import Stop
from .summary import CurveSummary
from .vote import Vote


class Run(TrainingLoop):
    """A training run in a folder: it resumes where the last one stopped, and leaves when asked to, with a checkpoint.

    Used as a context manager, on all ranks, after `Strategy.initialize`. SIGTERM, SIGUSR1, SIGHUP and Ctrl-C let
    `steps` end after the current step (on a GPU after the next one), with a checkpoint written; so does the death of
    torchrun. The folder then has:

        checkpoints/step-00000500   as `Strategy.checkpoint` writes them
        metrics.jsonl               one object of JSON a line
        trace.json                  what `MonitoringPolicy.profile` recorded, for Perfetto
        diagnosis/                  what every rank was doing, if they hung or one failed; see `par_diagnosis`
        loss.png                    the curve of `loss` and `validation_loss`
        expert-load.png             each expert's tokens over the steps, if lines have an `expert_load`
        .par-train.lock             keeps a second run out; it ends with the process, however that ends

    Args:
        folder: Folder of the run, on a file system that all ranks share; the run creates it if it does not exist.
        strategy: Strategy that has initialized what is trained.
        resume: "auto" resumes from the newest checkpoint in the folder, and starts at step 0 without one. The path of
            another run's folder, of a folder of checkpoints, or of one checkpoint resumes from there. None starts at
            step 0, but ranks that torchrun restarts resume from what they had saved.
        overwrite: Whether to replace the run that the folder has, as soon as training begins.
        checkpoint: When and where to save; default: only at the end, in the folder.
        logging: What to write about steps; default: a line every ten steps, and progress.
        monitoring: What to watch; default: the diagnosis of hangs.

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
