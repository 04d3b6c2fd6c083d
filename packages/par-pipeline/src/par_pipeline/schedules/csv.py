"""Schedules as CSV, in torch's compute-only form: a line a rank, a cell an action."""

import csv
import re
from pathlib import Path

from .actions import Action
from .schedule import Schedule

_OVERLAPPED = re.compile(r"\((.+)\)OVERLAP_F_B")


def write_csv(schedule: Schedule, path: str | Path) -> None:
    """See `Schedule.to_csv`."""
    with Path(path).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(map(str, actions) for actions in schedule.ranks)


def read_csv(path: str | Path) -> Schedule:
    """See `Schedule.from_csv`."""
    ranks: list[list[Action]] = []
    with Path(path).open(newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        for row in filter(None, reader):
            where = f"{path}, line {reader.line_num}"
            ranks.append([action for column, cell in enumerate(row, 1) for action in _parse(cell, where, column)])
    schedule = Schedule(ranks)
    schedule.validate()
    return schedule


def _parse(cell: str, where: str, column: int) -> list[Action]:
    """The actions of a cell: one, none where torch lets the rank wait, two where it runs them as one."""
    text = cell.strip()
    overlapped = _OVERLAPPED.fullmatch(text)
    texts = overlapped[1].split(";") if overlapped else [text] if text else []
    try:
        return [Action.parse(each.strip()) for each in texts]
    except ValueError as error:
        raise ValueError(f"{where}, column {column}: cell {cell!r}: {error}") from error
