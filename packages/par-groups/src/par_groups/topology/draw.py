"""A topology as a picture: the ranks on a grid, once for every axis, coloured by the group they belong to."""

import itertools
import math
import operator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .topology import Topology

_MAX_CELLS = 64
_PANELS_PER_ROW = 3


def draw(topology: "Topology", path: str | Path) -> None:
    """Draw one panel for every axis, product and axis of a view larger than one rank.

    Ranks of one colour in a panel form one group there. A picture shows at most 64 ranks: for a larger world, it
    truncates the largest axes and mentions this in the title.

    Args:
        topology: Topology to draw.
        path: File to write; its suffix selects the format (.png, .svg or .pdf).

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install matplotlib") from error

    panels = _panels(topology)
    columns = min(_PANELS_PER_ROW, len(panels))
    rows = math.ceil(len(panels) / columns)
    grid = _PanelGrid(topology)
    figure = Figure(figsize=grid.figure_size(columns, rows), layout="constrained")
    all_axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axes, (label, names) in zip(all_axes, panels, strict=False):
        _draw_panel(axes, grid, label, names)
    for axes in all_axes[len(panels) :]:
        axes.set_axis_off()
    figure.suptitle(grid.title)
    figure.savefig(path, dpi=120)


class _PanelGrid:
    """Grid of the drawn ranks: the fast half of the axes runs across, the slow half runs down."""

    def __init__(self, topology: "Topology") -> None:
        self.topology = topology
        shown = _shown_sizes(topology)
        self.ranks = [
            topology.rank(**dict(zip(shown, coords, strict=True)))
            for coords in itertools.product(*(range(size) for size in shown.values()))
        ]
        self.across = _across(shown)
        self.down = math.ceil(len(self.ranks) / self.across)
        cut = [f"{name} {shown[name]} of {size:,}" for name, size in topology.axes.items() if shown[name] < size]
        self.title = f"{topology.world_size:,} rank{'s' * (topology.world_size > 1)}" + (
            f" (drawn: {', '.join(cut)})" if cut else ""
        )

    def cell(self, position: int) -> tuple[int, int]:
        return position % self.across, position // self.across

    def figure_size(self, columns: int, rows: int) -> tuple[float, float]:
        width, height = max(0.42 * self.across, 2.6), max(0.42 * self.down, 0.8)
        return columns * (width + 0.3), rows * (height + 0.6) + 0.5


def _panels(topology: "Topology") -> list[tuple[str, str | tuple[str, ...]]]:
    single: list[tuple[str, str | tuple[str, ...]]] = [(name, name) for name in (*topology.axes, *topology.products)]
    declared: list[tuple[str, str | tuple[str, ...]]] = [(" x ".join(names), names) for names in topology.declared]
    of_views: list[tuple[str, str | tuple[str, ...]]] = [
        (f"{view}: {name}", name)
        for view, second in topology.views.items()
        for name in second.axes
        if name not in (*topology.axes, *topology.products)
    ]
    shown = [(label, names) for label, names in single + declared + of_views if topology.size(names) > 1]
    return shown or single[:1]


def _shown_sizes(topology: "Topology") -> dict[str, int]:
    """Return the sizes that are drawn: the largest axis is halved until few enough cells remain."""
    shown = dict(topology.axes)
    while math.prod(shown.values()) > _MAX_CELLS:
        largest = max(shown, key=shown.__getitem__)
        shown[largest] = (shown[largest] + 1) // 2
    return shown


def _across(shown: dict[str, int]) -> int:
    """Return the number of cells in a row: the product of fast axes that is nearest to a square picture."""
    products = itertools.accumulate(reversed(shown.values()), operator.mul, initial=1)
    root = math.sqrt(math.prod(shown.values()))
    return min(products, key=lambda across: abs(math.log(across / root)))


def _draw_panel(axes: Any, grid: _PanelGrid, label: str, names: str | tuple[str, ...]) -> None:
    """Draw one panel: a cell for each rank with its number; ranks of one group have one colour."""
    from matplotlib import colormaps  # noqa: PLC0415 - an extra
    from matplotlib.patches import FancyBboxPatch  # noqa: PLC0415 - an extra

    topology, palette = grid.topology, colormaps["tab20"]
    firsts = {rank: topology.group(names, rank)[0] for rank in grid.ranks}
    colours = {first: palette(position % 20) for position, first in enumerate(dict.fromkeys(firsts.values()))}
    for position, rank in enumerate(grid.ranks):
        x, y = grid.cell(position)
        style = "round,pad=0,rounding_size=0.12"
        box = FancyBboxPatch((x + 0.06, y + 0.06), 0.88, 0.88, boxstyle=style, facecolor=colours[firsts[rank]], lw=0)
        axes.add_patch(box)
        axes.text(x + 0.5, y + 0.53, str(rank), ha="center", va="center", fontsize=8 if rank < 1000 else 6)
    axes.set_xlim(0, grid.across)
    axes.set_ylim(grid.down, 0)
    axes.set_aspect("equal")
    axes.set_axis_off()
    size = topology.size(names)
    axes.set_title(f"{label}: {topology.world_size // size:,} groups of {size:,}", fontsize=9)
