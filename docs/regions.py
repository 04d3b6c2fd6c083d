"""Draws a region of a model that was cut in place, with what its ranks send. `docs/figures.py` calls it."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

BLUE, PALE, GREEN, GREY = "#1f5fa8", "#dce9f7", "#d8efdc", "#f4f4f4"

WAYS = {
    "whole sequence": ("enter\n(backward: all-reduce)", "Row\n(all-reduce)", "[B, S, h]", "[B, S, h]"),
    "sequence parallel": (
        "all-gather\n(backward: reduce-scatter)",
        "Row, reduce-scatter\n(backward: all-gather)",
        "[B, S/p, h]",
        "[B, S/p, h]",
    ),
}
"""By the kind of activations: what stands at the entry and at the end, and the shapes outside."""


def draw_region(path: Path) -> None:
    """An attention between its two collectives, with and without sequence parallelism."""
    figure = Figure(figsize=(9.5, 5.4), layout="constrained")
    for position, (title, (entry, end, before, after)) in enumerate(WAYS.items()):
        axes = figure.add_subplot(2, 1, position + 1)
        axes.set_xlim(0, 19)
        axes.set_ylim(0, 5.2)
        axes.set_axis_off()
        axes.set_title(title, loc="left", fontsize=10, weight="bold")
        frame = mpl.patches.FancyBboxPatch(
            (2.2, 0.3), 14.6, 4.5, boxstyle="round,pad=0,rounding_size=0.2", fill=False, lw=1.2, ls="--", color=BLUE
        )
        axes.add_patch(frame)
        axes.text(16.4, 4.42, "a closed region", ha="right", va="center", fontsize=8, color=BLUE)
        box(axes, (4.4, 2.5), entry, GREEN, width=3.6)
        for height, name in ((3.9, "q: Column"), (2.5, "k: Column"), (1.1, "v: Column")):
            box(axes, (8.4, height), name, PALE)
            arrow(axes, (6.2, 2.5), (7.3, height))
        box(axes, (10.8, 3.2), "norms of q\nand k: Partial", GREY, width=1.9)
        for height in (3.9, 2.5):
            arrow(axes, (9.5, height), (9.85, 3.2))
        box(axes, (12.9, 2.5), "attention of\nown heads", GREY, width=1.7)
        arrow(axes, (11.75, 3.2), (12.05, 2.6))
        arrow(axes, (9.5, 1.1), (12.05, 2.4))
        arrow(axes, (13.75, 2.5), (14.0, 2.5))
        box(axes, (15.3, 2.5), end, GREEN, width=2.5)
        arrow(axes, (0.3, 2.5), (2.6, 2.5))
        arrow(axes, (16.55, 2.5), (18.7, 2.5))
        axes.text(1.2, 2.85, before, ha="center", fontsize=8)
        axes.text(17.6, 2.85, after, ha="center", fontsize=8)
    figure.savefig(path)


def box(axes: Axes, centre: tuple[float, float], text: str, colour: str, width: float = 2.2) -> None:
    """A box with a text."""
    x, y = centre
    patch = mpl.patches.FancyBboxPatch(
        (x - width / 2, y - 0.5), width, 1.0, boxstyle="round,pad=0,rounding_size=0.15", fc=colour, ec=BLUE
    )
    axes.add_patch(patch)
    axes.text(x, y, text, ha="center", va="center", fontsize=7.5)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """An arrow from one place to another."""
    axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "->", "lw": 0.9})
