"""The metrics file, one object of JSON a line, and the picture of the loss that is drawn from it."""

import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .files import write_file, writing

Line = Mapping[str, Any]
"""What is written at once: `step`, and values by name; None is left out of the file.

Values are numbers; but `samples` may be a list of texts, each with the prompt that it goes on from.
"""


class MetricsFile:
    """Appends to a metrics file.

    Args:
        path: The file; lines that it has already are kept.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def append(self, line: Line) -> None:
        """Writes a line, so that a reader sees it at once. A number that is not finite, which JSON lacks, is null."""
        samples = {"samples": texts} if (texts := texts_of(line)) else {}
        measured = numbers_of(line)
        finite = {name: value if math.isfinite(value) else None for name, value in measured.items()}
        with writing(self._path):
            self._file.write(json.dumps({**finite, **samples}, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Closes the file; no line follows."""
        self._file.close()


def numbers_of(line: Line) -> dict[str, Any]:
    """The numbers of a line by name, `step` among them; what is None, and texts, are left out."""
    return {name: value for name, value in line.items() if value is not None and not isinstance(value, list)}


def texts_of(line: Line) -> list[dict[str, str]]:
    """The texts of a line, each as "prompt" and "text"; there may be a number of that name, which somebody counts."""
    texts = line.get("samples")
    return texts if isinstance(texts, list) else []


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


def draw_loss(
    path: Path,
    lines: Sequence[Line],
    *,
    title: str = "Loss",
    unit: str = "loss",
    uniform: tuple[float, str] | None = None,
) -> None:
    """Draws `loss` and `validation_loss` over the steps, as a PNG.

    Args:
        path: The picture.
        lines: The lines of a metrics file; those without a loss are left out of the curve.
        title: The heading of the picture.
        unit: The label of the vertical axis.
        uniform: The loss of a model that guesses, and its label in the legend: a horizontal line.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import, and wanted only at the end

    figure = Figure(figsize=(8, 5), layout="constrained")  # without pyplot: nothing global, no window
    axes = figure.add_subplot()
    for name, label, style in (
        ("loss", "train", {"alpha": 0.5}),
        ("validation_loss", "validation", {"marker": "o", "markersize": 3}),
    ):
        points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
        if points or name == "loss":
            axes.plot([step for step, _ in points], [value for _, value in points], label=label, **style)
    if uniform is not None:
        axes.axhline(uniform[0], color="grey", linestyle="--", label=uniform[1])
        axes.set_ylim(bottom=0)
    axes.set(xlabel="step", ylabel=unit, title=title)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    write_file(path, picture.getvalue())
