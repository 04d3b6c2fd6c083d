"""Benchmark results as JSON and as a page of the docs."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

FOLDER = Path(__file__).parent.parent.parent / "docs" / "benchmarks"


def write(name: str, title: str, rows: Sequence[Mapping[str, object]], note: str) -> None:
    """Writes docs/benchmarks/<name>.json and .md, and prints the table.

    Args:
        name: File name without ending.
        title: Heading of the page.
        rows: One mapping a row, equal keys in equal order.
        note: How it was measured.
    """
    machine = f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores"
    if torch.cuda.is_available():
        machine += f", {torch.cuda.get_device_name()}"
    header = list(rows[0])
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(row[key]) for key in header) + " |" for row in rows]
    FOLDER.mkdir(exist_ok=True)
    page = [
        f"# {title}",
        "",
        note,
        "",
        *lines,
        "",
        f"Measured with {machine}. `nox -s bench -- {name}` measures anew.",
        "",
    ]
    (FOLDER / f"{name}.md").write_text("\n".join(page))
    (FOLDER / f"{name}.json").write_text(json.dumps({"machine": machine, "note": note, "rows": rows}, indent=1) + "\n")
    print("\n".join([title, *lines]))
