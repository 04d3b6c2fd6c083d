"""What the matrix finds, as lines of JSON; `tools/matrix.py` makes a page of them."""

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist


def note(path: str | None, **row: Any) -> None:
    """Adds a line on rank 0, if there is a file to add it to; numbers keep two digits.

    Args:
        path: Of the file; None: nothing is kept.
        row: What to say.
    """
    if path is None or dist.get_rank():
        return
    short = {key: float(f"{value:.1e}") if isinstance(value, float) else value for key, value in row.items()}
    with Path(path).open("a") as file:
        file.write(json.dumps(short) + "\n")
