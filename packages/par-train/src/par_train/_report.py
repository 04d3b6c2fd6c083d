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

from ._agree import Start
from ._metrics import Metrics
from ._options import Options
from ._trainer import Trainer

_SECONDS_BETWEEN_LINES = 10.0

_BAR = "{n_fmt}/{total_fmt} {bar:10} {elapsed}<{remaining}{postfix}"


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
        self._validation = "-"

    def show(self, metrics: Metrics) -> None:
        """One more step."""
        if metrics.validation_loss is not None:
            self._validation = f"{metrics.validation_loss:.3f}"
        self._bar.set_postfix_str(
            f"loss {metrics.loss:.3f} val {self._validation} {metrics.tokens_per_second:,.0f} tokens/s {memory()}",
            refresh=False,
        )
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

    def show(self, metrics: Metrics) -> None:
        """A line, if it is time for one."""
        now = time.monotonic()
        if metrics.validation_loss is None and now - self._last < _SECONDS_BETWEEN_LINES:
            return
        self._last = now
        validation = "" if metrics.validation_loss is None else f", validation {metrics.validation_loss:.3f}"
        print(
            f"step {metrics.step}/{self._steps}: loss {metrics.loss:.3f}{validation}, "
            f"{metrics.tokens_per_second:,.0f} tokens/s, {memory()}, {metrics.seconds:.0f} s",
            file=sys.stderr,
            flush=True,
        )

    def close(self) -> None:
        """Every line is out already."""


def memory() -> str:
    """The most that this process has held: of the GPU's memory where there is one, else of the machine's."""
    on_gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    if on_gpu:
        return f"{on_gpu / 2**20:,.0f} MiB on the GPU"
    unit = 1 if sys.platform == "darwin" else 1024  # what getrusage counts in
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20:,.0f} MiB"


def print_banner(options: Options, topology: Topology, trainer: Trainer, start: Start) -> None:
    """What is about to happen."""
    text, shape = start.text, options.model
    print(topology.describe())
    print(
        f"model   {trainer.parameters:,} parameters: width {shape.width}, {shape.layers} layers, {shape.heads} heads, "
        f"context {shape.context}; {trainer.device.type}, {torch.get_num_threads()} thread(s) a rank"
    )
    print(f"how     {options.precision}, ZeRO stage {options.zero}{_pipeline(options, trainer)}")
    print(f"data    {text.folder}: {text.files:,} files, {len(text.train):,} bytes, {len(text.held_out):,} held out")
    print(f"output  {options.output}: {'goes on after step' if trainer.step else 'starts at step'} {trainer.step}")
    sys.stdout.flush()


def _pipeline(options: Options, trainer: Trainer) -> str:
    if trainer.schedule is None:
        return ""
    return f", pipeline {options.pipeline.schedule} of {trainer.schedule.microbatches} microbatches"


def print_summary(options: Options, lines: Sequence[dict[str, Any]], step: int, ended_by: int) -> None:
    """What has happened, and which files it left."""
    if ended_by:
        print(
            f"par-train: {signal.Signals(ended_by).name}: saved after step {step} of {options.train.steps}; "
            f"go on with --resume auto",
            file=sys.stderr,
            flush=True,
        )
    validated = [line for line in lines if "validation_loss" in line]
    if validated:
        last = validated[-1]
        print(f"validation loss {last['validation_loss']:.4f} at step {last['step']}, {last['seconds']:.0f} s")
    for path in options.files.present():
        print(f"wrote {path}")
    sys.stdout.flush()
