"""A walk through all actions: every rank starts each of them as soon as it is free and its input is there.

The simulator walks with costs, to learn how long a step takes. The validator walks to learn whether ranks wait for one
another for ever.
"""

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import add
from typing import NamedTuple

from .actions import BACKWARD, FORWARD, INPUT_GRAD, KEPT_ACTIVATIONS, WEIGHT_GRAD, Action
from .placement import StagePlacement


class Event(NamedTuple):
    """One action as it ran.

    Attributes:
        rank: The rank that ran it, within the pipeline.
        action: The action that ran.
        start: When it started: seconds on a clock that all ranks share, or the simulator's unit.
        end: When it ended, on the same clock.
    """

    rank: int
    action: Action
    start: float
    end: float


class Track(NamedTuple):
    """The events of one rank, summed up.

    Args:
        start: When its first action started.
        end: When its last action ended.
        busy: The time in which it ran actions.
        peak: The most activations that it kept at once, each of one stage and microbatch.
    """

    start: float
    end: float
    busy: float
    peak: int


class StageCosts(NamedTuple):
    """Durations of the actions of every stage.

    Args:
        forward: Time of a forward, by stage.
        input_grad: Time of an input gradient, by stage.
        weight_grad: Time of a weight gradient, by stage.
        communication: Time from a stage to the next one, either way, by stage; the last stage's is not used.
    """

    forward: list[float]
    input_grad: list[float]
    weight_grad: list[float]
    communication: list[float]


def walk(
    ranks: Sequence[Iterable[Action]],
    placement: StagePlacement,
    microbatches: int,
    costs: StageCosts,
    record: Callable[[Event], None] | None = None,
) -> list[Track]:
    """Run every rank until it waits for a message that is not sent yet, and resume it when the message is sent.

    Args:
        ranks: Actions of each rank, in order.
        placement: Map of stages to ranks.
        microbatches: Number of microbatches in the step.
        costs: Time of each action.
        record: Function that is called with the event of every action; the ranks' events are interleaved.

    Returns:
        The sum of every rank's events.

    Raises:
        ValueError: Ranks wait for ever; the message lists the ranks and the messages that they wait for.
    """
    links = _links(placement, microbatches, costs)
    messages = _Messages(ready=list(range(len(ranks))))
    walkers = [_walk_rank(rank, actions, links, messages, record) for rank, actions in enumerate(ranks)]
    tracks: dict[int, Track] = {}
    while messages.ready:
        # The order in which ranks run does not change any time: a rank only moves its own clock, and stops at a message
        # that has not been sent.
        rank = messages.ready.pop()
        try:
            # A rank waits for at most one message, and a message for at most one rank, so one table describes all
            # waits.
            messages.waiting[next(walkers[rank])] = rank
        except StopIteration as stop:
            tracks[rank] = stop.value
    if messages.waiting:
        raise ValueError(_describe_deadlock(ranks, placement, microbatches, messages.waiting))
    return [tracks[rank] for rank in range(len(ranks))]


class _StageLink(NamedTuple):
    """Messages and time of an operation of one stage, for all microbatches.

    A message is a number: stage * microbatches + microbatch into a forward, its complement into a backward. The number
    for microbatch k is the number for microbatch 0 plus `sign` * k.

    Args:
        seconds: Time of the operation.
        sign: 1 or -1, see above.
        needs: Message that the operation waits for, for microbatch 0; None if its input is on this stage.
        gives: Message that the operation sends, for microbatch 0; None if its output stays on this stage.
        delay: Time from the end of the operation to the arrival of its message.
    """

    seconds: float
    sign: int
    needs: int | None
    gives: int | None
    delay: float


def _links(placement: StagePlacement, microbatches: int, costs: StageCosts) -> dict[str, list[_StageLink]]:
    """Return the link of every stage for each operation."""
    ranks = [placement.rank_of(stage) for stage in range(placement.stages)]
    delays = [
        0.0 if here == there else delay
        for here, there, delay in zip(ranks, ranks[1:], costs.communication, strict=False)
    ]
    # Numbers instead of tuples: the walk runs millions of actions, and hashing an int is the cheapest lookup.
    ahead = [(stage + 1) * microbatches for stage in range(len(delays))]  # from each stage to the next
    back = [~(stage * microbatches) for stage in range(len(delays))]  # from the next stage to each

    def backward(seconds: Iterable[float]) -> list[_StageLink]:
        return list(map(_StageLink, seconds, repeat(-1), [*back, None], [None, *back], [0.0, *delays]))

    return {
        FORWARD: list(map(_StageLink, costs.forward, repeat(1), [None, *ahead], [*ahead, None], [*delays, 0.0])),
        BACKWARD: backward(map(add, costs.input_grad, costs.weight_grad)),
        INPUT_GRAD: backward(costs.input_grad),
        WEIGHT_GRAD: [_StageLink(seconds, 1, None, None, 0.0) for seconds in costs.weight_grad],
    }


@dataclass(slots=True)
class _Messages:
    """The messages in flight between stages, by number.

    Args:
        arrival: Arrival times of messages that were sent and not yet received, in seconds.
        waiting: Rank that waits for each message.
        ready: Ranks that can continue, because their message was sent.
    """

    arrival: dict[int, float] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)
    ready: list[int] = field(default_factory=list)


def _walk_rank(
    rank: int,
    actions: Iterable[Action],
    links: dict[str, list[_StageLink]],
    messages: _Messages,
    record: Callable[[Event], None] | None,
) -> Generator[int, None, Track]:
    """Walk through one rank's actions, and yield a message whenever the rank has to wait for it."""
    arrival, waiting = messages.arrival, messages.waiting
    begin = None
    clock = busy = 0.0
    kept = peak = 0
    for op, stage, microbatch in actions:
        seconds, sign, needs, gives, delay = links[op][stage]
        if needs is not None:
            message = needs + sign * microbatch
            while message not in arrival:
                yield message
            # Removing the message keeps the table as small as the number of messages in flight.
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
        kept += KEPT_ACTIVATIONS[op]
        peak = max(peak, kept)
        if record is not None:
            record(Event(rank, Action(op, stage, microbatch), start, clock))
    return Track(begin or 0.0, clock, busy, peak)


def _describe_deadlock(
    ranks: Sequence[Iterable[Action]], placement: StagePlacement, microbatches: int, waiting: dict[int, int]
) -> str:
    """Return the error text: each rank of the circle and the rank that it waits for."""
    message_of = {rank: message for message, rank in waiting.items()}
    rank, lines, seen = min(message_of), [], set[int]()
    # Following who waits for whom ends either in a circle or at a rank that has finished without sending.
    while rank in message_of and rank not in seen:
        seen.add(rank)
        message = message_of[rank]
        stage, microbatch = divmod(message if message >= 0 else ~message, microbatches)
        is_forward = message >= 0
        ops, other = (FORWARD, stage - 1) if is_forward else (BACKWARD + INPUT_GRAD, stage + 1)
        position, action = next(
            (position, action)
            for position, action in enumerate(ranks[rank])
            if action.op in ops and action[1:] == (stage, microbatch)
        )
        lines.append(
            f"rank {rank} waits at position {position}, {action}, for the {'forward' if is_forward else 'backward'} "
            f"of stage {other}, microbatch {microbatch}, on rank {placement.rank_of(other)}"
        )
        rank = placement.rank_of(other)
    end = "" if rank in message_of else f"; rank {rank} never runs it"
    return f"the ranks wait for one another for ever: {'; '.join(lines)}{end}"
