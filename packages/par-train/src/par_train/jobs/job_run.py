"""The main job as one rank sees it: meet the others, agree where to start, take the steps, leave the files."""

import json
import math
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack

import torch
import torch.distributed as dist

from par_diagnosis import Watchdog
from par_groups import Environment, ProcessGroups, Topology, launch, together
from par_pipeline import Costs, Schedule, Timeline, simulate
from par_precision import check_device

from .._errors import UserError
from ..run.failure import one_traceback
from ..run.files import RunFiles, write_file, writing
from ..run.metrics import draw_load, draw_loss, read_metrics
from ..run.output import say
from ..run.run import Run
from ..run.stop import Stop
from .begin import Start, after_restart, find_start, leave_if_asked
from .checks import check_config
from .options import Options, learning_rate
from .report import print_banner, print_spent, print_summary
from .trainer import StepResult, Trainer

_REFUSE_TYPES = ("par_layers.", "par_pipeline.", "par_train.strategy.")
"""Modules whose TypeErrors are about a model that was given; those of others are bugs."""


LOADS_DRAWN = 100
"""About how many lines of a run have the load of experts."""


def train(options: Options, stop: Stop) -> int:
    """Trains as one of the ranks that a launcher started.

    Returns:
        The signal that ended the run early, else 0.

    Raises:
        UserError: What this rank, or another, was given cannot be used; on every rank.
        StoppedEarly: This rank, or another, was asked to leave before training began; on every rank.
    """
    cpu = options.device == "cpu" or not torch.cuda.is_available()
    with _launched("cpu" if cpu else None) as environment, one_traceback():
        _set_threads(environment)
        topology = check_config(options, environment.world_size)
        with ProcessGroups(topology) as groups, ExitStack() as held:
            options = after_restart(options)
            start = find_start(options, stop, held)
            trainer = _make_trainer(options, start, groups, environment.device)
            with JobRun(trainer, start, stop, topology) as run:
                for result in run.steps(run.results(), until=options.train.steps):
                    run.after_step(result)
            dist.barrier()  # nobody leaves, and is taken for failed, while the master still writes
            return run.ended_by


def _launched(device: str | None) -> Environment:
    """The running world of all ranks. What `launch` refuses in words, such as two launchers, is the user's mistake."""
    try:
        return launch(device=device)
    except ValueError as error:
        raise UserError(str(error)) from None


