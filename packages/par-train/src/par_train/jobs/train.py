"""The main job as one rank sees it: meet the others, agree where to start, take the steps, leave the files."""

import os
import time
from contextlib import ExitStack

import torch
import torch.distributed as dist

from par_groups import Environment, ProcessGroups, Topology, agree, launch, together
from par_pipeline import Costs, Schedule, Timeline, simulate
from par_precision import check_device

from .._errors import UserError
from ..run.failure import one_traceback
from ..run.files import RunFiles, writing
from ..run.metrics import Metrics, MetricsFile, draw_loss, read_metrics, truncate_metrics
from ..run.report import make_progress, print_banner, print_summary
from ..run.stop import Stop, StoppedEarly
from .agree import Start, find_start
from .checkpoint import TrainingState, save_checkpoint
from .checks import check_config
from .job import BEGUN, SAVED, note_of
from .options import Options, learning_rate
from .trainer import StepResult, Trainer


def train(options: Options, stop: Stop) -> int:
    """Trains as one of the ranks that a launcher started.

    Returns:
        The signal that ended the run early, else 0.

    Raises:
        UserError: What this rank, or another, was given cannot be used; on every rank.
        StoppedEarly: This rank, or another, was asked to leave before training began; on every rank.
    """
    cpu = options.device == "cpu" or not torch.cuda.is_available()
    with launch(device="cpu" if cpu else None) as environment, one_traceback():
        _set_threads(environment)
        topology = check_config(options, environment.world_size)
        with ProcessGroups(topology) as groups, ExitStack() as held:
            start = find_start(options, held)
            trainer = _make_trainer(options, start, groups, environment.device)
            if start.state is not None:
                trainer.restore(options.files.checkpoint, start.state)
            _leave_if_asked(stop)  # from here on, the old run in the folder is replaced
            master = Master(trainer, topology, start) if environment.is_master else None
            ended_by = _loop(trainer, stop, start, master)
            dist.barrier()  # nobody leaves, and is taken for failed, while the master still writes
            return ended_by


def _leave_if_asked(stop: Stop) -> None:
    """All ranks leave if one was asked to. All-gather of a number over the world."""
    number = max(agree(None, stop.signal, None).values())
    if number:
        raise StoppedEarly(number)


def _set_threads(environment: Environment) -> None:
    """Shares the machine's cores between its ranks, unless the user has said how many threads there should be."""
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // environment.local_world_size))


def _make_trainer(options: Options, start: Start, groups: ProcessGroups, device: torch.device) -> Trainer:
    """The trainer; a precision that a device cannot work in, and sizes that cannot be cut, are the user's mistakes."""
    try:
        with together("the precision", None):
            _check_precision(options.precision, device)
        return Trainer(options, start.text, groups, device)
    except ValueError as error:
        raise UserError(str(error)) from None


def _check_precision(precision: str, device: torch.device) -> None:
    try:
        check_device(precision, device)
    except RuntimeError as error:
        raise UserError(str(error)) from None


def _loop(trainer: Trainer, stop: Stop, start: Start, master: "Master | None") -> int:
    """Steps, until the last one or until a rank was asked to leave; returns the signal that asked."""
    options = trainer.options.train
    stop.training = True
    ended_by, began = 0, time.monotonic() - (start.state.seconds if start.state else 0.0)
    while trainer.step < options.steps and not ended_by:
        before = time.monotonic()
        result = trainer.advance(stop.signal)
        took = time.monotonic() - before
        ended_by = result.signal
        due = trainer.step % options.validate_every == 0 or trainer.step == options.steps
        validation_loss = trainer.validate() if due and not ended_by else None
        seconds = time.monotonic() - began
        if master is not None:
            master.after_step(result, validation_loss, took, seconds)
        last = trainer.step == options.steps or ended_by
        if not last and options.checkpoint_every and trainer.step % options.checkpoint_every == 0:
            _save(trainer, start, seconds)
    if master is not None:
        master.close()
    timeline = trainer.timeline()
    _save(trainer, start, time.monotonic() - began)
    if start.lock is not None:
        start.lock.note(note_of(SAVED))
    if master is not None:
        master.finish(ended_by, timeline)
    return ended_by


def _save(trainer: Trainer, start: Start, seconds: float) -> None:
    """Writes the checkpoint, to which every rank gives its part; the clock is the master's."""
    clock = torch.tensor(seconds, dtype=torch.float64, device=trainer.device)
    dist.broadcast(clock, 0)  # one number over the world
    state = TrainingState(
        step=trainer.step,
        samples=trainer.samples,
        seconds=float(clock),
        text=start.text.digest,
    )
    checkpoint = trainer.options.files.checkpoint
    with writing(checkpoint):
        save_checkpoint(checkpoint, trainer.model, trainer.optimizer, trainer.options, state)


class Master:
    """What rank 0 does beside training: it shows progress and writes the files.

    Args:
        trainer: This rank's.
        topology: For the banner.
        start: Where the run starts from.
    """

    def __init__(self, trainer: Trainer, topology: Topology, start: Start) -> None:
        self._trainer = trainer
        self._options = trainer.options
        self._files = trainer.options.files
        if start.state is None:
            self._files.clear()  # that there is nothing to keep was checked, or --overwrite was said
        else:
            truncate_metrics(self._files.metrics, start.state.step)
        if start.lock is not None:
            start.lock.note(note_of(BEGUN))
        print_banner(self._options, topology, trainer, start)
        self._metrics = MetricsFile(self._files.metrics)
        self._progress = make_progress(self._options.train.steps, trainer.step)

    def after_step(self, result: StepResult, validation_loss: float | None, took: float, seconds: float) -> None:
        """Notes the step.

        Args:
            result: Of the step.
            validation_loss: If there was a validation.
            took: Seconds for the step alone.
            seconds: Since training began, earlier runs included.
        """
        options, trainer = self._options.train, self._trainer
        metrics = Metrics(
            step=trainer.step,
            loss=result.loss,
            validation_loss=validation_loss,
            learning_rate=learning_rate(options, trainer.step),
            tokens=trainer.tokens,
            seconds=round(seconds, 3),
            tokens_per_second=round(options.batch_size * self._options.model.context / took, 1),
            gradient_norm=None if result.skipped else result.gradient_norm,
            skipped=result.skipped or None,
        )
        self._metrics.append(metrics)
        self._progress.show(metrics)

    def close(self) -> None:
        """Ends the progress display and the metrics file."""
        self._progress.close()
        self._metrics.close()

    def finish(self, ended_by: int, timeline: Timeline | None) -> None:
        """Writes the curve, and the pipeline's last step if there is one, and says what was written."""
        lines = read_metrics(self._files.metrics)
        draw_loss(self._files.curve, lines)
        schedule = self._trainer.schedule
        if timeline is not None and schedule is not None:
            _draw_step(schedule, timeline, self._files, self._options.pipeline.schedule)
        print_summary(self._options, lines, self._trainer.step, ended_by)


def _draw_step(schedule: Schedule, timeline: Timeline, files: RunFiles, name: str) -> None:
    """Draws a measured step, and the one that the schedule promises with its costs."""
    with writing(files.measured):
        timeline.draw(files.measured, f"{name}, measured, in seconds")
    with writing(files.predicted):
        simulate(schedule, Costs.measured(timeline)).draw(files.predicted, f"{name}, predicted, in seconds")
