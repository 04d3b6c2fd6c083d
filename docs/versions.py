"""Draws how a generator takes versions of weights: what it serves, and what it stages in the meantime."""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

COLOURS = ("#4c78a8", "#f58518", "#54a24b")
ROWS = ("trainer", "generator: in host memory", "generator: serves")


def draw_versions(path: Path) -> None:
    """Draws three rows over time: the trainer's versions, and both memories of a generator."""
    figure = Figure(figsize=(7.2, 2.4), layout="constrained")
    axes = figure.subplots()
    # Row, begin, end, version and text of each bar.
    bars = [
        (0, 0.0, 4.0, 0, "step n"),
        (0, 4.0, 8.0, 1, "step n + 1"),
        (0, 8.0, 12.0, 2, "step n + 2"),
        (1, 4.2, 6.6, 1, "n + 1 arrives"),
        (1, 8.2, 10.6, 2, "n + 2 arrives"),
        (2, 0.0, 7.4, 0, "version n"),
        (2, 7.4, 11.2, 1, "version n + 1"),
        (2, 11.2, 12.0, 2, ""),
    ]
    for row, begin, end, version, text in bars:
        axes.add_patch(Rectangle((begin, row + 0.1), end - begin, 0.8, facecolor=COLOURS[version], edgecolor="white"))
        axes.text((begin + end) / 2, row + 0.5, text, ha="center", va="center", color="white", fontsize=9)
    for moment, text in ((6.6, "commit"), (7.4, "apply()"), (10.6, "commit"), (11.2, "apply()")):
        axes.plot([moment, moment], [1.0, 3.0], color="#333333", linewidth=0.8, linestyle=":")
        axes.text(moment, 3.12 if text == "commit" else 3.42, text, ha="center", va="center", fontsize=8)
    axes.set(xlim=(0, 12), ylim=(3.6, 0), yticks=[0.5, 1.5, 2.5], yticklabels=ROWS, xticks=[])
    axes.set_xlabel("time")
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, metadata={"Date": None})
