"""The main job as one rank sees it: meet the others, agree where to start, take the steps, leave the files."""

import os
import time

import torch
import torch.distributed as dist

from par_groups import Environment, ProcessGroups, Topology, launch

from ._agree import Start, find_start
from ._checkpoint import TrainingState, load_model, save_checkpoint
from ._checks import check_config
from ._failure import one_traceback
from ._files import RunFiles
from ._metrics import Metrics, MetricsFile, draw_loss, read_metrics, truncate_metrics
from ._options import Options, learning_rate
from ._report import make_progress, print_banner, print_summary
from ._stop import Stop
from ._trainer import Replica, StepResult, Trainer


def train(options: Options, stop: Stop) -> int:
    """Trains as one of the ranks that a launcher started.

    Returns:
        The signal that ended the run early, else 0.

    Raises:
        UserError: What this rank, or another, was given cannot be used; on every rank.
    """
    cpu = options.device == "cpu" or not torch.cuda.is_available()
    with launch(device="cpu" if cpu else None) as environment, one_traceback():
        _set_threads(environment)
        topology = check_config(options, environment.world_size)
        with ProcessGroups(topology) as groups:
            replica = Replica(
                group=groups["data"],
                index=groups.rank("data"),
                count=groups.size("data"),
                device=environment.device,
            )
            start = find_start(options, options.files, replica.group)
            trainer = Trainer(options, start.text, replica)
            if start.state is not None:
                _restore(trainer, options.files, start.state)
            master = Master(trainer, topology, start) if environment.is_master else None
            ended_by = _loop(trainer, stop, master)
            if master is not None:
                master.finish(ended_by)
            dist.barrier(replica.group)  # nobody leaves, and is taken for failed, while the master still writes
            return ended_by


def _set_threads(environment: Environment) -> None:
    """Shares the machine's cores between its ranks, unless the user has said how many threads there should be."""
    if "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // environment.local_world_size))


def _restore(trainer: Trainer, files: RunFiles, state: TrainingState) -> None:
    """Brings a new trainer to where the checkpoint was written."""
    trainer.model.load_state_dict(load_model(files.checkpoint).state_dict())
    trainer.optimizer.load_state_dict(state.optimizer)
    trainer.step, trainer.samples = state.step, state.samples
    torch.set_rng_state(state.rng)


def _loop(trainer: Trainer, stop: Stop, master: "Master | None") -> int:
    """Steps, until the last one or until a rank was asked to leave; returns the signal that asked."""
    options = trainer.options.train
    ended_by = 0
    while trainer.step < options.steps and not ended_by:
        before = time.monotonic()
        result = trainer.advance(stop.signal)
        took = time.monotonic() - before
        ended_by = result.signal
        due = trainer.step % options.validate_every == 0 or trainer.step == options.steps
        validation_loss = trainer.validate() if due and not ended_by else None
        if master is not None:
            master.after_step(result, validation_loss, took)
    return ended_by


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
        self._text = start.text
        if start.state is None:
            self._files.clear()  # that there is nothing to keep was checked, or --overwrite was said
        else:
            truncate_metrics(self._files.metrics, start.state.step)
        print_banner(self._options, topology, trainer, start)
        self._metrics = MetricsFile(self._files.metrics)
        self._progress = make_progress(self._options.train.steps, trainer.step)
        self._started = time.monotonic() - (start.state.seconds if start.state else 0.0)

    def after_step(self, result: StepResult, validation_loss: float | None, took: float) -> None:
        """Notes the step, and saves if it is time to.

        Args:
            result: Of the step.
            validation_loss: If there was a validation.
            took: Seconds for the step alone.
        """
        options, trainer = self._options.train, self._trainer
        metrics = Metrics(
            step=trainer.step,
            loss=result.loss,
            validation_loss=validation_loss,
            learning_rate=learning_rate(options, trainer.step),
            tokens=trainer.tokens,
            seconds=round(self._seconds(), 3),
            tokens_per_second=round(options.batch_size * self._options.model.context / took, 1),
            gradient_norm=result.gradient_norm,
        )
        self._metrics.append(metrics)
        self._progress.show(metrics)
        every = options.checkpoint_every
        if every and trainer.step % every == 0 and trainer.step < options.steps and not result.signal:
            self._save()

    def finish(self, ended_by: int) -> None:
        """Writes the checkpoint and the curve, and says so."""
        self._progress.close()
        self._metrics.close()
        self._save()
        lines = read_metrics(self._files.metrics)
        draw_loss(self._files.curve, lines)
        print_summary(self._options, lines, self._trainer.step, ended_by)

    def _save(self) -> None:
        trainer = self._trainer
        state = TrainingState(
            step=trainer.step,
            samples=trainer.samples,
            seconds=self._seconds(),
            text=self._text.digest,
            optimizer=trainer.optimizer.state_dict(),
            rng=torch.get_rng_state(),
        )
        save_checkpoint(self._files.checkpoint, trainer.model, self._options, state)

    def _seconds(self) -> float:
        return time.monotonic() - self._started
