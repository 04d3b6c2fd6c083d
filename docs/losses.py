"""Draws what the ranks of a step do when one of them is lost, before `ready` and after it."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

PHASES = (("forward, backward", "#4c78a8", 3.0), ("ready", "#54a24b", 0.35), ("update", "#f58518", 1.2))
GONE, NEW = "#bbbbbb", "#dddddd"


def draw_losses(path: Path) -> None:
    """Draw two losses of a rank, one on the left and one on the right."""
    figure = Figure(figsize=(9.0, 2.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    _draw(left, "lost before any rank has passed ready: the step is done again", lost=1.9, again=True)
    _draw(right, "lost after a rank has passed ready: the step counts", lost=3.75, again=False)
    figure.savefig(path, metadata={"Date": None})


def _draw(axes: Axes, title: str, *, lost: float, again: bool) -> None:
    axes.set_title(title, fontsize=9)
    axes.set(xlim=(-0.1, 10.4), ylim=(2.6, -0.6), yticks=range(3), yticklabels=[f"rank {rank}" for rank in range(3)])
    axes.set_xticks([])
    for side in axes.spines.values():
        side.set_visible(False)
    for rank in range(3):
        if rank == 1:
            _bars(axes, rank, 0.0, until=lost)
            axes.plot(lost, rank, marker="x", color="black", markersize=9, markeredgewidth=2.5)
            continue
        # A rank that has passed `ready` finishes its update; it notices the loss in its next collective.
        end = 3.0 if again else sum(length for _, _, length in PHASES)
        _bars(axes, rank, 0.0, until=end)
        if again:
            axes.barh(rank, end - lost, left=lost, height=0.55, color=GONE)
        axes.barh(rank, 1.1, left=end + 0.05, height=0.55, color=NEW)
        axes.text(end + 0.6, rank, "new group,\nmove state", ha="center", va="center", fontsize=6)
        _bars(axes, rank, end + 1.2, until=10.3)


def _bars(axes: Axes, rank: int, start: float, *, until: float) -> None:
    """Draw the phases of a step one after the other, up to a time."""
    for name, colour, length in PHASES:
        width = min(length, until - start)
        if width <= 0:
            return
        axes.barh(rank, width, left=start, height=0.55, color=colour)
        if width > 1.1:
            axes.text(start + width / 2, rank, name, ha="center", va="center", fontsize=7, color="white")
        start += length
