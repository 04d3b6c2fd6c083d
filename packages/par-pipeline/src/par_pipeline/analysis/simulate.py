"""The simulator: every rank starts each action as soon as it is free and its input is there."""

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from operator import add
from typing import NamedTuple

from ..schedules.actions import Action
from ..schedules.schedule import Schedule
from .costs import Costs
from .timeline import KEEPS, Event, Timeline, Track

Record = Callable[[Event], None]


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Runs a valid schedule, each rank in its order and as soon as possible.

    No action is kept, so that ten million of them fit into little memory; pictures and traces run it again.

    Args:
        schedule: One that `validate` accepts.
        costs: Default: one unit each for forward, input gradient and weight gradient, nothing for communication.

    Raises:
        ValueError: Ranks that wait for ever, or costs for another number of stages.
    """
    simulation = Simulation(schedule, costs or Costs())
    return Timeline(simulation, simulation.run())


class _Link(NamedTuple):
    """What an operation of one stage takes and needs, whatever the microbatch.

    A message is a number: stage * microbatches + microbatch into a forward, the complement of it into a backward. The
    one for microbatch k is `sign` * k away from that for microbatch 0.
    """

    seconds: float
    sign: int
    needs: int | None  # for microbatch 0; None where the input is on this stage
    gives: int | None
    delay: float  # from the end of the action to the arrival of what it gives


@dataclass(slots=True)
class _Messages:
    """What is under way between stages."""

    arrival: dict[int, float] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)  # message to the rank that waits for it
    ready: list[int] = field(default_factory=list)  # ranks that can go on


class Simulation:
    """A schedule with its costs. Iterating over it runs it, and gives the events."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self._schedule = schedule
        self._links = _links(schedule, costs)

    def __iter__(self) -> Iterator[Event]:
        events: list[Event] = []
        self.run(events.append)
        return iter(events)

    def run(self, record: Record | None = None) -> list[Track]:
        """Runs every rank until it waits for a message that is not sent yet, and goes on when it is.

        Raises:
            ValueError: Ranks that wait for ever.
        """
        messages = _Messages(ready=list(range(len(self._schedule.ranks))))
        walks = [self._walk(rank, messages, record) for rank in messages.ready]
        tracks: dict[int, Track] = {}
        while messages.ready:
            rank = messages.ready.pop()
            try:
                messages.waiting[next(walks[rank])] = rank
            except StopIteration as stop:
                tracks[rank] = stop.value
        if messages.waiting:
            raise ValueError(_describe_deadlock(self._schedule, messages.waiting))
        return [tracks[rank] for rank in range(len(walks))]

    def _walk(self, rank: int, messages: _Messages, record: Record | None) -> Generator[int, None, Track]:
        """One rank's step; yields the message that it has to wait for."""
        arrival, waiting = messages.arrival, messages.waiting
        begin = None
        clock = busy = 0.0
        kept = peak = 0
        for op, stage, microbatch in self._schedule.ranks[rank]:
            seconds, sign, needs, gives, delay = self._links[op][stage]
            if needs is not None:
                message = needs + sign * microbatch
                while message not in arrival:
                    yield message
                clock = max(clock, arrival.pop(message))
            start = clock
            begin = start if begin is None else begin
            busy += seconds
            clock += seconds
            if gives is not None:
                message = gives + sign * microbatch
                arrival[message] = clock + delay
                if message in waiting:
                    messages.ready.append(waiting.pop(message))
            kept += KEEPS[op]
            peak = max(peak, kept)
            if record is not None:
                record(Event(rank, Action(op, stage, microbatch), start, clock))
        return Track(begin or 0.0, clock, busy, peak)


def _links(schedule: Schedule, costs: Costs) -> dict[str, list[_Link]]:
    """For each operation, the link of every stage."""
    forward, input_grad, weight_grad, between = costs.by_stage(schedule.stages)
    ranks = [schedule.rank_of(stage) for stage in range(schedule.stages)]
    delays = [0.0 if here == there else each for here, there, each in zip(ranks, ranks[1:], between, strict=False)]
    ahead = [(stage + 1) * schedule.microbatches for stage in range(len(delays))]  # from each stage to the next
    back = [~(stage * schedule.microbatches) for stage in range(len(delays))]  # from the next stage to each

    def backward(seconds: Iterable[float]) -> list[_Link]:
        return list(map(_Link, seconds, repeat(-1), [*back, None], [None, *back], [0.0, *delays]))

    return {
        "F": list(map(_Link, forward, repeat(1), [None, *ahead], [*ahead, None], [*delays, 0.0])),
        "B": backward(map(add, input_grad, weight_grad)),
        "I": backward(input_grad),
        "W": [_Link(seconds, 1, None, None, 0.0) for seconds in weight_grad],
    }


def _describe_deadlock(schedule: Schedule, waiting: dict[int, int]) -> str:
    """Who waits for whom, from the lowest rank on until the circle closes."""
    message_of = {rank: message for message, rank in waiting.items()}
    rank, lines, seen = min(message_of), [], set[int]()
    while rank in message_of and rank not in seen:
        seen.add(rank)
        message = message_of[rank]
        stage, microbatch = divmod(message if message >= 0 else ~message, schedule.microbatches)
        kinds, other = ("F", stage - 1) if message >= 0 else ("BI", stage + 1)
        position, action = next(
            (position, action)
            for position, action in enumerate(schedule.ranks[rank])
            if action.op in kinds and action[1:] == (stage, microbatch)
        )
        what = "forward" if kinds == "F" else "backward"
        lines.append(
            f"rank {rank} waits at position {position}, {action}, for the {what} of stage {other}, "
            f"microbatch {microbatch}, on rank {schedule.rank_of(other)}"
        )
        rank = schedule.rank_of(other)
    end = "" if rank in message_of else f"; rank {rank} never runs it"
    return f"the ranks wait for one another for ever: {'; '.join(lines)}{end}"
