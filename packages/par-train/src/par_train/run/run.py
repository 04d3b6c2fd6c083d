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
<<<<<<< HEAD
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
=======
        folder: Folder of the run, on a file system that all ranks share; the run creates it if it does not exist.
        strategy: Strategy that has initialized what is trained.
        resume: "auto" resumes from the newest checkpoint in the folder, and starts at step 0 without one. The path of
            another run's folder, of a folder of checkpoints, or of one checkpoint resumes from there. None starts at
            step 0, but ranks that torchrun restarts resume from what they had saved.
        overwrite: Whether to replace the run that the folder has, as soon as training begins.
        checkpoint: When and where to save; default: only at the end, in the folder.
        logging: What to write about steps; default: a line every ten steps, and progress.
        monitoring: What to watch; default: the diagnosis of hangs.
>>>>>>> 026a96a2 (train: make a run of parts, and pass its options in policies)

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
