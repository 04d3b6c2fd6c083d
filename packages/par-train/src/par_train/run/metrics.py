"""The metrics file, one line of JSON a step, and the picture of the loss that is drawn from it."""

import io
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .files import write_file, writing

UNIFORM = math.log(256)
"""The loss of a model that thinks every byte equally likely, in nats."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """A line of the file.

    Args:
        step: Steps taken.
        loss: Mean over the step's global batch, nats a byte.
        validation_loss: Where it was measured.
        learning_rate: Of the step.
        tokens: Bytes trained on so far.
        seconds: Time spent so far, validation and checkpoints included, interruptions not.
        tokens_per_second: Of the step, all ranks together.
        gradient_norm: Before clipping; None if it is not finite.
        skipped: Whether it was not finite, so that the step changed nothing; None if not.
    """

    step: int
    loss: float
    validation_loss: float | None
    learning_rate: float
    tokens: int
    seconds: float
    tokens_per_second: float
    gradient_norm: float | None
    skipped: bool | None = None

    def to_json(self) -> str:
        """A line; what was not measured is left out."""
        return json.dumps({key: value for key, value in asdict(self).items() if value is not None})


class MetricsFile:
    """Appends to a metrics file, and to TensorBoard's in a folder beside it, if TensorBoard is installed.

    Args:
        path: The file; lines that it holds are kept.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._events = _tensorboard(path)
        self._file = path.open("a", encoding="utf-8")

    def append(self, metrics: Metrics) -> None:
        """Writes a line, so that a reader sees it at once."""
        line = metrics.to_json()
        with writing(self._path):
            self._file.write(line + "\n")
            self._file.flush()
        if self._events is not None:
            for name, value in json.loads(line).items():
                if name != "step":
                    self._events.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        """No more lines."""
        self._file.close()
        if self._events is not None:
            self._events.close()


def _tensorboard(path: Path) -> Any:
    """A writer of TensorBoard's that goes on where the metrics file ends; None if there is no TensorBoard."""
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415 - slow to import
    except ImportError:
        return None
    lines, folder = read_metrics(path), path.parent / "tensorboard"
    if not lines:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was replaced
    return SummaryWriter(folder, purge_step=lines[-1]["step"] + 1 if lines else None)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file, up to one that a crash has cut off or spoiled."""
    lines: list[dict[str, Any]] = []
    if not path.exists():
        return lines
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            break
        if not (isinstance(line, dict) and isinstance(line.get("step"), int)):
            break
        lines.append(line)
    return lines


def truncate_metrics(path: Path, step: int) -> None:
    """Forgets what came after that step: the run goes on from there."""
    kept = [json.dumps(line) + "\n" for line in read_metrics(path) if line["step"] <= step]
    write_file(path, "".join(kept).encode())


def draw_loss(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    """Draws the loss on training and on held-out text over the steps, as a PNG."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import, and wanted only at the end

    figure = Figure(figsize=(8, 5), layout="constrained")  # without pyplot: nothing global, no window
    axes = figure.add_subplot()
    axes.plot([line["step"] for line in lines], [line["loss"] for line in lines], alpha=0.5, label="train")
    validated = [line for line in lines if "validation_loss" in line]
    losses = [line["validation_loss"] for line in validated]
    axes.plot([line["step"] for line in validated], losses, marker="o", markersize=3, label="validation")
    axes.axhline(UNIFORM, color="grey", linestyle="--", label=f"uniform, log(256) = {UNIFORM:.2f}")
    axes.set(xlabel="step", ylabel="loss (nats a byte)", title="Byte-level GPT")
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    write_file(path, picture.getvalue())
