"""What the master shows while it trains: a bar on a terminal, else a line now and then."""

import resource
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from tqdm import tqdm

from par_groups import Topology

from ..jobs.agree import Start
from ..jobs.options import Options
from ..jobs.trainer import Trainer
from .metrics import UNIFORM, Metrics
from .output import say

_SECONDS_BETWEEN_LINES = 10.0

_BAR = "{n_fmt}/{total_fmt} {bar} {elapsed}<{remaining}{postfix}"

_COLUMNS = 80


class Progress(Protocol):
    """Shows steps as they come."""

    def show(self, metrics: Metrics) -> None:
        """One more step."""

    def close(self) -> None:
        """No more steps."""


def make_progress(steps: int, done: int) -> Progress:
    """What suits the standard error: a terminal gets a bar, a file lines."""
    return Bar(steps, done) if sys.stderr.isatty() else Lines(steps)


class Bar:
    """A tqdm bar.

    Args:
        steps: Where it ends.
        done: Where it starts.
    """

    def __init__(self, steps: int, done: int) -> None:
        size = shutil.get_terminal_size()  # tqdm alone shows nothing where the terminal does not know its size
        self._bar = tqdm(total=steps, initial=done, ncols=size.columns, nrows=size.lines, bar_format=_BAR)
        self._recent = _Recent()

    def show(self, metrics: Metrics) -> None:
        """One more step."""
        self._recent.add(metrics)
        self._bar.set_postfix_str(self._recent.words(metrics.loss, self._recent.validation_loss), refresh=False)
        self._bar.update()

    def close(self) -> None:
        """Leaves the bar as it is."""
        self._bar.close()


class Lines:
    """Plain lines: the first step, then one every ten seconds, and each validation.

    Args:
        steps: How many there will be.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._last = -_SECONDS_BETWEEN_LINES
        self._recent = _Recent()

    def show(self, metrics: Metrics) -> None:
        """A line, if it is time for one."""
        self._recent.add(metrics)
        now = time.monotonic()
        if metrics.validation_loss is None and now - self._last < _SECONDS_BETWEEN_LINES:
            return
        self._last = now
        step = f"step {metrics.step:>{len(str(self._steps))}}/{self._steps}"
        times = f"{_time(metrics.seconds)}<{_time(self._recent.seconds_left(metrics, self._steps))}"
        words = self._recent.words(metrics.loss, metrics.validation_loss)
        say(f"{step} {times}, {words}", sys.stderr)

    def close(self) -> None:
        """Every line is out already."""


class _Recent:
    """What the steps up to now say together."""

    def __init__(self) -> None:
        self.validation_loss: float | None = None
        self._tokens_per_second = 0.0
        self._skipped = 0

    def add(self, metrics: Metrics) -> None:
        """One more step."""
        now, before = metrics.tokens_per_second, self._tokens_per_second
        self._tokens_per_second = 0.1 * now + 0.9 * (before or now)
        self._skipped += bool(metrics.skipped)
        if metrics.validation_loss is not None:
            self.validation_loss = metrics.validation_loss

    def words(self, loss: float, validation_loss: float | None) -> str:
        """In at most 50 columns."""
        validation = "" if validation_loss is None else f" val {validation_loss:.3f}"
        skipped = f" {self._skipped} skipped" if self._skipped else ""
        return f"loss {loss:.3f}{validation} {_short(self._tokens_per_second)} tokens/s {memory()}{skipped}"

    def seconds_left(self, metrics: Metrics, steps: int) -> float:
        """Until the last step, validations and checkpoints not counted."""
        return (steps - metrics.step) * metrics.tokens / metrics.step / self._tokens_per_second


def memory() -> str:
    """The most that this process has held: of the GPU's memory where there is one, else of the machine's."""
    on_gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    unit = 1 if sys.platform == "darwin" else 1024  # what getrusage counts in
    return tqdm.format_sizeof(on_gpu or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "iB", 1024)


def print_banner(options: Options, topology: Topology, trainer: Trainer, start: Start) -> None:
    """What is about to happen."""
    text, shape, batch = start.text, options.model, options.train.batch_size
    say("\n".join(_drawn(topology)))
    _row(
        "model",
        f"byte-level GPT, {trainer.parameters:,} parameters",
        f"{shape.layers} layers, width {shape.width}, {shape.heads} heads, context {shape.context}",
    )
    _row("precision", f"{options.precision}, ZeRO stage {options.zero}")
    if trainer.schedule is not None:
        _row("pipeline", f"{options.pipeline.schedule}, {trainer.schedule.microbatches} microbatches")
    _row(
        "data",
        _end(str(text.folder)),
        f"{text.files:,} files, {len(text.train):,} bytes to train on, {len(text.held_out):,} held out",
    )
    _row("batch", f"{batch} windows of {shape.context} bytes, {batch // topology.size('data')} a replica")
    _row("device", f"{trainer.device.type}; CPU threads a rank: {torch.get_num_threads()}")
    place = f"goes on after step {trainer.step}" if trainer.step else "starts at step 0"
    _row("output", options.output, f"{place} of {options.train.steps}")


def print_summary(options: Options, lines: Sequence[dict[str, Any]], step: int, ended_by: int) -> None:
    """What has happened, and which files it left."""
    if ended_by:
        say(
            f"par-train: {signal.Signals(ended_by).name}: saved after step {step} of {options.train.steps}; "
            f"go on with --resume auto",
            sys.stderr,
        )
    if lines:
        _print_results(lines)
    for path in options.files.present():
        say(f"wrote {path}")


def _print_results(lines: Sequence[dict[str, Any]]) -> None:
    last, validated = lines[-1], [line for line in lines if "validation_loss" in line]
    rate = _short(last["tokens"] / max(last["seconds"], 1e-3))
    _row("trained", f"{last['step']} steps in {_time(last['seconds'])}, {rate} tokens/s all included")
    _row("loss", f"{last['loss']:.4f} at the last step; a guess has {UNIFORM:.4f}")
    if validated:
        _row("held out", f"{validated[-1]['validation_loss']:.4f} at step {validated[-1]['step']}")
    skipped = sum("skipped" in line for line in lines)
    if skipped:
        _row("skipped", f"{skipped} steps, whose gradient was not finite")


def _drawn(topology: Topology) -> list[str]:
    """The topology as a table, without the axes that have one rank; "model" would be too wide."""
    left_out = ["model", *(name for name in (*topology.axes, *topology.products) if topology.size(name) == 1)]
    lines = [line for line in topology.describe().splitlines() if line.split()[0] not in left_out]
    return lines if topology.world_size > 1 else lines[:1]


def _row(label: str, *lines: str) -> None:
    say(f"{label:<11}" + ("\n" + 11 * " ").join(lines))


def _end(text: str) -> str:
    """As much of the end of a path as fits into a line."""
    room = _COLUMNS - 11
    return text if len(text) <= room else "..." + text[3 - room :]


def _short(number: float) -> str:
    """Three digits: 9.86k."""
    return tqdm.format_sizeof(number)


def _time(seconds: float) -> str:
    return tqdm.format_interval(round(seconds))
