"""Draws where the parts of a checkpoint and their copies lie on three hosts. `docs/figures.py` calls it."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from regions import GREY, arrow, box

COLOURS = ("#9dc3e6", "#f8cbad", "#c5e0b4")
"""Of each host's part."""
LEFT, STEP, WIDTH = 0.4, 5.6, 4.8


def draw_copies(path: Path) -> None:
    """A save with three hosts, `copies=2` and a second tier, from the top to the bottom."""
    figure = Figure(figsize=(9.5, 5.2), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlim(-2.6, 17.2)
    axes.set_ylim(-0.2, 10.6)
    axes.set_axis_off()
    places = {8.6: "ranks", 6.3: "first tier:\nits own part", 3.9: "first tier:\na copy", 0.8: "second tier"}
    for y, text in places.items():
        axes.text(-2.5, y, text, fontsize=9, va="center")
    count = len(COLOURS)
    for host, colour in enumerate(COLOURS):
        x = LEFT + STEP * host
        frame = mpl.patches.FancyBboxPatch(
            (x, 2.9), WIDTH, 7.0, boxstyle="round,pad=0,rounding_size=0.2", fill=False, lw=1.2, ls="--", color="#555555"
        )
        axes.add_patch(frame)
        middle = x + WIDTH / 2
        axes.text(middle, 10.2, f"host {host}", ha="center", fontsize=9, weight="bold")
        for side in (-1.05, 1.05):
            box(axes, (middle + side, 8.6), f"rank {2 * host + (side > 0)}", GREY, width=1.8)
            arrow(axes, (middle + side, 8.1), (middle + side / 2, 6.85))
        box(axes, (middle, 6.3), f"part {host}", colour, width=3.2)
        box(axes, (middle, 3.9), f"part {(host - 1) % count}", COLOURS[(host - 1) % count], width=2.4)
        _behind(axes, (middle + 1.4, 5.8), (middle + 1.4, 1.4))
        if host + 1 < count:
            _behind(axes, (middle + 1.6, 6.0), (middle + STEP - 1.25, 4.1))
    first, last = LEFT + WIDTH / 2, LEFT + STEP * (count - 1) + WIDTH / 2
    _behind(axes, (last + 1.6, 6.0), (last + 2.75, 4.9))  # around to the first host
    _behind(axes, (first - 2.75, 4.9), (first - 1.25, 4.1))
    whole = "the whole checkpoint, on a disk or in a store that all hosts see"
    box(axes, ((first + last) / 2, 0.8), whole, GREY, width=14.0)
    legend = "solid: the save waits for it; dashed: in the background"
    axes.text((first + last) / 2, -0.1, legend, ha="center", fontsize=8)
    figure.savefig(path)


def _behind(axes: Axes, start: tuple[float, float], end: tuple[float, float]) -> None:
    """An arrow of what goes on in the background."""
    axes.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "->", "lw": 1.0, "ls": "--", "color": "#777777"})
