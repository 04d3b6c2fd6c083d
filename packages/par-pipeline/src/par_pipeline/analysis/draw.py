"""The picture of a step: a row per rank, a box per action, grey where a rank waits."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..schedules.actions import BACKWARD, FORWARD, INPUT_GRAD, OPERATION_NAMES, WEIGHT_GRAD
from ..schedules.walk import Event

# Okabe and Ito's colours, which differ for every kind of colour vision.
_COLOURS = {FORWARD: "#0072B2", BACKWARD: "#009E73", INPUT_GRAD: "#E69F00", WEIGHT_GRAD: "#CC79A7"}
_IDLE = "#EDEDED"
_LIGHTEST = 0.6  # how much white the rank's last stage is mixed with
_ROW, _BOX = 0.34, 0.185  # inches: height of a row, width of a rather short action
_NARROWEST, _WIDEST = 7.0, 60.0  # inches: the picture
_LEGIBLE = 0.1  # inches: the narrowest box with a number

_Chunk = tuple[int, int]  # which of a rank's stages, of how many


def draw_step(path: str | Path, events: Sequence[Event], *, makespan: float, peaks: Sequence[int], title: str) -> None:
    """Draw the events of a step.

    Args:
        path: File to write; its suffix selects the format.
        events: Actions with their times; the first action starts at 0.
        makespan: End of the last action, in the unit of the events.
        peaks: Peak number of saved activations, for each rank.
        title: Title of the picture.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install matplotlib") from error

    length = makespan or 1.0
    short = sorted(end - start for _, _, start, end in events)[len(events) // 4] or length
    width = min(max(_BOX * makespan / short, _NARROWEST), _WIDEST)
    figure = Figure(figsize=(width + 1.6, _ROW * len(peaks) + 1.1), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlim(0, length)
    axes.set_xlabel("time")
    axes.set_title(title, fontsize=11)
    _label_rows(axes, peaks)
    for rank in range(len(peaks)):
        axes.broken_barh([(0, makespan)], (rank - 0.46, 0.92), facecolor=_IDLE)
    chunks = _chunks(events)
    _draw_boxes(axes, events, chunks)
    _draw_numbers(axes, events, chunks, inches=width / length)
    _draw_legend(axes, {event.action.op for event in events}, has_several=len(chunks) > len(peaks))
    figure.savefig(path, dpi=120)


def _chunks(events: Sequence[Event]) -> dict[int, _Chunk]:
    """Return, for each stage, its index among its rank's stages and the number of these."""
    stages_of_ranks: dict[int, set[int]] = defaultdict(set)
    for event in events:
        stages_of_ranks[event.rank].add(event.action.stage)
    chunks = {}
    for stages in stages_of_ranks.values():
        for index, stage in enumerate(sorted(stages)):
            chunks[stage] = (index, len(stages))
    return chunks


def _label_rows(axes: Any, peaks: Sequence[int]) -> None:
    """Write the ranks on the left and their peaks on the right."""
    ranks = range(len(peaks))
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    right = axes.secondary_yaxis("right")
    right.set_yticks(ranks, [f"peak {peak}" for peak in peaks])
    for side in (axes, right):
        side.tick_params(axis="y", length=0)
        side.spines[:].set_visible(False)
    axes.set_ylim(len(peaks) - 0.5, -0.5)


def _draw_boxes(axes: Any, events: Sequence[Event], chunks: dict[int, _Chunk]) -> None:
    """Draw the boxes of all actions; one call draws all boxes of a row and colour."""
    boxes: dict[tuple[int, str, _Chunk], list[tuple[float, float]]] = defaultdict(list)
    for rank, (op, stage, _), start, end in events:
        boxes[rank, op, chunks[stage]].append((start, end - start))
    for (rank, op, chunk), spans in boxes.items():
        axes.broken_barh(spans, (rank - 0.46, 0.92), facecolor=_shade(op, chunk), edgecolor="white", linewidth=0.5)


def _draw_numbers(axes: Any, events: Sequence[Event], chunks: dict[int, _Chunk], inches: float) -> None:
    """Write the microbatch into each box that is wide enough; `inches` is the width of one unit of time."""
    digits = len(str(max(event.action.microbatch for event in events)))
    for rank, (op, stage, microbatch), start, end in events:
        box = (end - start) * inches
        if box < _LEGIBLE:
            continue
        red, green, blue = _shade(op, chunks[stage])
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
        size = min(8.0, 72 * box / (0.75 * digits + 0.3))
        style = {"ha": "center", "va": "center_baseline", "fontsize": size, "color": "white" if dark else "black"}
        axes.text((start + end) / 2, rank, str(microbatch), **style, clip_on=True)


def _draw_legend(axes: Any, ops: set[str], *, has_several: bool) -> None:
    """Draw the legend of colours; `has_several` is whether a rank has more than one stage."""
    from matplotlib.patches import Patch  # noqa: PLC0415 - an extra

    handles = [Patch(facecolor=_COLOURS[op], label=name) for op, name in OPERATION_NAMES.items() if op in ops]
    if has_several:
        handles.append(Patch(facecolor=_shade(FORWARD, (1, 2)), label="lighter: later stages of the rank"))
    handles.append(Patch(facecolor=_IDLE, label="waiting"))
    axes.figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)


def _shade(op: str, chunk: _Chunk) -> tuple[float, float, float]:
    """Return the operation's colour, lighter for later stages of the rank."""
    index, count = chunk
    white = _LIGHTEST * index / (count - 1) if count > 1 else 0.0
    code = _COLOURS[op]
    red, green, blue = (int(code[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return tuple(value + (1 - value) * white for value in (red, green, blue))  # type: ignore[return-value]  # three
