"""Draws how tokens travel through a mixture of experts over two ranks. `docs/figures.py` calls it."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from regions import BLUE, GREY, box

COLOURS = ("#1f5fa8", "#5b9bd5", "#c55a11", "#f4b183")
"""Of four experts; the first two live on rank 0, the others on rank 1."""

CHOICES = (((0, 2), (1, 3), (0, 1)), ((2, 3), (0, 3)))
"""By rank and token: the two experts that each goes to."""

STAGES = {"router": 1.3, "rows, by expert": 3.9, "experts": 8.3, "outputs": 12.7, "sums": 15.3}
"""What is drawn, and where."""


def draw_travels(path: Path) -> None:
    """Three tokens of one rank and two of another, four experts, two of them for each token."""
    figure = Figure(figsize=(9.5, 4.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlim(0, 16.6)
    axes.set_ylim(-0.7, 10.2)
    axes.set_axis_off()
    for title, x in STAGES.items():
        axes.text(x, 9.9, title, ha="center", va="center", fontsize=9, weight="bold")
    tops = (8.8, 3.9)
    for rank, (top, tokens) in enumerate(zip(tops, CHOICES, strict=True)):
        axes.text(0.1, top + 0.1, f"rank {rank}", fontsize=9, va="center", color=BLUE)
        for number, experts in enumerate(tokens):
            for end in (STAGES["router"], STAGES["sums"]):
                _token(axes, end, top - 0.9 - number * 1.1, f"t{number}", experts)
    sent = [
        (rank, number, expert)
        for rank, tokens in enumerate(CHOICES)
        for number, of in enumerate(tokens)
        for expert in of
    ]
    received = sorted(sent, key=lambda row: (row[2], row[0], row[1]))
    for rank, top in enumerate(tops):
        mine = sorted((row for row in sent if row[0] == rank), key=lambda row: (row[2], row[1]))
        theirs = [row for row in received if row[2] // 2 == rank]
        for place, row in enumerate(mine):
            there = [other for other in received if other[2] // 2 == row[2] // 2].index(row)
            start, end = top - 0.6 - place * 0.62, tops[row[2] // 2] - 0.6 - there * 0.62
            for left, right, first, second in (
                (STAGES["rows, by expert"] + 0.5, STAGES["experts"] - 1.65, start, end),
                (STAGES["experts"] + 1.65, STAGES["outputs"] - 0.5, end, start),
            ):
                arrow = {"arrowstyle": "->", "lw": 1.0, "color": COLOURS[row[2]]}
                axes.annotate("", xy=(right, second), xytext=(left, first), arrowprops=arrow)
            for x in (STAGES["rows, by expert"], STAGES["outputs"]):
                _row(axes, x, start, row)
        for place, row in enumerate(theirs):
            y = top - 0.6 - place * 0.62
            _row(axes, STAGES["experts"] - 1.15, y, row, rank=True)
            _row(axes, STAGES["experts"] + 1.15, y, row, rank=True)
        middle = top - 0.6 - (len(theirs) - 1) * 0.31
        box(axes, (STAGES["experts"], middle), f"experts\n{2 * rank}, {2 * rank + 1}", GREY, width=1.2)
    axes.text(6.1, -0.45, "one exchange", ha="center", fontsize=8)
    axes.text(10.5, -0.45, "one exchange", ha="center", fontsize=8)
    figure.savefig(path)


def _token(axes: Axes, x: float, y: float, name: str, experts: tuple[int, ...]) -> None:
    """A token, with a dot for each expert that it goes to."""
    patch = mpl.patches.FancyBboxPatch((x - 0.75, y - 0.35), 1.5, 0.7, boxstyle="round,pad=0", fc="white", ec=BLUE)
    axes.add_patch(patch)
    axes.text(x - 0.4, y, name, ha="center", va="center", fontsize=8)
    for place, expert in enumerate(experts):
        axes.plot(x + 0.1 + 0.4 * place, y, "o", color=COLOURS[expert], markersize=6)


def _row(axes: Axes, x: float, y: float, row: tuple[int, int, int], *, rank: bool = False) -> None:
    """A row: one token for one of its experts, in that one's colour."""
    source, number, expert = row
    axes.add_patch(mpl.patches.Rectangle((x - 0.42, y - 0.24), 0.84, 0.48, fc=COLOURS[expert], ec="white", lw=0.8))
    name = f"t{number} of {source}" if rank else f"t{number}"
    axes.text(
        x, y, name, ha="center", va="center", fontsize=6 if rank else 7.5, color="black" if expert % 2 else "white"
    )
