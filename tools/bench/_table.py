"""Benchmark results as JSON and as a page of the docs."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

FOLDER = Path(__file__).parent.parent.parent / "docs" / "benchmarks"

Rows = Sequence[Mapping[str, object]]


@dataclass(frozen=True, kw_only=True)
class Section:
    """One of several tables of a page.

    Args:
        title: Its heading.
        note: How it was measured.
        rows: One mapping a row, equal keys in equal order.
    """

    title: str
    note: str
    rows: Rows


def write(name: str, title: str, rows: Rows, note: str) -> None:
    """Writes docs/benchmarks/<name>.json and .md, and prints the table.

    Args:
        name: File name without ending.
        title: Heading of the page.
        rows: One mapping a row, equal keys in equal order.
        note: How it was measured.
    """
    write_page(name, title, [note, "", *table(rows)], {"note": note, "rows": rows})


def write_sections(name: str, title: str, sections: Sequence[Section]) -> None:
    """Writes docs/benchmarks/<name>.json and .md with several tables, and prints them.

    Args:
        name: File name without ending.
        title: Heading of the page.
        sections: The tables, in the order of the page.
    """
    lines: list[str] = []
    for section in sections:
        lines += [f"## {section.title}", "", section.note, "", *table(section.rows), ""]
    found = [{"title": section.title, "note": section.note, "rows": section.rows} for section in sections]
    write_page(name, title, lines[:-1], {"sections": found})


def write_page(name: str, title: str, lines: Sequence[str], results: Mapping[str, object]) -> None:
    """Writes both files of a page, says which machine it was, and prints the page's lines.

    Args:
        name: File name without ending.
        title: Heading of the page.
        lines: What stands below the heading, in Markdown.
        results: The same for the JSON file.
    """
    machine = f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores"
    if torch.cuda.is_available():
        machine += f", {torch.cuda.get_device_name()}"
    end = f"Measured with {machine}. `nox -s bench -- {name}` reruns the benchmark."
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.md").write_text("\n".join([f"# {title}", "", *lines, "", end, ""]))
    (FOLDER / f"{name}.json").write_text(json.dumps({"machine": machine, **results}, indent=1) + "\n")
    print("\n".join([title, *lines]))


def table(rows: Rows) -> list[str]:
    """Rows as a table in Markdown."""
    header = list(rows[0])
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return lines + ["| " + " | ".join(str(row[key]) for key in header) + " |" for row in rows]
