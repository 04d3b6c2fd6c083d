"""A job on one rank: join the other ranks, agree on the start, take the steps, and write the files."""

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

from par_checkpoint import Save
from par_groups import ProcessGroups, Topology, launch, together
from par_pipeline import Costs, Timeline, simulate
from par_precision import check_device

from .._errors import UserError, as_user_error
from ..run.files import write_file, writing
from ..run.log import MetricsLog
from ..run.loop import TrainingLoop
from ..run.metrics import draw_load, draw_loss, read_metrics
from ..run.monitor import Monitor
from ..run.opening import Opened
from ..run.output import say
from ..run.policies import LoggingPolicy, MonitoringPolicy
from ..run.saver import Saver
from ..run.stop import Stop, one_traceback
from .begin import Start, after_restart, find_start, leave_if_asked
from .checks import accelerator_count, check_config
from .options import Options, learning_rate
from .report import print_banner, print_spent, print_summary
from .trainer import StepResult, Trainer

_REFUSE_TYPES = ("par_layers.", "par_pipeline.", "par_train.strategy.")
"""The modules whose TypeErrors are about the user's model; a TypeError of another module is a bug."""


LOADS_DRAWN = 100
"""The approximate number of lines of a run that have the load of experts."""


def train(options: Options, stop: Stop) -> int:
    """Train as one of the ranks that a launcher started.

    Returns:
        The signal that ended the run early, otherwise 0.

    Raises:
        UserError: The options or files of a rank are not usable; on every rank.
        StoppedEarly: A rank was asked to leave before training began; on every rank.
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
        with ProcessGroups(topology) as groups, ExitStack() as held:
            options = after_restart(options)
            start = find_start(options, stop, held)
            trainer = _make_trainer(options, start, groups, environment.device)
            # The folder is locked and compared by now, and nothing in it has changed.
            run = JobRun(trainer, start, stop, topology)
            with run.loop as loop:
                run.train()
            dist.barrier()  # the other ranks stay until rank 0 has written, or their exit counts as a failure
            return loop.ended_by


class JobRun:
    """The run of a job: a `TrainingLoop` around a trainer, whose steps agree on signals in the all-reduce of the loss.

    Args:
        trainer: Trainer of this rank.
        start: Start of the run; the folder is locked already.
        stop: Requests to this rank; `rank.join` installed the signal handlers before the import of torch.
        topology: Topology of the ranks, for the banner.

    Attributes:
        loop: Training loop, a context manager.
    """

    def __init__(self, trainer: Trainer, start: Start, stop: Stop, topology: Topology) -> None:
        options, strategy, files = trainer.options, trainer.strategy, trainer.options.files
        self.trainer, self._stop = trainer, stop
        self._agreed = 0  # the signal that any rank received, by the last step
        self._took = 0.0  # seconds of the last step
        policy = MonitoringPolicy(
            profile=options.profile or None,
            diagnose=options.diagnose or None,
            goodput=options.goodput,
            flops=trainer.recipe.flops if options.goodput else None,
            peak_flops=None if options.peak_flops == "auto" else options.peak_flops,
        )
        facts = {"options": repr(options), "arguments": sys.argv[1:]}
        # `one_traceback` around the whole job reports errors already.
        self._monitor = Monitor(strategy, files, policy, facts, report_errors=False)
        # The trainer reads its own batches, so the loop cannot time them.
        trainer.on_phase = lambda phase: self._monitor.clock.enter(self.loop.step, phase)
        # `write_line` writes the lines, so that none is due in the loop.
        logging = LoggingPolicy(every=options.train.steps, trackers=options.trackers)
        log = MetricsLog(strategy, files, logging, self._monitor, stop)
        saver = JobSaver(trainer, start, log)
        self.loop = TrainingLoop(
            files,
            strategy,
            opening=JobOpening(trainer, start, stop, saver),
            stop=stop,
            # The step has agreed on signals already; a vote would be a second all-reduce.
            vote=lambda _: self._agreed,
            saver=saver,
            log=log,
            monitor=self._monitor,
            summary=JobSummary(trainer, start, topology, self._monitor),
            save_every=options.train.checkpoint_every or None,
            log_every=logging.every,
        )

    def train(self) -> None:
        """Take all steps, and write a line after each. Collective."""
        for result in self.loop.steps(self._results(), until=self.trainer.options.train.steps):
            self._write_line(result)

    def _results(self) -> Iterator[StepResult]:
        """Take steps one after the other, and yield their results."""
        strategy = self.trainer.strategy
        while True:
            before, spent = time.monotonic(), strategy.spent
            result = self.trainer.advance(self._stop.signal)
            self._took, self._agreed = time.monotonic() - before, result.signal
            # The first step has been measured, and the rest of the memory budget is spent now.
            if strategy.is_master and strategy.spent is not spent:
                print_spent(strategy)
            yield result

    def _write_line(self, result: StepResult) -> None:
        """Validate and generate samples if they are due, and write the line of the step."""
        trainer, options = self.trainer, self.trainer.options
        last = trainer.step == options.train.steps
        validates = trainer.step % options.train.validate_every == 0 or last
        writes = trainer.step % options.sample.every == 0 or last if options.sample.every else validates
        # After a signal there is time for a checkpoint only.
        if (validates or writes) and not result.signal:
            self._monitor.clock.enter(self.loop.step, "validation")
        validation_loss = trainer.validate() if validates and not result.signal else None
        samples = trainer.write_samples() if writes and not result.signal else []
        draws = trainer.step % max(1, options.train.steps // LOADS_DRAWN) == 0 or validates
        load = trainer.expert_load() if draws else {}
        perplexity = None
        if validation_loss is not None and trainer.recipe.unit == "token":
            perplexity = math.exp(min(validation_loss, 700.0))  # larger ones overflow
        tokens = options.train.batch_size * trainer.data.context
        line = {
            "step": trainer.step,
            "loss": result.loss,
            "validation_loss": validation_loss,
            "perplexity": perplexity,
            "learning_rate": learning_rate(options, trainer.step),
            "tokens": trainer.tokens,
            "seconds": round(self.loop.seconds, 3),
            "tokens_per_second": round(tokens / self._took, 1),
            "gradient_norm": None if result.skipped else result.gradient_norm,
            "skipped": result.skipped or None,
            **result.routers,
            "samples": samples or None,
            "expert_load": load or None,
        }
        self._monitor.clock.enter(self.loop.step, "log")
        if self._monitor.goodput is not None:
            line |= self._monitor.goodput.line({"tokens": tokens}, self._took)
        self.loop.write(line)


class JobOpening:
    """The opening of a job: `find_start` has taken the folder, and this restores the checkpoint.

    Args:
        trainer: Trainer of this rank.
        start: Start of the run.
        stop: Requests to this rank.
        saver: Receives the step that is resumed.
    """

    def __init__(self, trainer: Trainer, start: Start, stop: Stop, saver: "JobSaver") -> None:
        self._trainer, self._start, self._stop, self._saver = trainer, start, stop, saver

    def open(self, held: ExitStack) -> Opened:
        """Restore the checkpoint, if there is one. Collective."""
        del held
        start, origin = self._start, self._start.origin
        opened = Opened(step=0, fresh=True, lock=start.lock)
        if origin is not None:
            self._trainer.restore(origin)
            step = origin.state.step
            opened = Opened(step=step, fresh=False, lock=start.lock, seconds=origin.state.seconds)
            if start.checkpoints is None or origin.tiers is not None:  # otherwise no tier has it yet
                self._saver.saved = step
        leave_if_asked(self._stop)  # from here on, the earlier run in the folder is replaced
        return opened


class JobSaver(Saver):
    """The checkpoints of a job: one folder that each save replaces, or one for each step in tiers.

    Args:
        trainer: Trainer of this rank.
        start: Start of the run, with its checkpoints in tiers.
        log: Source of the seconds that the run took.
    """

    def __init__(self, trainer: Trainer, start: Start, log: MetricsLog) -> None:
        super().__init__("--resume auto", speaks=trainer.strategy.is_master)
        self._trainer, self._start, self._log = trainer, start, log
        self._has_listed = False  # the tiers, in the output folder

    def path(self, step: int) -> str | Path:
        """Return the folder of the checkpoint of a step."""
        checkpoints = self._start.checkpoints
        return self._trainer.options.files.checkpoint if checkpoints is None else checkpoints.path(step)

    def write(self, step: int, *, async_: bool) -> Sequence[Save]:
        """Write the checkpoint of a step; its clock is rank 0's. Collective."""
        del step, async_
        trainer, checkpoints = self._trainer, self._start.checkpoints
        files = trainer.options.files
        # With this list, a later start that names no tiers is told where the checkpoints are.
        if checkpoints is not None and trainer.strategy.is_master and not self._has_listed:
            self._has_listed = True
            write_file(files.tiers, json.dumps(trainer.options.checkpoint.tiers).encode())
        # The state must be equal on all ranks, and their clocks differ.
        clock = torch.tensor(self._log.seconds, dtype=torch.float64, device=trainer.strategy.device)
        dist.broadcast(clock, 0)  # one number over the world
        return [trainer.save(checkpoints or files.checkpoint, float(clock))]

    def clear(self) -> None:
        """Remove the checkpoints of a replaced run from the tiers. Collective."""
        if self._start.checkpoints is not None:
            self._start.checkpoints.clear()


