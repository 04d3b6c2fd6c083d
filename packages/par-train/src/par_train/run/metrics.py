"""The metrics file, one object of JSON a line, and the pictures that are drawn from it: loss, and load of experts."""

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
"""What is written at once: `step`, and values by name; None is left out of the file.

Values are numbers; but `samples` may be a list of texts, each with the prompt that it goes on from, and `expert_load`
what `load_of` makes: for each router the share of every expert.
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
        others = {"samples": texts} if (texts := texts_of(line)) else {}
        if load := line.get("expert_load"):
            others["expert_load"] = load
        measured = numbers_of(line)
        finite = {name: value if math.isfinite(value) else None for name, value in measured.items()}
        with writing(self._path):
            self._file.write(json.dumps({**finite, **others}, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Closes the file; no line follows."""
        self._file.close()


def numbers_of(line: Line) -> dict[str, Any]:
    """The numbers of a line by name, `step` among them; what is None, texts, and the load of experts are left out."""
    return {name: value for name, value in line.items() if value is not None and not isinstance(value, list | dict)}


def texts_of(line: Line) -> list[dict[str, str]]:
    """The texts of a line, each as "prompt" and "text"; there may be a number of that name, which somebody counts."""
    texts = line.get("samples")
    return texts if isinstance(texts, list) else []


def load_of(counts: "Mapping[str, Tensor]") -> dict[str, list[float]]:
    """How busy experts were, as a line has it under `expert_load`. It waits for the device.

    Args:
        counts: Tokens of each expert [E], by router, such as `RouterLosses.load` gives.

    Returns:
        By router, each expert's tokens divided by their mean, to three digits: 1 is perfect balance.
    """
    shares = {name: tokens / tokens.double().mean().clamp(min=1e-9) for name, tokens in counts.items()}
    return {name: [round(share, 3) for share in found.tolist()] for name, found in shares.items()}


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
    _save(figure, path)


LAYERS_SHOWN = 6
"""Number of routers in a picture of the load: the first, the last, and others at equal distances."""


def draw_load(path: Path, lines: Sequence[Line], *, title: str = "Load of experts") -> None:
    """Draws the load of each expert over the steps, as a PNG: a band for each expert, one below the other.

    White is the mean, red has more tokens and blue fewer; the scale is logarithmic, and ends at four times and at a
    quarter of it. A run without lines that have an `expert_load` has no picture.

    Args:
        path: The picture.
        lines: The lines of a metrics file.
        title: The heading of the picture.
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
        edges = [steps[0] - 1, *steps]  # a line is of the steps since the one before
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
