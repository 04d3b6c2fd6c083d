"""A schedule is data: for every rank, what it does in order."""

import csv
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from .actions import Action, check_action
from .placement import StagePlacement
from .validate import validate

Actions = Iterable[Action]

_OVERLAPPED = re.compile(r"\((.+)\)OVERLAP_F_B")


class Schedule:
    """Actions of every rank, in order. A schedule lists only computation; sends and receives follow from it.

    Args:
        ranks: Actions of each rank: a list, or any iterable that can be iterated repeatedly. The built-in schedules
            generate their actions one at a time, because a list of 10,000,000 actions would take a gigabyte.
        placement: Stages of each rank. Default: the stages that its actions name.
        microbatches: Number of microbatches per step. Default: as many as the actions name.

    Raises:
        ValueError: There are no ranks or no actions, an entry is no action, or the placement is for another number of
            ranks.
    """

    def __init__(
        self,
        ranks: Iterable[Actions],
        *,
        placement: Iterable[Iterable[int]] | None = None,
        microbatches: int | None = None,
    ) -> None:
        self.ranks: tuple[Actions, ...] = tuple(
            # An iterator could be read only once, and a schedule is read by the validator, the simulator and the
            # runtime.
            tuple(actions) if isinstance(actions, Iterator) else actions
            for actions in ranks
        )
        if not self.ranks:
            raise ValueError("a schedule needs the actions of at least one rank")
        if placement is None or microbatches is None:
            named_stages, named_microbatches = self._named_in_actions()
            placement = named_stages if placement is None else placement
            microbatches = named_microbatches if microbatches is None else microbatches
        self.placement = StagePlacement(placement)
        self.microbatches = microbatches
        if len(self.placement.by_rank) != len(self.ranks):
            raise ValueError(
                f"placement is for {len(self.placement.by_rank)} ranks, the actions are for {len(self.ranks)}"
            )
        if self.microbatches < 1 or not any(self.placement.by_rank):
            raise ValueError("the schedule has no actions; give each rank a list of Action, forward and backward")

    def __repr__(self) -> str:
        return f"Schedule({len(self.ranks)} ranks, {self.stages} stages, {self.microbatches} microbatches)"

    @property
    def stages(self) -> int:
        """The number of stages of the whole pipeline."""
        return self.placement.stages

    def stage_of(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of the stages that a rank holds, in ascending order."""
        return self.placement.by_rank[rank]

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage.

        Raises:
            ValueError: No rank holds it.
        """
        return self.placement.rank_of(stage)

    def validate(self) -> None:
        """Check that every rank can run its actions to the end, and that they are one training step.

        Every stage runs one forward and one backward per microbatch, in that order, on one rank. The ranks, each in its
        order, never wait for one another in a circle: sends do not stop a rank, and receives are posted in the order in
        which the peer sends.

        Raises:
            ValueError: The message names the rank, the position and the action that is wrong.
        """
        validate(self.ranks, self.placement, self.microbatches)

    def to_csv(self, path: str | Path) -> None:
        """Write torch's compute-only form: a line per rank, a cell per action."""
        with Path(path).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(map(str, actions) for actions in self.ranks)

    @classmethod
    def from_csv(cls, path: str | Path) -> "Schedule":
        """Read and validate torch's compute-only form: a line per rank, a cell per action; empty cells are skipped.

        Raises:
            ValueError: A cell is no action; the message names its line and column. Or the schedule is not valid; the
                message names the rank, the position and the action.
        """
        ranks: list[list[Action]] = []
        with Path(path).open(newline="", encoding="utf-8") as file:
            reader = csv.reader(file)
            for row in filter(None, reader):
                where = f"{path}, line {reader.line_num}"
                ranks.append([action for column, cell in enumerate(row, 1) for action in _parse(cell, where, column)])
        schedule = cls(ranks)
        schedule.validate()
        return schedule

    def _named_in_actions(self) -> tuple[list[set[int]], int]:
        """Return the stages that each rank's actions name, and the number of microbatches.

        A stage that two ranks name is the first one's; `validate` then complains about the other one's actions.
        """
        placement: list[set[int]] = []
        last, taken = -1, set[int]()
        for rank, actions in enumerate(self.ranks):
            stages = set[int]()
            for position, action in enumerate(actions):
                check_action(action, rank, position)
                stages.add(action.stage)
                last = max(last, action.microbatch)
            # The first rank that names a stage gets it, so that the error message points to the other rank.
            placement.append(stages - taken)
            taken |= stages
        return placement, last + 1


def _parse(cell: str, where: str, column: int) -> list[Action]:
    """Return the actions of a cell: none if the rank idles, one, or two that torch overlaps."""
    text = cell.strip()
    overlapped = _OVERLAPPED.fullmatch(text)
    texts = overlapped[1].split(";") if overlapped else [text] if text else []
    try:
        return [Action.parse(part.strip()) for part in texts]
    except ValueError as error:
        raise ValueError(f"{where}, column {column}: cell {cell!r}: {error}") from error
