"""Shared by test modules; ranks import it too."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Point:
    x: int
    y: int


def pids_below(folder):
    """The process ids that ranks have written as file names."""
    return [int(path.name) for path in folder.iterdir()]


def is_running(pid):
    """Whether a process exists and is more than a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"
