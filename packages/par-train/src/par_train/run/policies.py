"""The policies of a `Run`: one each for checkpoints, lines of metrics, and watchers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from par_checkpoint import Format, Tiers

from .._errors import UserError
from .trackers import Tracker, check_trackers


@dataclass(frozen=True, kw_only=True)
class CheckpointPolicy:
    """The checkpoints of a run: when and where it saves them.

    Args:
        every: Steps between two checkpoints; None saves only at the end.
        keep_last: Number of newest checkpoints to keep, or with tiers one number for each; None keeps all.
        tiers: Storage tiers of this run, such as `Tiers(["/dev/shm/llama", "s3://bucket/llama"])`, which each get a
            folder `checkpoints`. The folder of the run may be one of them. Training waits only for the first tier, and
            the run ends when the last one has everything. A run resumes from the nearest tier that has the newest step.
            None: the run's own folder.
        format: Files of the checkpoints, such as `Format(assets=["Qwen3-8B"])` with those of a tokenizer; default:
            `Format()`.
        async_: Whether training continues while a checkpoint is written.
        plan: "huggingface" for all weights; "peft" for the adapters of each model only, as `Strategy.checkpoints`
            describes.
    """

    every: int | None = None
    keep_last: int | Sequence[int | None] | None = None
    tiers: Tiers | None = None
    format: Format | None = None
    async_: bool = False
    plan: str = "huggingface"

    def check(self) -> None:
        """Raise UserError if a number is below 1, or a policy is of another type."""
        kept = self.keep_last if isinstance(self.keep_last, Sequence) else [self.keep_last]
        for name, number in (("every", self.every), *(("keep_last", number) for number in kept)):
            if number is not None and (not isinstance(number, int) or number < 1):
                raise UserError(f"checkpoint.{name}={number!r}: it must be a whole number from 1 on, or None")
        for name, value, kind in (("format", self.format, Format), ("tiers", self.tiers, Tiers)):
            if value is not None and not isinstance(value, kind):
                raise UserError(f"checkpoint.{name}={value!r}: it must be a par_checkpoint.{kind.__name__}, or None")


@dataclass(frozen=True, kw_only=True)
class LoggingPolicy:
    """The lines of metrics of a run, and their receivers.

    Args:
        every: Steps between two lines of metrics. At each line, and no sooner, the host waits for the device.
        trackers: Receivers of each line on rank 0: "tensorboard", "wandb" or "mlflow", which must be installed, or
            objects with `log(values, step)`.
        progress: Whether rank 0 shows progress: a bar on a terminal, otherwise a line every ten seconds.
    """

    every: int = 10
    trackers: Sequence[Tracker | str] = ()
    progress: bool = True

    def check(self) -> None:
        """Raise UserError if `every` is below 1 or a tracker is not usable."""
        if not isinstance(self.every, int) or self.every < 1:
            raise UserError(f"logging.every={self.every!r}: it must be a whole number from 1 on")
        is_list = isinstance(self.trackers, Iterable) and not isinstance(self.trackers, str)
        check_trackers(list(self.trackers) if is_list else self.trackers)


@dataclass(frozen=True, kw_only=True)
class MonitoringPolicy:
    """The watchers of a run: profiler, watchdog and shares of time.

    Args:
        profile: Steps that torch's profiler traces, such as "steps=10:15", which excludes 15. trace.json has the traces
            of all ranks for Perfetto, with a pipeline's actions as separate tracks. None traces nothing.
        diagnose: Seconds without progress after which one line names the rank that hangs, the place and the cause. The
            line is printed at once after SIGQUIT, or if a rank fails. None: no watchdog.
        goodput: Whether each line of metrics has the shares of rank 0's time since the last line, such as `time_data`
            and `time_step`. On CPUs a line also has the share that rank 0 waited in collectives of each axis, such as
            `exposed_tensor`. The run prints a summary at the end.
        flops: Operations of the full model for one token, such as `par_plan.model_flops` returns. Lines then have
            `flops_per_second` and `mfu`, computed from what is logged as `tokens`.
        peak_flops: Peak operations per second of one device; default: the known value of its GPU. Without it lines have
            no `mfu`.
    """

    profile: str | None = None
    diagnose: float | None = 300.0
    goodput: bool = False
    flops: float | None = None
    peak_flops: float | None = None

    def check(self) -> None:
        """Raise UserError if `diagnose` is not above 0."""
        if self.diagnose is not None and self.diagnose <= 0:
            raise UserError(f"monitoring.diagnose={self.diagnose}: it must be seconds above 0, or None")
