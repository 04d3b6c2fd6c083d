"""The metrics file with one JSON object a line, and its pictures: the loss, and the load of experts."""

import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import write_file, writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

Line = Mapping[str, Any]
"""A line of metrics: `step`, and values by name. The file omits a value of None.

Values are numbers, with two exceptions. `samples` may be a list of texts, each with its prompt. `expert_load` is the
result of `load_of`: each expert's load, by router.
"""


class MetricsFile:
    """The metrics file, opened for appending.

    Args:
        path: Path of the file; its existing lines stay.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def append(self, line: Line) -> None:
        """Write a line and flush. A number that is not finite becomes null, because JSON has no such numbers."""
        others = {"samples": texts} if (texts := texts_of(line)) else {}
        if load := line.get("expert_load"):
            others["expert_load"] = load
        measured = numbers_of(line)
        finite = {name: value if math.isfinite(value) else None for name, value in measured.items()}
        # One write and a flush per line, so that a crash leaves whole lines.
        with writing(self._path):
            self._file.write(json.dumps({**finite, **others}, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def numbers_of(line: Line) -> dict[str, Any]:
    """Return the numbers of a line by name, including `step`, without None, texts and the load of experts."""
    return {name: value for name, value in line.items() if value is not None and not isinstance(value, list | dict)}


def texts_of(line: Line) -> list[dict[str, str]]:
    """Return the texts of a line, each as "prompt" and "text"; none if a program logs a number as `samples`."""
    texts = line.get("samples")
    return texts if isinstance(texts, list) else []


def load_of(counts: "Mapping[str, Tensor]") -> dict[str, list[float]]:
    """Return the load of experts for a line's `expert_load`. Waits for the device.

    Args:
        counts: Tokens of each expert [E], by router, such as `RouterLosses.load` returns.

    Returns:
        Each expert's tokens divided by the mean, by router, to three decimals: 1 is perfect balance.
    """
    shares = {name: tokens / tokens.double().mean().clamp(min=1e-9) for name, tokens in counts.items()}
    return {name: [round(share, 3) for share in found.tolist()] for name, found in shares.items()}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file, up to the first line that a crash has damaged."""
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
    """Remove the lines after a step, from which the run resumes."""
    # Steps after the checkpoint will be taken again, and their lines written again.
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
    """Draw `loss` and `validation_loss` over the steps, as a PNG.

    Args:
        path: Path of the picture.
        lines: Lines of a metrics file; the curve omits lines without a loss.
        title: Title of the picture.
        unit: Label of the vertical axis.
        uniform: Loss of a model that guesses, drawn as a horizontal line, and its label in the legend.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import, and wanted only at the end

    # Without pyplot, which keeps global state and may open a window.
    figure = Figure(figsize=(8, 5), layout="constrained")
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
    _save(figure, path)


LAYERS_SHOWN = 6
"""Number of routers in a picture of the load: the first, the last, and others at equal distances."""


def draw_load(path: Path, lines: Sequence[Line], *, title: str = "Load of experts") -> None:
    """Draw the load of each expert over the steps, as a PNG with one horizontal band for each expert.

    White is the mean; red has more tokens, and blue fewer. The scale is logarithmic, from a quarter of the mean to four
    times the mean. If no line has an `expert_load`, no picture is written.

    Args:
        path: Path of the picture.
        lines: Lines of a metrics file.
        title: Title of the picture.
    """
    loaded = [line for line in lines if line.get("expert_load")]
    if not loaded:
        return
    from matplotlib.colors import LogNorm  # noqa: PLC0415 - slow to import, and wanted only at the end
    from matplotlib.figure import Figure  # noqa: PLC0415
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415

    names = list(dict.fromkeys(name for line in loaded for name in line["expert_load"]))
    shown = min(len(names), LAYERS_SHOWN)
    names = [names[round(place * (len(names) - 1) / max(shown - 1, 1))] for place in range(shown)]
    figure = Figure(figsize=(8, 1.2 + 1.5 * shown), layout="constrained")
    panels = figure.subplots(shown, 1, sharex=True, squeeze=False)[:, 0]
    for axes, name in zip(panels, names, strict=True):
        points = [(line["step"], line["expert_load"][name]) for line in loaded if name in line["expert_load"]]
        steps = [step for step, _ in points]
        edges = [steps[0] - 1, *steps]  # a line covers the steps since the line before
        # A logarithmic scale has no place for an expert without tokens, which gets the darkest blue.
        bands = [[max(load[expert], 0.25) for _, load in points] for expert in range(len(points[0][1]))]
        image = axes.pcolormesh(
            edges,
            [number - 0.5 for number in range(len(bands) + 1)],
            bands,
            norm=LogNorm(0.25, 4),
            cmap="RdBu_r",
            rasterized=True,
        )
        axes.set(ylabel="expert", title=name or "router")
        axes.invert_yaxis()
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    panels[-1].set_xlabel("step")
    bar = figure.colorbar(image, ax=panels.tolist(), ticks=[0.25, 0.5, 1, 2, 4], label="tokens by the mean")
    bar.ax.set_yticklabels(["1/4", "1/2", "1", "2", "4"])
    bar.ax.minorticks_off()
    figure.suptitle(title)
    _save(figure, path)


def _save(figure: "Figure", path: Path) -> None:
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    write_file(path, picture.getvalue())
