"""A timeline as a picture: a row a rank, a box an action, grey where a rank waits."""

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .timeline import Event, Timeline

# Okabe and Ito's colours, which differ for every kind of colour vision.
_COLOURS = {"F": "#0072B2", "B": "#009E73", "I": "#E69F00", "W": "#CC79A7"}
_NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_IDLE = "#EDEDED"
_LIGHTEST = 0.6  # how much white the rank's last stage is mixed with
_ROW, _BOX = 0.34, 0.185  # inches: height of a row, width of a rather short action
_NARROWEST, _WIDEST = 7.0, 60.0  # inches: the picture
_LEGIBLE = 0.1  # inches: the narrowest box with a number

_Chunk = tuple[int, int]  # which of a rank's stages, of how many


def draw(timeline: "Timeline", path: str | Path, title: str) -> None:
    """See `Timeline.draw`."""
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'par-pipeline[draw]'") from error

    events = list(timeline.events)
    short = sorted(end - start for _, _, start, end in events)[len(events) // 4] or timeline.makespan or 1.0
    width = min(max(_BOX * timeline.makespan / short, _NARROWEST), _WIDEST)
    figure = Figure(figsize=(width + 1.6, _ROW * timeline.ranks + 1.1), layout="constrained")
    axes = figure.add_subplot()
    for rank in range(timeline.ranks):
        axes.broken_barh([(0, timeline.makespan)], (rank - 0.46, 0.92), facecolor=_IDLE)
    chunks = _chunks(events)
    _draw_boxes(axes, timeline, events, chunks)
    _draw_numbers(axes, timeline, events, chunks, inches=width / (timeline.makespan or 1.0))
    _label(axes, timeline, events, title)
    figure.savefig(path, dpi=120)


def _chunks(events: list["Event"]) -> dict[int, _Chunk]:
    """For each stage, which of its rank's stages it is."""
    stages: dict[int, set[int]] = defaultdict(set)
    for event in events:
        stages[event.rank].add(event.action.stage)
    return {stage: (index, len(held)) for held in stages.values() for index, stage in enumerate(sorted(held))}


def _draw_boxes(axes: Any, timeline: "Timeline", events: list["Event"], chunks: dict[int, _Chunk]) -> None:
    """All boxes of one row and colour in one call."""
    boxes: dict[tuple[int, str, _Chunk], list[tuple[float, float]]] = defaultdict(list)
    for rank, (op, stage, _), start, end in events:
        boxes[rank, op, chunks[stage]].append((start - timeline.start, end - start))
    for (rank, op, chunk), spans in boxes.items():
        axes.broken_barh(spans, (rank - 0.46, 0.92), facecolor=_shade(op, chunk), edgecolor="white", linewidth=0.5)


def _draw_numbers(
    axes: Any, timeline: "Timeline", events: list["Event"], chunks: dict[int, _Chunk], inches: float
) -> None:
    """The microbatch in each box that is wide enough."""
    digits = len(str(max(event.action.microbatch for event in events)))
    for rank, (op, stage, microbatch), start, end in events:
        box = (end - start) * inches
        if box < _LEGIBLE:
            continue
        red, green, blue = _shade(op, chunks[stage])
        dark = 0.299 * red + 0.587 * green + 0.114 * blue < 0.5
        middle = (start + end) / 2 - timeline.start
        size = min(8.0, 72 * box / (0.75 * digits + 0.3))
        style = {"ha": "center", "va": "center_baseline", "fontsize": size, "color": "white" if dark else "black"}
        axes.text(middle, rank, str(microbatch), **style, clip_on=True)


def _label(axes: Any, timeline: "Timeline", events: list["Event"], title: str) -> None:
    from matplotlib.patches import Patch  # noqa: PLC0415 - an extra

    ranks = range(timeline.ranks)
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.tick_params(axis="y", length=0)
    right = axes.secondary_yaxis("right")
    right.set_yticks(ranks, [f"peak {timeline.peak(rank)}" for rank in ranks])
    right.tick_params(axis="y", length=0)
    for each in (axes, right):
        each.spines[:].set_visible(False)
    axes.set_xlim(0, timeline.makespan or 1.0)
    axes.set_ylim(timeline.ranks - 0.5, -0.5)
    axes.set_xlabel("time")
    peak = max(timeline.peak(rank) for rank in ranks)
    figures = f"makespan {timeline.makespan:.4g}, bubble {timeline.bubble:.1%}, peak {peak} activations"
    axes.set_title(f"{title}: {figures}" if title else figures, fontsize=11)
    present = {event.action.op for event in events}
    handles = [Patch(facecolor=_COLOURS[op], label=name) for op, name in _NAMES.items() if op in present]
    if len(_chunks(events)) > timeline.ranks:
        handles.append(Patch(facecolor=_shade("F", (1, 2)), label="lighter: later stages of the rank"))
    handles.append(Patch(facecolor=_IDLE, label="waiting"))
    axes.figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)


def _shade(op: str, chunk: _Chunk) -> tuple[float, float, float]:
    """The operation's colour, the lighter the later the stage is on its rank."""
    index, count = chunk
    white = _LIGHTEST * index / (count - 1) if count > 1 else 0.0
    code = _COLOURS[op]
    red, green, blue = (int(code[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return tuple(value + (1 - value) * white for value in (red, green, blue))  # type: ignore[return-value]  # three
