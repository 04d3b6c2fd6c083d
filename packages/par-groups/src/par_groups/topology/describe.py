"""A topology as a table of text."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .topology import Topology

_SHOWN = 6


def describe(topology: "Topology") -> str:
    """Return one line for each axis: its size, the distance of neighbours, the number of groups, and the first group.

    Args:
        topology: The topology to describe.
    """
    rows: list[tuple[str, ...]] = [("axis", "size", "stride", "groups", "first group")]
    rows += [_row(topology, name) for name in topology.axes]
    rows += [_row(topology, name, f"{name} = {' x '.join(parts)}") for name, parts in topology.products.items()]
    rows += [_row(topology, names, " x ".join(names)) for names in topology.declared]
    for view, second in topology.views.items():
        rows += [_row(second, name, f"{view}: {name}") for name in second.axes]
    plural = "" if topology.world_size == 1 else "s"
    lines = [f"{topology.world_size:,} rank{plural}, the slowest axis first", *_align(rows)]
    lines += [
        f"{each.count} private communicator{'s' * (each.count > 1)} over {' x '.join(each.axes)}"
        for each in topology.channels
    ]
    for axis, (mode, options) in topology.modes.items():
        lines.append(f"{axis} mode: {mode}" + (f" {options}" if options else ""))
    return "\n".join(lines)


def _row(topology: "Topology", axes: str | tuple[str, ...], label: str | None = None) -> tuple[str, ...]:
    size, blocks = topology.size(axes), topology.blocks(axes)
    stride = str(blocks[0].stride) if len(blocks) == 1 else "-"
    ranks = topology.group(axes, 0)
    return label or str(axes), f"{size:,}", stride, f"{topology.world_size // size:,}", _ranks(ranks)


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) <= _SHOWN + 2:
        return " ".join(map(str, ranks))
    return " ".join(map(str, ranks[:_SHOWN])) + f" .. {ranks[-1]}"


def _align(rows: Sequence[tuple[str, ...]]) -> Iterable[str]:
    """Yield lines with columns of equal width: names and groups to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(width) if column in {0, len(widths) - 1} else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
