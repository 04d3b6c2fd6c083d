"""Draws a step with the optimizer on the host of an accelerator, on lanes. `docs/figures.py` calls it."""

from pathlib import Path

from matplotlib.figure import Figure
from regions import BLUE

BLOCKS = 8
FORWARD, BACKWARD, LINK, HOST = 1.0, 2.0, 1.2, 1.2
"""Times of one block: its passes, a copy of its gradient or its parameters over the link, and its update; 5 : 2 : 2."""

LANES = ("compute", "out", "host", "in")

Bar = tuple[str, str, float, float]
"""Lane, what is done, begin and end."""


def bars_of_steps(steps: int) -> list[Bar]:
    """Return what each lane does in some steps, by the rules of par-zero: each lane does one thing after the other."""
    bars: list[Bar] = []
    free = dict.fromkeys(LANES, 0.0)
    arrived = [0.0] * BLOCKS  # when the parameters of each block are on the device

    def add(lane: str, what: str, seconds: float, after: float) -> float:
        begin = max(free[lane], after)
        free[lane] = begin + seconds
        bars.append((lane, what, begin, free[lane]))
        return free[lane]

    for _ in range(steps):
        for block in range(BLOCKS):
            add("compute", f"F{block}", FORWARD, arrived[block])
        out = [0.0] * BLOCKS
        for block in reversed(range(BLOCKS)):
            out[block] = add("out", f"g{block}", LINK, add("compute", f"B{block}", BACKWARD, 0))
        # The thread begins when the program has called `step`, with the blocks that the next forward needs first.
        step = free["compute"]
        for block in range(BLOCKS):
            arrived[block] = add("in", f"p{block}", LINK, add("host", f"S{block}", HOST, max(step, out[block])))
    return bars


def draw_lanes(path: Path) -> None:
    """One step and the beginning of the next one."""
    bars = bars_of_steps(3)
    begin = next(start for lane, what, start, _ in bars[1 + 4 * BLOCKS :] if (lane, what) == ("compute", "F0"))
    end = begin + 1.75 * BLOCKS * (FORWARD + BACKWARD)
    figure = Figure(figsize=(9.5, 2.4), layout="constrained")
    axes = figure.add_subplot()
    for lane, what, start, stop in bars:
        if stop <= begin or start >= end:
            continue
        place = len(LANES) - 1 - LANES.index(lane)
        colour = BLUE if what[0] in "FS" else "#c55a11" if what[0] in "Bg" else "#5f7f5f"
        axes.barh(place, stop - start, left=start, height=0.7, color=colour, edgecolor="white", linewidth=0.8)
        axes.text((start + stop) / 2, place, what, ha="center", va="center", fontsize=6, color="white", clip_on=True)
    axes.set_xlim(begin, end)
    axes.set_yticks(range(len(LANES)), [*reversed(LANES)])
    axes.set_xticks([])
    axes.set_xlabel("time; F forward, B backward, g gradient out, S step on the host, p parameters in")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.savefig(path)