class JobRun(Run):
    """The run of a job: of the byte GPT, or of a model of transformers.

    It differs from other runs in three things: `find_start` has taken the folder already, the ranks agree on signals in
    the all-reduce of the loss, and each checkpoint takes the place of the one before.

    Args:
        trainer: This rank's trainer.
        start: Where the run starts from.
        stop: What this rank is asked for; its signals are caught already, before torch is imported.
        topology: The ranks, for the banner.
    """

    def __init__(self, trainer: Trainer, start: Start, stop: Stop, topology: Topology) -> None:
        options = trainer.options
        super().__init__(
            options.files.folder,
            trainer.strategy,
            checkpoint_every=options.train.checkpoint_every or None,
            log_every=options.train.steps,  # `after_step` writes the lines
            trackers=options.trackers,
            profile=options.profile or None,
            diagnose=options.diagnose or None,
            goodput=options.goodput,
            flops=trainer.recipe.flops if options.goodput else None,
            peak_flops=None if options.peak_flops == "auto" else options.peak_flops,
        )
        self._trainer, self._start, self._topology = trainer, start, topology
        self._stop, self._lock = stop, start.lock
        self._checkpoints, self._copies = start.checkpoints, options.checkpoint.copies or None
        self._activity.facts |= {"options": repr(options)}
        self._agreed = 0  # the signal that any rank got, by the last step
        self._took = 0.0  # seconds for the last step alone
        self._timeline: Timeline | None = None

    def results(self) -> Iterator[StepResult]:
        """Takes steps, one after the other, and says what became of them."""
        self._trainer.on_phase = lambda phase: self._clock.enter(self.step, phase)
        while True:
            before, spent = time.monotonic(), self.strategy.spent
            result = self._trainer.advance(self._stop.signal)
            self._took, self._agreed = time.monotonic() - before, result.signal
            if self.strategy.is_master and self.strategy.spent is not spent:
                print_spent(self.strategy)
            yield result

    def after_step(self, result: StepResult) -> None:
        """Validates and writes samples, where that is due, and writes the line of the step."""
        trainer, options = self._trainer, self._trainer.options
        last = trainer.step == options.train.steps
        validates = trainer.step % options.train.validate_every == 0 or last
        writes = trainer.step % options.sample.every == 0 or last if options.sample.every else validates
        if (validates or writes) and not result.signal:
            self._clock.enter(self.step, "validation")
        validation_loss = trainer.validate() if validates and not result.signal else None
        samples = trainer.write_samples() if writes and not result.signal else []
        draws = trainer.step % max(1, options.train.steps // LOADS_DRAWN) == 0 or validates
        load = trainer.expert_load() if draws else {}
        perplexity = None
        if validation_loss is not None and trainer.recipe.unit == "token":
            perplexity = math.exp(min(validation_loss, 700.0))  # larger ones are no numbers
        line = {
            "step": trainer.step,
            "loss": result.loss,
            "validation_loss": validation_loss,
            "perplexity": perplexity,
            "learning_rate": learning_rate(options, trainer.step),
            "tokens": trainer.tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(options.train.batch_size * trainer.data.context / self._took, 1),
            "gradient_norm": None if result.skipped else result.gradient_norm,
            "skipped": result.skipped or None,
            **result.routers,
            "samples": samples or None,
            "expert_load": load or None,
        }
        self._clock.enter(self.step, "log")
        if self._goodput is not None:
            line |= self._goodput.line({"tokens": options.train.batch_size * trainer.data.context}, self._took)
        self.write(line)

    def _make_watchdog(self, seconds: float, *, report_errors: bool = False) -> Watchdog:
        """A rank that fails says so itself; `python -m par_diagnosis` reads its dump."""
        return super()._make_watchdog(seconds, report_errors=report_errors)

    def _open(self, held: ExitStack) -> None:
        del held  # `find_start` has taken the folder
        origin = self._start.origin
        if origin is not None:
            self._trainer.restore(origin)
            self._fresh, self.step = False, origin.state.step
            if self._checkpoints is None or origin.tiers is not None:  # else no tier has it yet
                self._saved = self.step
        leave_if_asked(self._stop)  # from here on, the old run in the folder is replaced

    def _begin(self, until: int) -> None:
        origin = self._start.origin
        if self._checkpoints is not None and self._fresh:
            self._checkpoints.clear()
        if self.strategy.is_master:
            print_banner(
                self._trainer.options, self._topology, self._trainer, None if origin is None else origin.folder
            )
        super()._begin(until)
        if self.strategy.is_master and self._checkpoints is not None:
            write_file(self.files.tiers, json.dumps(self._trainer.options.checkpoint.tiers).encode())
        if origin is not None:
            self._began = time.monotonic() - origin.state.seconds

    def _agree(self) -> int:
        return self._agreed

    def _save(self, *, async_: bool = False) -> None:
        """Writes the checkpoint, to which every rank gives its part; the clock is the master's."""
        del async_
        trainer = self._trainer
        clock = torch.tensor(self.seconds, dtype=torch.float64, device=self.strategy.device)
        dist.broadcast(clock, 0)  # one number over the world
        self._clock.enter(self.step, "checkpoint")
        place = self._checkpoints or self.files.checkpoint
        path = self.files.checkpoint if self._checkpoints is None else self._checkpoints.path(trainer.step)
        with writing(path, self._remedy("--resume auto")):
            self._follow([trainer.save(place, float(clock))])
        self._saved = trainer.step

    def _end(self, until: int) -> None:
        self._timeline = self._trainer.timeline()
        super()._end(until)

    def _finish(self, until: int) -> None:
        """Draws the curve, and the last step of a pipeline if there is one, and says what was written."""
        del until
        trainer, options, schedule = self._trainer, self._trainer.options, self._trainer.schedule
        lines = read_metrics(self.files.metrics)
        guess = (trainer.guess, f"uniform, log({round(math.exp(trainer.guess))}) = {trainer.guess:.2f}")
        draw_loss(
            self.files.curve,
            lines,
            title=trainer.recipe.title,
            unit=f"loss (nats a {trainer.recipe.unit})",
            uniform=guess,
        )
        draw_load(self.files.load, lines)
        if self._timeline is not None and schedule is not None:
            _draw_step(schedule, self._timeline, self.files, options.pipeline.schedule)
        print_summary(options, lines, self.step, self.ended_by, trainer.guess)
        if self._checkpoints is not None:
            say(f"wrote {self._checkpoints.paths(self.step)[-1]}")
        if self._goodput is not None:
            say(f"time       {self._goodput.summary()}")


def _draw_step(schedule: Schedule, timeline: Timeline, files: RunFiles, name: str) -> None:
    """Draws a measured step, and the one that the schedule promises with its costs."""
    with writing(files.measured):
        timeline.draw(files.measured, f"{name}, measured, in seconds")
    with writing(files.predicted):
        simulate(schedule, Costs.measured(timeline)).draw(files.predicted, f"{name}, predicted, in seconds")


def _set_threads(environment: Environment) -> None:
    """Shares the machine's cores between its ranks, unless the user has said how many threads there should be."""
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // environment.local_world_size))


def _make_trainer(options: Options, start: Start, groups: ProcessGroups, device: torch.device) -> Trainer:
    """The trainer. What a package of ours, or peft, refuses in words is the user's mistake, such as sizes to be cut.

    Any other error, such as a ValueError of a plugin, keeps its traceback.
    """
    try:
        with together("the precision", None):
            _check_precision(options.precision, device)
        return Trainer(options, start.data, groups, device, start.folder)
    except (ValueError, TypeError) as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        where = frames[-1].f_globals["__name__"]
        if not where.startswith(_REFUSE_TYPES if isinstance(error, TypeError) else ("par_", "peft.")):
            raise
        raise UserError(str(error)) from None


def _check_precision(precision: str, device: torch.device) -> None:
    try:
        check_device(precision, device)
    except RuntimeError as error:
        raise UserError(str(error)) from None
