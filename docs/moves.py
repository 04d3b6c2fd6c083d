"""Draws how a rank takes the elements of a tensor that it lacks: what is copied, and what travels."""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch, Rectangle

ROWS, COLUMNS = 4, 6
COLOURS = ("#4c78a8", "#f58518")
WANTED = "#54a24b"


def draw_moves(path: Path) -> None:
    """Draws two ranks that hold rows, and what the second one takes when it wants columns."""
    figure = Figure(figsize=(7.2, 2.6), layout="constrained")
    before, after = figure.subplots(1, 2)
    for axes, title in ((before, "source: rows"), (after, "target: columns of rank 1")):
        axes.set(xlim=(-0.2, COLUMNS + 0.2), ylim=(ROWS + 0.2, -0.2), aspect="equal", title=title)
        axes.axis("off")
    for rank, colour in enumerate(COLOURS):
        top = rank * ROWS / 2
        before.add_patch(Rectangle((0, top), COLUMNS, ROWS / 2, facecolor=colour, edgecolor="white", alpha=0.85))
        before.text(COLUMNS / 4, top + ROWS / 4, f"rank {rank}", ha="center", va="center", color="white")
        after.add_patch(Rectangle((COLUMNS / 2, top), COLUMNS / 2, ROWS / 2, facecolor=colour, alpha=0.85))
        text = "requested\nfrom rank 0" if rank == 0 else "copied\non rank 1"
        after.text(COLUMNS * 3 / 4, top + ROWS / 4, text, ha="center", va="center", color="white", fontsize=9)
    before.add_patch(Rectangle((COLUMNS / 2, 0), COLUMNS / 2, ROWS, fill=False, edgecolor=WANTED, linewidth=3))
    after.add_patch(Rectangle((0, 0), COLUMNS, ROWS, fill=False, edgecolor="#bbbbbb"))
    arrow = ConnectionPatch(
        (COLUMNS, ROWS / 4),
        (COLUMNS / 2, ROWS / 4),
        before.transData,
        after.transData,
        arrowstyle="-|>",
        mutation_scale=14,
        color=COLOURS[0],
    )
    figure.add_artist(arrow)
    figure.savefig(path, metadata={"Date": None})
