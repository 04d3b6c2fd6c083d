"""A schedule is data: for every rank, what it does in order."""

from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path

from .actions import Action, check_action

Actions = Iterable[Action]


class Schedule:
    """What every rank does, in order. Only computation is listed; the sends and receives follow from it.

    Args:
        ranks: For each rank its actions. Lists, or anything that can be iterated over again: the built-in schedules
            make their actions one by one, as a list of 10,000,000 of them would take a gigabyte.
        placement: For each rank the stages it holds. Default: those that its actions name.
        microbatches: Default: as many as the actions name.

    Raises:
        ValueError: No ranks, no actions, what is no action, or a placement for another number of ranks.
    """

    def __init__(
        self,
        ranks: Iterable[Actions],
        *,
        placement: Iterable[Iterable[int]] | None = None,
        microbatches: int | None = None,
    ) -> None:
        self.ranks: tuple[Actions, ...] = tuple(tuple(each) if isinstance(each, Iterator) else each for each in ranks)
        if not self.ranks:
            raise ValueError("a schedule needs the actions of at least one rank")
        seen = self._seen() if placement is None or microbatches is None else ((), 0)
        self._placement = tuple(tuple(sorted(stages)) for stages in (seen[0] if placement is None else placement))
        if len(self._placement) != len(self.ranks):
            raise ValueError(f"placement is for {len(self._placement)} ranks, the actions are for {len(self.ranks)}")
        self.microbatches = seen[1] if microbatches is None else microbatches
        if self.microbatches < 1 or not any(self._placement):
            raise ValueError("the schedule has no actions; give each rank a list of Action, forward and backward")

    def __repr__(self) -> str:
        return f"Schedule({len(self.ranks)} ranks, {self.stages} stages, {self.microbatches} microbatches)"

    @cached_property
    def stages(self) -> int:
        """The number of stages of the whole pipeline."""
        return 1 + max(self._ranks_by_stage)

    def stage_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, ascending."""
        return self._placement[rank]

    def rank_of(self, stage: int) -> int:
        """The rank that holds a stage.

        Raises:
            ValueError: No rank holds it.
        """
        if stage not in self._ranks_by_stage:
            raise ValueError(f"no rank holds stage {stage}; there are the stages {sorted(self._ranks_by_stage)}")
        return self._ranks_by_stage[stage]

    def validate(self) -> None:
        """Checks that every rank can run its actions to the end, and that they are one training step.

        Every stage runs one forward and one backward a microbatch, in that order, on one rank. The ranks, each in its
        order, never wait for one another in a circle: sends do not stop a rank, receives are posted in the order in
        which the peer sends.

        Raises:
            ValueError: With rank, position and action of what is wrong.
        """
        from .validate import validate  # noqa: PLC0415 - it takes a Schedule

        validate(self)

    def to_csv(self, path: str | Path) -> None:
        """Writes torch's compute-only form: a line a rank, a cell an action."""
        from .csv import write_csv  # noqa: PLC0415 - it takes a Schedule

        write_csv(self, path)

    @classmethod
    def from_csv(cls, path: str | Path) -> "Schedule":
        """Reads and validates torch's compute-only form: a line a rank, a cell an action, empty cells are skipped.

        Raises:
            ValueError: With line, column and cell of what is no action, or as `validate` does.
        """
        from .csv import read_csv  # noqa: PLC0415 - it makes a Schedule

        return read_csv(path)

    @cached_property
    def _ranks_by_stage(self) -> dict[int, int]:
        return {stage: rank for rank in reversed(range(len(self.ranks))) for stage in self._placement[rank]}

    def _seen(self) -> tuple[tuple[tuple[int, ...], ...], int]:
        """Placement and number of microbatches, as the actions name them. Of two ranks a stage is the first one's."""
        placement: list[tuple[int, ...]] = []
        last, taken = -1, set[int]()
        for rank, actions in enumerate(self.ranks):
            stages = set[int]()
            for position, action in enumerate(actions):
                check_action(action, rank, position)
                stages.add(action.stage)
                last = max(last, action.microbatch)
            placement.append(tuple(stages - taken))
            taken |= stages
        return tuple(placement), last + 1
