"""The drawing of a step's program as SVG: a chart of bytes, and below it lanes of computation and communication."""

from collections.abc import Iterator, Sequence
from html import escape
from itertools import accumulate
from typing import NamedTuple

from par_groups import format_bytes

from ..layout.meter import BUFFERS, GRADIENTS, UNITS
from .ledger import ProgramEntry, ZeroProgram

_STEP, _LEFT, _TOP, _CHART, _LANE = 11, 90, 34, 130, 26  # pixels
_COLORS = {
    UNITS: "#7aa6c2",
    GRADIENTS: "#e0a458",
    BUFFERS: "#b5a7c9",
    "F": "#5b9f77",
    "R": "#a9cfb4",
    "B": "#4a7fb0",
    "S": "#c46a5a",
    "gather": "#7aa6c2",
    "scatter": "#e0a458",
    "reduce": "#e0a458",
    "fetch": "#999999",
}
_LANES = {"F": "compute", "R": "compute", "B": "compute", "S": "compute"} | {
    "gather": "all-gather",
    "scatter": "reduce",
    "reduce": "reduce",
    "fetch": "tiers",
}
# The entries that end a bar. A gather lasts until its unit runs, and not until it completes: no entry reports that.
_ENDS = {
    **dict.fromkeys(("F", "R", "B"), frozenset(("F", "R", "B", "S", "E"))),
    "S": frozenset("E"),
    "gather": frozenset(("F", "R", "B")),
    **dict.fromkeys(("scatter", "reduce"), frozenset(("sum",))),
    "fetch": frozenset(("evict",)),
}


class ProgramBar(NamedTuple):
    """A bar in a lane, from entry number `start` to entry number `stop`."""

    lane: str
    entry: ProgramEntry
    start: int
    stop: int


def bars_of(entries: Sequence[ProgramEntry]) -> Iterator[ProgramBar]:
    """Yield the bars of a program.

    The bar of an event ends at the next event. The bar of a collective ends at the first entry that waits for it.

    Args:
        entries: Entries of the program.
    """
    for start, entry in enumerate(entries):
        if entry.op not in _LANES:
            continue
        any_unit = _LANES[entry.op] == "compute"
        ends = (
            stop
            for stop in range(start + 1, len(entries))
            if entries[stop].op in _ENDS[entry.op] and (any_unit or entries[stop].of == entry.of)
        )
        yield ProgramBar(_LANES[entry.op], entry, start, next(ends, len(entries)))


def draw_program(program: ZeroProgram) -> str:
    """Return an SVG of a program: one column per entry with the bytes after it, and bars in lanes below.

    Args:
        program: Program of a step.
    """
    entries = program.entries
    held = [held for _, held in program.walk()]
    # A program without bytes would divide by 0.
    most = max((sum(each.values()) for each in held), default=0) or 1
    bars = list(bars_of(entries))
    lanes = list(
        dict.fromkeys(sorted((bar.lane for bar in bars), key=("compute", "all-gather", "reduce", "tiers").index))
    )
    width, height = _LEFT + _STEP * len(entries) + 10, _TOP + _CHART + 14 + _LANE * len(lanes)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="10"',
        ' font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="4" y="{_TOP + 8}">{format_bytes(most)}</text><text x="4" y="{_TOP + _CHART}">0</text>',
    ]
    for place, kind in enumerate((UNITS, GRADIENTS, BUFFERS)):
        parts.append(f'<rect x="{_LEFT + 90 * place}" y="8" width="10" height="10" fill="{_COLORS[kind]}"/>')
        parts.append(f'<text x="{_LEFT + 90 * place + 14}" y="17">{kind}</text>')
    for number, each in enumerate(held):
        tops = accumulate(each[kind] for kind in (UNITS, GRADIENTS, BUFFERS))
        for kind, top in zip((UNITS, GRADIENTS, BUFFERS), tops, strict=True):
            x, y = _LEFT + _STEP * number, _TOP + _CHART * (1 - top / most)
            title = f"{entries[number]}: {kind} {format_bytes(each[kind])}"
            parts.append(_rect(x, y, _STEP, _CHART * each[kind] / most, _COLORS[kind], title))
    for bar in bars:
        x, y = _LEFT + _STEP * bar.start, _TOP + _CHART + 14 + _LANE * lanes.index(bar.lane)
        length = max(1, bar.stop - bar.start) * _STEP
        parts.append(_rect(x, y + 2, length - 1, _LANE - 6, _COLORS[bar.entry.op], str(bar.entry)))
        label = f"{bar.entry.op} {bar.entry.of}" if bar.lane == "compute" else bar.entry.of
        # SVG does not clip text: a label wider than its bar would cover the next bar. A character has about 5.6 pixels.
        if len(label) * 5.6 < length:
            parts.append(f'<text x="{x + 3}" y="{y + 15}">{escape(label)}</text>')
    parts += [f'<text x="4" y="{_TOP + _CHART + 29 + _LANE * place}">{lane}</text>' for place, lane in enumerate(lanes)]
    return "\n".join([*parts, "</svg>"])


def _rect(x: float, y: float, width: float, height: float, color: str, title: str) -> str:
    size = f'x="{x:.0f}" y="{y:.1f}" width="{width:.0f}" height="{height:.1f}"'
    return (
        f'<rect {size} fill="{color}" stroke="#ffffff" stroke-width="0.5"><title>{escape(title)}</title></rect>'
        if height
        else ""
    )
