"""The main job as one rank sees it: meet the others, agree where to start, take the steps, leave the files."""

import os
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack

import torch
import torch.distributed as dist

from par_groups import Environment, ProcessGroups, Topology, launch, together
from par_pipeline import Costs, Schedule, Timeline, simulate
from par_precision import check_device

from .._errors import UserError
from ..run.failure import one_traceback
from ..run.files import RunFiles, writing
from ..run.metrics import draw_loss, read_metrics
from ..run.run import Run
from ..run.stop import Stop
from .begin import Start, find_start, leave_if_asked
from .checkpoint import TrainingState, save_checkpoint
from .checks import check_config
from .options import Options, learning_rate
from .report import UNIFORM, print_banner, print_summary
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
            with GPTRun(trainer, start, stop, topology) as run:
                for result in run.steps(run.results(), until=options.train.steps):
                    run.after_step(result)
            dist.barrier()  # nobody leaves, and is taken for failed, while the master still writes
            return run.ended_by


class GPTRun(Run):
    """The run of the byte GPT.

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
            options.files.folder, trainer.strategy, checkpoint_every=options.train.checkpoint_every or None, log_every=1
        )
        self._trainer, self._start, self._topology = trainer, start, topology
        self._stop, self._lock = stop, start.lock
        self._agreed = 0  # the signal that any rank got, by the last step
        self._took = 0.0  # seconds for the last step alone
        self._timeline: Timeline | None = None

    def results(self) -> Iterator[StepResult]:
        """Takes steps, one after the other, and says what became of them."""
        while True:
            before = time.monotonic()
            result = self._trainer.advance(self._stop.signal)
            self._took, self._agreed = time.monotonic() - before, result.signal
            yield result

    def after_step(self, result: StepResult) -> None:
        """Validates, if it is due, and writes the line of the step."""
        trainer, options = self._trainer, self._trainer.options
        due = trainer.step % options.train.validate_every == 0 or trainer.step == options.train.steps
        validation_loss = trainer.validate() if due and not result.signal else None
        line = {
            "step": trainer.step,
            "loss": result.loss,
            "validation_loss": validation_loss,
            "learning_rate": learning_rate(options.train, trainer.step),
            "tokens": trainer.tokens,
            "seconds": round(self.seconds, 3),
            "tokens_per_second": round(options.train.batch_size * options.model.context / self._took, 1),
            "gradient_norm": None if result.skipped else result.gradient_norm,
            "skipped": result.skipped or None,
        }
        self.write(line)

    def _open(self, held: ExitStack) -> None:
        del held  # `find_start` has taken the folder
        state = self._start.state
        if state is not None:
            self._trainer.restore(self.files.checkpoint, state)
            self.step, self._fresh = state.step, False
        leave_if_asked(self._stop)  # from here on, the old run in the folder is replaced

    def _begin(self, until: int) -> None:
        if self.strategy.is_master:
            print_banner(self._trainer.options, self._topology, self._trainer, self._start)
        super()._begin(until)
        if self._start.state is not None:
            self._began = time.monotonic() - self._start.state.seconds

    def _agree(self) -> int:
        return self._agreed

    def _save(self, *, async_: bool = False) -> None:
        """Writes the checkpoint, to which every rank gives its part; the clock is the master's."""
        del async_
        trainer = self._trainer
        clock = torch.tensor(self.seconds, dtype=torch.float64, device=trainer.device)
        dist.broadcast(clock, 0)  # one number over the world
        state = TrainingState(
            step=trainer.step, samples=trainer.samples, seconds=float(clock), text=self._start.text.digest
        )
        with writing(self.files.checkpoint):
            save_checkpoint(self.files.checkpoint, trainer.model, trainer.optimizer, trainer.options, state)
        self._saved = trainer.step

    def _end(self, until: int) -> None:
        self._timeline = self._trainer.timeline()
        super()._end(until)

    def _finish(self, until: int) -> None:
        """Draws the curve, and the last step of a pipeline if there is one, and says what was written."""
        del until
        options, schedule = self._trainer.options, self._trainer.schedule
        lines = read_metrics(self.files.metrics)
        guess = (UNIFORM, f"uniform, log(256) = {UNIFORM:.2f}")
        draw_loss(self.files.curve, lines, title="Byte-level GPT", unit="loss (nats a byte)", uniform=guess)
        if self._timeline is not None and schedule is not None:
            _draw_step(schedule, self._timeline, self.files, options.pipeline.schedule)
        print_summary(options, lines, self.step, self.ended_by)


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
    """The trainer. What a package of ours refuses in words is the user's mistake, such as sizes that cannot be cut.

    Any other ValueError, such as one of a plugin, keeps its traceback.
    """
    try:
        with together("the precision", None):
            _check_precision(options.precision, device)
        return Trainer(options, start.text, groups, device)
    except ValueError as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        if not frames[-1].f_globals["__name__"].startswith("par_"):
            raise
        raise UserError(str(error)) from None


def _check_precision(precision: str, device: torch.device) -> None:
    try:
        check_device(precision, device)
    except RuntimeError as error:
        raise UserError(str(error)) from None
