"""A job on one rank: join the other ranks, agree on the start, take the steps, and write the files."""

import math
import os
import sys
import time
import traceback
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from par_checkpoint import Tiers
from par_groups import ProcessGroups, launch, together
from par_precision import check_device

from .._errors import UserError, as_user_error
from ..run.metrics import load_of
from ..run.opening import FolderOpening
from ..run.policies import CheckpointPolicy, LoggingPolicy, MonitoringPolicy
from ..run.run import TrainingLoop
from ..run.stop import Stop, one_traceback
from .begin import read_start
from .checks import accelerator_count, check_config
from .existing.folder import ModelFolder
from .hooks import FLAGS, JobHooks
from .options import Options, learning_rate
from .recipe import JobData
from .report import print_spent
from .trainer import StepResult, Trainer

_REFUSE_TYPES = ("par_layers.", "par_pipeline.", "par_train.strategy.")
"""The modules whose TypeErrors are about the user's model; a TypeError of another module is a bug."""


LOADS_DRAWN = 100
"""The approximate number of lines of a run that have the load of experts."""


def train(options: Options, stop: Stop) -> int:
    """Train as one of the ranks that a launcher started.

    Returns:
        The exit code of the process.

    Raises:
        UserError: The options or files of a rank are not usable; on every rank.
        StoppedEarly: A rank was asked to leave while it read data; on every rank.
    """
    cpu = options.device == "cpu" or not accelerator_count()
    with as_user_error():  # such as two launchers at a time
        world = launch(device="cpu" if cpu else None)
    with world as environment, one_traceback():
        if "OMP_NUM_THREADS" not in os.environ:
            # By default each rank would use all cores of the host, and the ranks would take them from each other.
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            torch.set_num_threads(max(1, cores // environment.local_world_size))
        topology = check_config(options, environment.world_size)
        checkpoint, logging, monitoring = _policies(options)
        opening = FolderOpening(
            options.files,
            resume=None if options.resume == "no" else options.resume,
            overwrite=options.overwrite,
            policies=(checkpoint, logging, monitoring),
            is_master=environment.is_master,
            spelling=FLAGS,
        )
        with ProcessGroups(topology) as groups, ExitStack() as held:
            # Before the data are read, since tokens are written into the folder.
            with as_user_error():
                opening.take(held)
            trainer = _make_trainer(options, *read_start(options, stop), groups, environment.device)
            form = trainer.recipe.format(trainer.model, held)
            run = TrainingLoop(
                options.files,
                trainer.strategy,
                opening=opening,
                stop=stop,  # `rank.join` installed its signal handlers before the import of torch
                hooks=JobHooks(trainer, topology),
                policies=(
                    replace(checkpoint, format=form, plan=trainer.recipe.plan),
                    logging,
                    replace(monitoring, flops=trainer.recipe.flops if options.goodput else None),
                ),
                facts={"options": repr(options), "arguments": sys.argv[1:]},
                report_errors=False,  # `one_traceback` around the whole job does
            )
            with run:
                _take_steps(run, trainer)
            dist.barrier()  # the other ranks stay until rank 0 has written, or their exit counts as a failure
            return run.exit_code


def _policies(options: Options) -> tuple[CheckpointPolicy, LoggingPolicy, MonitoringPolicy]:
    """Return the policies of the run, except for what depends on the model."""
    given = options.checkpoint
    # One number is for all tiers; several are one for each tier.
    keep_last = list(given.keep_last) if len(given.keep_last) > 1 else next(iter(given.keep_last), 1)
    folders = [str(Path(tier).expanduser()) if "://" not in tier else tier for tier in given.tiers]
    with as_user_error("checkpoint.tiers: "):
        tiers = Tiers(folders, copies=given.copies or None) if folders else None
    return (
        CheckpointPolicy(every=options.train.checkpoint_every or None, keep_last=keep_last, tiers=tiers),
        # The job writes a line after each step, so that none is due in the loop.
        LoggingPolicy(every=options.train.steps, trackers=options.trackers),
        MonitoringPolicy(
            profile=options.profile or None,
            diagnose=options.diagnose or None,
            goodput=options.goodput,
            peak_flops=None if options.peak_flops == "auto" else options.peak_flops,
        ),
    )


def _take_steps(run: TrainingLoop, trainer: Trainer) -> None:
    """Take all steps, and write a line after each. Collective."""
    strategy, before = trainer.strategy, time.monotonic()
    for batch in run.steps(trainer.loader, until=trainer.options.train.steps):
        spent = strategy.spent
        result = trainer.advance(batch)
        # Without validation and saving, which would make the speed of a line jump.
        now = time.monotonic()
        # The first step has been measured, and the rest of the memory budget is spent now.
        if strategy.is_master and strategy.spent is not spent:
            print_spent(strategy)
        _write_line(run, trainer, result, now - before)
        before = time.monotonic()


def _write_line(run: TrainingLoop, trainer: Trainer, result: StepResult, took: float) -> None:
    """Validate and generate samples if they are due, and write the line of the step.

    Args:
        run: The run.
        trainer: Trainer of this rank.
        result: Result of the step.
        took: Seconds of the step.
    """
    options, monitor, step = trainer.options, run.monitor, trainer.step
    last = step == options.train.steps
    validates = step % options.train.validate_every == 0 or last
    writes = step % options.sample.every == 0 or last if options.sample.every else validates
    if validates or writes:
        monitor.clock.enter(run.step, "validation")
        if run.is_leaving():  # after a signal there is time for a checkpoint only
            validates = writes = False
    validation_loss = trainer.validate() if validates else None
    samples = trainer.recipe.write_samples(trainer.strategy, trainer.model) if writes else []
    # A line of a model with many experts is long, and a picture has no more columns than this.
    draws = step % max(1, options.train.steps // LOADS_DRAWN) == 0 or validates
    counts = trainer.strategy.expert_load(trainer.model) if draws and options.model.experts else {}
    perplexity = None
    if validation_loss is not None and trainer.recipe.unit == "token":
        perplexity = math.exp(min(validation_loss, 700.0))  # larger ones overflow
    tokens = options.train.batch_size * trainer.data.context
    line = {
        "step": step,
        "loss": result.loss,
        "validation_loss": validation_loss,
        "perplexity": perplexity,
        "learning_rate": learning_rate(options, step),
        "tokens": trainer.tokens,
        "seconds": round(run.seconds, 3),
        "tokens_per_second": round(tokens / took, 1),
        "gradient_norm": None if result.skipped else result.gradient_norm,
        "skipped": result.skipped or None,
        **result.routers,
        "samples": samples or None,
        "expert_load": load_of(counts) or None,
    }
    monitor.clock.enter(run.step, "log")
    if monitor.goodput is not None:
        line |= monitor.goodput.line({"tokens": tokens}, took)
    run.write(line)


def _make_trainer(
    options: Options, data: JobData, folder: ModelFolder | None, groups: ProcessGroups, device: torch.device
) -> Trainer:
    """Make the trainer. A ValueError of par or peft, such as for sizes that do not divide, is the user's mistake.

    Any other error, such as a ValueError of a plugin, keeps its traceback.
    """
    try:
        with together("the precision", None), as_user_error("", RuntimeError):
            check_device(options.precision, device)
        return Trainer(options, data, groups, device, folder)
    except (ValueError, TypeError) as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        where = frames[-1].f_globals["__name__"]
        if not where.startswith(_REFUSE_TYPES if isinstance(error, TypeError) else ("par_", "peft.")):
            raise
        raise UserError(str(error)) from None
