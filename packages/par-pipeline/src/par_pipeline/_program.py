"""From what a rank computes to what it sends and receives. Pure arithmetic."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from .schedules.actions import FORWARD, WEIGHT_GRAD, Action
from .schedules.schedule import Schedule


class Message(NamedTuple):
    """What one stage gives to the next one, or gives back.

    Args:
        gradient: Whether it is the gradient of a stage's outputs, or else a stage's inputs.
        stage: The one that takes it.
        microbatch: From 0.
    """

    gradient: bool
    stage: int
    microbatch: int


STATUS = Message(gradient=False, stage=-1, microbatch=-1)
"""What a rank sends to its neighbours when it is done with a step."""


class Instruction(NamedTuple):
    """One action of this rank.

    Args:
        action: What is computed.
        takes: What it needs from a neighbouring stage.
        source: The rank of that stage; it may be this one.
        gives: What a neighbouring stage needs from it.
        target: The rank of that stage.
    """

    action: Action
    takes: Message | None
    source: int
    gives: Message | None
    target: int


class Arrival(NamedTuple):
    """A message that another rank sends.

    Args:
        message: Which.
        position: The place, in that rank's actions, of the one that sends it.
    """

    message: Message
    position: int


@dataclass(frozen=True, kw_only=True)
class Program:
    """What one rank does in a step.

    Args:
        instructions: In order.
        arrivals: By rank, what it sends to this one, in its order; its status is the last.
        departures: By rank, what it is sent, in this one's order; the status is the last.
        consumed: By message that this rank sends: the place, in the receiver's actions, of the one that takes it.
            Whatever the receiver sends from there on says that the message has arrived.
        final: By stage, the place of the action after which its gradients are complete, if its backward is split, and
            if it is not.
        forwards: How many there are.
    """

    instructions: tuple[Instruction, ...]
    arrivals: dict[int, tuple[Arrival, ...]]
    departures: dict[int, tuple[Message, ...]]
    consumed: dict[Message, int]
    final: dict[int, tuple[int, int]]
    forwards: int


def compile_program(schedule: Schedule, rank: int, *, forward_only: bool = False) -> Program:
    """The program of a rank.

    Args:
        schedule: A valid one.
        rank: Within the pipeline.
        forward_only: Leaves the backward out.
    """
    instructions = tuple(_instructions(schedule, rank, forward_only))
    peers = {each for one in instructions for each in (one.source, one.target)} - {rank}
    arrivals: dict[int, tuple[Arrival, ...]] = {}
    departures: dict[int, tuple[Message, ...]] = {}
    consumed: dict[Message, int] = {}
    for peer in sorted(peers):
        given = [each.gives for each in instructions if each.gives is not None and each.target == peer]
        departures[peer] = (*given, STATUS)
        coming = []
        for position, theirs in enumerate(_instructions(schedule, peer, forward_only)):
            if theirs.gives is not None and theirs.target == rank:
                coming.append(Arrival(theirs.gives, position))
            if theirs.takes is not None and theirs.source == rank:
                consumed[theirs.takes] = position
        arrivals[peer] = (*coming, Arrival(STATUS, -1))
    return Program(
        instructions=instructions,
        arrivals=arrivals,
        departures=departures,
        consumed=consumed,
        final=_final(instructions),
        forwards=sum(each.action.op == FORWARD for each in instructions),
    )


def _instructions(schedule: Schedule, rank: int, forward_only: bool) -> Iterable[Instruction]:
    last = schedule.stages - 1
    for action in schedule.ranks[rank]:
        op, stage, microbatch = action
        if forward_only and op != FORWARD:
            continue
        before = after = None  # the neighbouring stages
        if op == FORWARD:
            before = stage - 1 if stage > 0 else None
            after = stage + 1 if stage < last else None
        elif op != WEIGHT_GRAD:
            before = stage + 1 if stage < last else None
            after = stage - 1 if stage > 0 else None
        gradient = op != FORWARD
        yield Instruction(
            action=action,
            takes=None if before is None else Message(gradient, stage, microbatch),
            source=rank if before is None else schedule.rank_of(before),
            gives=None if after is None else Message(gradient, after, microbatch),
            target=rank if after is None else schedule.rank_of(after),
        )


def _final(instructions: Iterable[Instruction]) -> dict[int, tuple[int, int]]:
    final: dict[int, tuple[int, int]] = {}
    for position, instruction in enumerate(instructions):
        op, stage, _ = instruction.action
        if op != FORWARD:
            _, whole = final.get(stage, (-1, -1))
            final[stage] = (position, whole if op == WEIGHT_GRAD else position)
    return final
