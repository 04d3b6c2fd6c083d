"""The picture of a run: its rewards, and the versions that its generators served."""

import json
from itertools import accumulate, pairwise
from pathlib import Path

PAUSE = 30.0  # seconds; a longer pause between two runs is drawn as this long


def draw_curve(events: Path, picture: Path) -> None:
    """Draw the rewards and the versions of a run over time.

    Args:
        events: File with the events of a run.
        picture: Path of the SVG.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - slow to import, and ranks draw nothing

    lines = [json.loads(line) for line in events.read_text().splitlines()]
    gaps = [after["time"] - before["time"] for before, after in pairwise(lines)]
    seconds = list(accumulate((min(gap, PAUSE) for gap in gaps), initial=0.0))
    figure = Figure(figsize=(7.2, 4.8), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    rewards = [(moment, line["reward"]) for moment, line in zip(seconds, lines, strict=True) if "reward" in line]
    means = [sum(reward for _, reward in rewards[max(0, n - 20) : n]) / min(20, n) for n in range(1, len(rewards) + 1)]
    above.plot(*zip(*rewards, strict=True), color="#bbccdd", linewidth=0.8, label="one step")
    above.plot([moment for moment, _ in rewards], means, color="#4c78a8", label="mean of 20 steps")
    for who in sorted({line["who"] for line in lines}, reverse=True):
        own = [(moment, line) for moment, line in zip(seconds, lines, strict=True) if line["who"] == who]
        label = "published by the trainer" if who == "trainer" else f"served by {who}"
        versions = [(moment, line["version"]) for moment, line in own if "version" in line] or [(0.0, 0)]
        (line,) = below.step(*zip(*versions, strict=True), where="post", label=label, linewidth=1.0)
        starts = [moment for moment, line in own if line.get("rank") == 0]
        below.plot(starts, [0] * len(starts), "^", color=line.get_color(), clip_on=False)
    above.set(ylabel="reward", ylim=(0, 1))
    above.legend(loc="lower right")
    below.set(xlabel="seconds (triangles: a job starts)", ylabel="version", ylim=(0, None))
    below.legend(loc="upper left")
    figure.savefig(picture, metadata={"Date": None})
