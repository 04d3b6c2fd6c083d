"""The picture of the front page: measured times next to those of PyTorch's own tools."""

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

BENCHMARKS = Path(__file__).parent / "benchmarks"
OURS = "#1f5fa8"


def draw_against(path: Path) -> None:
    """Draw a bar for each comparison with 2 ranks: our time as a share of the other tool's time."""
    shares = measured()
    figure = Figure(figsize=(4.3, 2.7), layout="constrained")  # 390 pixels wide at 90 dots an inch: a phone's width
    axes = figure.add_subplot()
    bars = axes.barh(list(shares), list(shares.values()), color=OURS)
    inside = [f"{share:.2f}x" if share > 0.3 else "" for share in shares.values()]
    beside = ["" if share > 0.3 else f"{share:.2f}x" for share in shares.values()]
    axes.bar_label(bars, inside, padding=-32, fontsize=9, color="white")
    axes.bar_label(bars, beside, padding=3, fontsize=9)
    axes.axvline(1, color="#444444", lw=1)
    axes.set_xlim(0, 1.05)
    figure.supxlabel("par's time / the other tool's time (lower is better)", fontsize=9)
    axes.tick_params(labelsize=9)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def measured() -> dict[str, float]:
    """Return the ratios of the benchmarks' last runs, by the label of their bar."""
    zero = {row["contender"]: row["ratio"] for row in of("zero", ranks=2, model="mid-size")}
    pipeline = {row["contender"]: row["x torch's same"] for row in of("pipeline", ranks=2, model="mid-size")}
    layers = {row["contender"]: row["ours / it"] for row in of("layers")}
    saves = {row["what"]: row["ours is faster"] for row in of("checkpoint", case="2 ranks, rows")}
    return {
        "1D layers, DTensor": layers["parallelize_module"],
        "ZeRO 3 step, FSDP2": float(zero["stage 3"].split()[0]),
        "ZeRO 1 step,\nZeroRedundancyOptimizer": float(zero["stage 1"].split()[0]),
        "ZeRO 0 step, DDP": float(zero["stage 0"].split()[0]),
        "1F1B step,\ntorch pipelining": float(pipeline["par-pipeline 1F1B"]),
        "Save to disk, DCP": 1 / float(saves["save: DCP"]),
    }


def of(name: str, **which: Any) -> list[dict[str, Any]]:
    """Return the rows of a benchmark's first table whose columns have these values."""
    page = json.loads((BENCHMARKS / f"{name}.json").read_text())
    rows = page["rows"] if "rows" in page else page["sections"][0]["rows"]
    return [row for row in rows if all(row[column] == value for column, value in which.items())]
