"""Draw how the watchdogs of four ranks find the one that hangs. `docs/figures.py` calls it."""

from pathlib import Path

from matplotlib.figure import Figure
from regions import GREY, arrow, box

WAITING, STUCK, STORE = "#9dc3e6", "#f8cbad", "#c5e0b4"


def draw_watchdog(path: Path) -> None:
    """Draw programs, their threads, the store and the line, from top to bottom."""
    figure = Figure(figsize=(9.5, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlim(-2.6, 17.2)
    axes.set_ylim(-0.6, 7.4)
    axes.set_axis_off()
    for y, text in {6.4: "program", 4.4: "thread", 2.4: "store of torch", 0.4: "one rank"}.items():
        axes.text(-2.5, y, text, fontsize=9, va="center")
    for rank in range(4):
        x = 1.9 + 4.3 * rank
        is_stuck = rank == 1
        box(
            axes,
            (x, 6.4),
            "reads its data" if is_stuck else "waits in all_reduce",
            STUCK if is_stuck else WAITING,
            width=3.9,
        )
        box(axes, (x, 4.4), f"rank {rank}: dump", GREY, width=3.0)
        arrow(axes, (x, 5.9), (x, 4.9))
        arrow(axes, (x, 3.9), (x, 2.9))
    box(axes, (8.35, 2.4), "dumps of all ranks: stack, collectives, step, phase", STORE, width=16.6)
    arrow(axes, (8.35, 1.9), (8.35, 0.9))
    box(axes, (8.35, 0.4), "rank 1 is waiting for its data and has not called all_reduce number 9", GREY, width=16.6)
    figure.savefig(path)
