"""The simulator: how long a schedule takes, where its ranks wait, and what they keep."""

from collections.abc import Iterator

from ..schedules.schedule import Schedule
from ..schedules.walk import Event, StageCosts, walk
from .costs import Costs
from .timeline import Timeline


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Simulate a valid schedule: each rank runs its actions in order, each action as early as possible.

    The result stores no actions, so that ten million actions need little memory; pictures and traces simulate again.

    Args:
        schedule: A schedule that `Schedule.validate` accepts.
        costs: Duration of each action. Default: one unit each for forward, input gradient and weight gradient, and 0
            for communication.

    Raises:
        ValueError: The ranks deadlock, or the costs are for another number of stages.
    """
    by_stage = (costs or Costs()).by_stage(schedule.stages)
    tracks = walk(schedule.ranks, schedule.placement, schedule.microbatches, by_stage)
    return Timeline(_Rerun(schedule, by_stage), tracks)


class _Rerun:
    """The events of a simulated step, made anew at each iteration."""

    def __init__(self, schedule: Schedule, costs: StageCosts) -> None:
        self._schedule, self._costs = schedule, costs

    def __iter__(self) -> Iterator[Event]:
        schedule, events = self._schedule, list[Event]()
        walk(schedule.ranks, schedule.placement, schedule.microbatches, self._costs, events.append)
        return iter(events)