class JobSummary:
    """The banner of a job, its curves, and the list of its files.

    Args:
        trainer: Trainer of this rank.
        start: Start of the run.
        topology: Topology of the ranks.
        monitor: Source of the shares of time.
    """

    def __init__(self, trainer: Trainer, start: Start, topology: Topology, monitor: Monitor) -> None:
        self._trainer, self._start, self._topology, self._monitor = trainer, start, topology, monitor
        self._timeline: Timeline | None = None

    def begin(self, step: int, until: int) -> None:
        """Print the banner, and that nothing is left to do, if so."""
        options, origin = self._trainer.options, self._start.origin
        print_banner(options, self._topology, self._trainer, None if origin is None else origin.folder)
        if step >= until:
            say(
                f"par-train: step {step} of train.steps {until} is done already, so no step is taken; raise "
                "--train.steps to train on, or pass --overwrite without --resume to start again",
                sys.stderr,
            )

    def collect(self) -> None:
        """Gather the timeline of a pipeline's last step. Collective."""
        self._timeline = self._trainer.timeline()

    def finish(self, step: int, until: int, ended_by: int) -> None:
        """Draw the curves, and the last step of a pipeline if there is one, and print what was written."""
        del until
        trainer, options, schedule = self._trainer, self._trainer.options, self._trainer.schedule
        files = options.files
        lines = read_metrics(files.metrics)
        guess = (trainer.guess, f"uniform, log({trainer.data.vocabulary}) = {trainer.guess:.2f}")
        unit = f"loss (nats a {trainer.recipe.unit})"
        draw_loss(files.curve, lines, title=trainer.recipe.title, unit=unit, uniform=guess)
        draw_load(files.load, lines)
        if self._timeline is not None and schedule is not None:
            name = options.pipeline.schedule
            with writing(files.measured):
                self._timeline.draw(files.measured, f"{name}, measured, in seconds")
            with writing(files.predicted):
                simulated = simulate(schedule, Costs.measured(self._timeline))
                simulated.draw(files.predicted, f"{name}, predicted, in seconds")
        print_summary(options, lines, step, ended_by, trainer.guess)
        if self._start.checkpoints is not None:
            say(f"wrote {self._start.checkpoints.paths(step)[-1]}")
        if self._monitor.goodput is not None:
            say(f"time       {self._monitor.goodput.summary()}")


def _make_trainer(options: Options, start: Start, groups: ProcessGroups, device: torch.device) -> Trainer:
    """Make the trainer. A ValueError of par or peft, such as for sizes that do not divide, is the user's mistake.

    Any other error, such as a ValueError of a plugin, keeps its traceback.
    """
    try:
        with together("the precision", None), as_user_error("", RuntimeError):
            check_device(options.precision, device)
        return Trainer(options, start.data, groups, device, start.folder)
    except (ValueError, TypeError) as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        where = frames[-1].f_globals["__name__"]
        if not where.startswith(_REFUSE_TYPES if isinstance(error, TypeError) else ("par_", "peft.")):
            raise
        raise UserError(str(error)) from None
