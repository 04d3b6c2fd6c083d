"""Draws each package's rooms, from its imports, into docs/images/. `docs/figures.py` calls it."""

from collections.abc import Mapping
from pathlib import Path

import grimp
import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PACKAGES = (
    "par_groups",
    "par_layers",
    "par_pipeline",
    "par_precision",
    "par_recompute",
    "par_checkpoint",
    "par_data",
    "par_diagnosis",
    "par_zero",
    "par_plan",
    "par_train",
)

BLUE, PALE, GREY = "#1f5fa8", "#dce9f7", "#f4f4f4"
LINE = 0.21
"""Height of a line of text, in inches."""

Parts = dict[str, list[str]]
"""The parts of a package and the modules in each: a room has several, a module at the top level is a part by itself."""


def draw_rooms(images: Path) -> None:
    """A picture a package: `rooms-par-groups.svg` and so on."""
    for package in PACKAGES:
        parts, imports = structure(package)
        draw_package(parts, imports, images / f"rooms-{package.replace('_', '-')}.svg")


def structure(package: str) -> tuple[Parts, set[tuple[str, str]]]:
    """The parts of a package, and which part imports which, read from its source.

    The package's own `__init__` is left out: it lists what is public, and so imports everything.
    """
    graph = grimp.build_graph(package, cache_dir=None, exclude_type_checking_imports=True)
    parts: Parts = {}
    for name in sorted(graph.modules):
        inner = name.split(".")[1:]
        if inner and not inner[-1].startswith("__"):
            parts.setdefault(inner[0], []).extend(inner[1:])
    imports = {
        (importer.split(".")[1], imported.split(".")[1])
        for importer in graph.modules
        for imported in graph.find_modules_directly_imported_by(importer)
        if "." in importer and "." in imported
    }
    return parts, {(a, b) for a, b in imports if a != b and a in parts and b in parts}


def levels(parts: Mapping[str, object], imports: set[tuple[str, str]]) -> list[list[str]]:
    """Parts from above to below: each stands below everything that imports it.

    Raises:
        ValueError: Parts that import each other in a circle.
    """
    rows: list[list[str]] = []
    left = dict.fromkeys(parts)
    while left:
        row = [part for part in left if not any(b == part and a in left for a, b in imports)]
        if not row:
            raise ValueError(f"{', '.join(left)} import each other in a circle: no order can be drawn")
        rows.append(row)
        for part in row:
            del left[part]
    return rows


def draw_package(parts: Parts, imports: set[tuple[str, str]], path: Path) -> None:
    """Boxes in rows; an arrow leads from a part to what it imports, unless a longer way leads there, too."""
    rows = levels(parts, imports)
    heights = [max(box_height(parts[part]) for part in row) for row in rows]
    widths = [[box_width(part, parts[part]) for part in row] for row in rows]
    gap = 0.3
    width = max(sum(row) + gap * (len(row) - 1) for row in widths) + 0.4
    height = sum(heights) + 0.55 * (len(rows) - 1) + 0.4
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.set_axis_off()
    boxes: dict[str, tuple[float, float, float, float]] = {}
    top = height - 0.2
    for row, row_widths, row_height in zip(rows, widths, heights, strict=True):
        left = (width - sum(row_widths) - gap * (len(row) - 1)) / 2
        for part, part_width in zip(row, row_widths, strict=True):
            part_height = box_height(parts[part])
            boxes[part] = (left, top - (row_height + part_height) / 2, part_width, part_height)
            left += part_width + gap
        top -= row_height + 0.55
    for importer, imported in sorted(imports):
        if not reaches(importer, imported, imports - {(importer, imported)}):
            x, y, w, _ = boxes[importer]
            u, v, t, h = boxes[imported]
            axes.annotate(
                "",
                xy=(u + t / 2, v + h),
                xytext=(x + w / 2, y),
                arrowprops={"arrowstyle": "->", "color": "#777777", "shrinkA": 0, "shrinkB": 0},
                zorder=0,
            )
    for part, box in boxes.items():
        draw_part(axes, box, part, parts[part])
    figure.savefig(path)


def box_width(part: str, modules: list[str]) -> float:
    """Inches that a part's name, and its modules in two columns, take."""
    columns = modules[: (len(modules) + 1) // 2], modules[(len(modules) + 1) // 2 :]
    inner = sum(0.079 * max(map(len, column)) + 0.15 for column in columns if column)
    return max(0.095 * len(part) + 0.3, inner + 0.15)


def box_height(modules: list[str]) -> float:
    """Inches that a part's name, and its modules in two columns, take from top to bottom."""
    return (1 + (len(modules) + 1) // 2) * LINE + 0.25


def draw_part(axes: Axes, box: tuple[float, float, float, float], part: str, modules: list[str]) -> None:
    """A room with its modules, or a module of the top level."""
    x, y, w, h = box
    style = "round,pad=0,rounding_size=0.08"
    face = PALE if modules else GREY
    axes.add_patch(mpl.patches.FancyBboxPatch((x, y), w, h, boxstyle=style, facecolor=face, edgecolor=BLUE))
    name = f"{part}/" if modules else part
    if not modules:
        axes.text(x + w / 2, y + h / 2, name, ha="center", va="center", fontsize=9, family="monospace")
        return
    axes.text(x + 0.1, y + h - 0.2, name, va="center", weight="bold", fontsize=10, family="monospace")
    half = (len(modules) + 1) // 2
    left = x + 0.1
    for column in (modules[:half], modules[half:]):
        for line, module in enumerate(column):
            axes.text(left, y + h - 0.2 - (line + 1) * LINE, module, va="center", fontsize=8, family="monospace")
        left += 0.079 * max(map(len, column), default=0) + 0.15


def reaches(start: str, goal: str, imports: set[tuple[str, str]]) -> bool:
    """Whether a way of imports leads from one part to another."""
    seen, left = {start}, [start]
    while left:
        here = left.pop()
        for importer, imported in imports:
            if importer == here and imported not in seen:
                if imported == goal:
                    return True
                seen.add(imported)
                left.append(imported)
    return False
