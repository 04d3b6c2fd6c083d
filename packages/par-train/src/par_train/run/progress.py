"""Progress on rank 0: a bar on a terminal, otherwise a line every ten seconds."""

import resource
import shutil
import sys
import time
from contextlib import suppress
from typing import Protocol

import torch
from tqdm import tqdm

from .metrics import Line, texts_of
from .output import say

_SECONDS_BETWEEN_LINES = 10.0

_BAR = "{n_fmt}/{total_fmt} {bar} {elapsed}<{remaining}{postfix}"

_RATE = "_per_second"


class Progress(Protocol):
    """The display of lines of metrics."""

    def show(self, line: Line) -> None:
        """Show a line."""

    def close(self) -> None:
        """End the display."""


def make_progress(steps: int, done: int) -> Progress:
    """Return a display for standard error: a bar if it is a terminal, otherwise plain lines.

    Args:
        steps: Step at which the run ends.
        done: Number of steps that earlier runs did.
    """
    return Bar(steps, done) if sys.stderr.isatty() else Lines(steps)


class Bar:
    """The progress bar, which tqdm draws.

    Args:
        steps: Step at which the bar ends.
        done: Step at which the bar starts.
    """

    def __init__(self, steps: int, done: int) -> None:
        size = shutil.get_terminal_size()  # tqdm shows nothing on a terminal without a size
        self._bar = tqdm(total=steps, initial=done, ncols=size.columns, nrows=size.lines, bar_format=_BAR)
        self._recent = _Recent()

    def show(self, line: Line) -> None:
        """Move the bar to the step of the line, and show the line's numbers next to it."""
        self._recent.add(line)
        self._bar.set_postfix_str(self._recent.words(line, self._recent.validation_loss), refresh=False)
        # Lines may be due every tenth step only, and a resumed run starts in the middle.
        self._bar.update(line["step"] - self._bar.n)
        for text in samples_of(line):
            self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        """Close the bar; it stays on the screen."""
        self._bar.close()


class Lines:
    """Progress as plain lines: the first line, then one every ten seconds, and each validation and sample.

    Args:
        steps: Step at which the run ends.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        # So that the first line is shown at once: it tells the user that training works.
        self._last = -_SECONDS_BETWEEN_LINES
        self._recent = _Recent()

    def show(self, line: Line) -> None:
        """Print the line, if ten seconds have passed or it has a validation or samples."""
        self._recent.add(line)
        now, validation_loss, samples = time.monotonic(), line.get("validation_loss"), samples_of(line)
        if validation_loss is None and not samples and now - self._last < _SECONDS_BETWEEN_LINES:
            return
        self._last = now
        step = f"step {line['step']:>{len(str(self._steps))}}/{self._steps}"
        times = f"{interval(line['seconds'])}<{interval(self._recent.seconds_left(line['step'], self._steps))}"
        say(f"{step} {times}, {self._recent.words(line, validation_loss)}", sys.stderr)
        for text in samples:
            say(text, sys.stderr)

    def close(self) -> None:
        """Do nothing, because every line is printed at once."""


class _Recent:
    """Statistics of the lines so far: smoothed rates, the last validation loss, the number of skipped steps."""

    def __init__(self) -> None:
        self.validation_loss: float | None = None
        self._step, self._seconds = 0, 0.0  # so a resumed run starts with the mean over its earlier steps
        self._steps_per_second = 0.0
        self._rates: dict[str, float] = {}
        self._skipped = 0

    def add(self, line: Line) -> None:
        # A rate of one line jumps with every validation, so the display shows a mean over some ten lines.
        for name, rate in line.items():
            if name.endswith(_RATE):
                self._rates[name] = 0.1 * rate + 0.9 * (self._rates.get(name) or rate)
        took = max(line["seconds"] - self._seconds, 1e-6)
        now = (line["step"] - self._step) / took
        self._steps_per_second = 0.1 * now + 0.9 * (self._steps_per_second or now)
        self._step, self._seconds = line["step"], line["seconds"]
        self._skipped += bool(line.get("skipped"))
        if line.get("validation_loss") is not None:
            self.validation_loss = line["validation_loss"]

    def words(self, line: Line, validation_loss: float | None) -> str:
        """Return the numbers to display, in about 50 columns."""
        words = [] if line.get("loss") is None else [f"loss {line['loss']:.3f}"]
        words += [] if line.get("reward") is None else [f"reward {line['reward']:.3f}"]
        words += [] if validation_loss is None else [f"val {validation_loss:.3f}"]
        words += [f"{short(rate)} {name.removesuffix(_RATE)}/s" for name, rate in self._rates.items()]
        words += [] if line.get("imbalance") is None else [f"imbalance {line['imbalance']:.2f}"]
        words += [memory()] + ([f"{self._skipped} skipped"] if self._skipped else [])
        return " ".join(words)

    def seconds_left(self, step: int, steps: int) -> float:
        """Return the seconds until the last step, at the speed of recent steps."""
        return (steps - step) / self._steps_per_second


def samples_of(line: Line) -> list[str]:
    """Return the texts that a model wrote at a step, one a line, in characters that standard error can encode."""
    letters = sys.stderr.encoding or "ascii"
    texts = [f"    {one['prompt']!r} -> {one['text']!r}" for one in texts_of(line)]
    return [text.encode(letters, "backslashreplace").decode(letters) for text in texts]


def memory() -> str:
    """Return the peak memory of this process: of its accelerator, or of the host if it has none."""
    on_device = 0
    if torch.accelerator.is_available():
        with suppress(RuntimeError):  # not every accelerator's allocator counts
            on_device = torch.accelerator.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts bytes on macOS, KiB elsewhere
    return tqdm.format_sizeof(on_device or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "iB", 1024)


def short(number: float) -> str:
    """Format a number with three digits, such as 9.86k."""
    return tqdm.format_sizeof(number)


def interval(seconds: float) -> str:
    """Format seconds as 01:02:03."""
    return tqdm.format_interval(round(seconds))
