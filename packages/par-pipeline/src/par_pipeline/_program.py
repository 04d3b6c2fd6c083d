"""From what a rank computes to what it sends and receives. Pure arithmetic, which wire and runtime share."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .schedules.actions import FORWARD, WEIGHT_GRAD, Action
from .schedules.schedule import Schedule


class Message(NamedTuple):
    """What one stage gives to the next one, or gives back.

    Args:
        gradient: Whether it is the gradient of a stage's outputs, or else a stage's inputs.
        stage: The stage that takes it.
        microbatch: Number of the microbatch, from 0.
    """

    gradient: bool
    stage: int
    microbatch: int


STATUS = Message(gradient=False, stage=-1, microbatch=-1)
"""What a rank sends to its peers when it is done with a step."""

WELL = Message(gradient=False, stage=-2, microbatch=-1)
"""What a rank sends to the one with the loss, once nothing but the loss is missing, where every rank gets the loss."""

LOSS = Message(gradient=False, stage=-3, microbatch=-1)
"""The loss of the batch, from the rank with the last stage to all others, once they have said that all is well."""


def sum_message(number: int) -> Message:
    """What the holders of shared parameters send to each other: a holder's gradients, to be summed.

    Args:
        number: Which `Shared` of the pipeline it is, from 0.
    """
    return Message(gradient=True, stage=-1, microbatch=number)


def is_sum(message: Message) -> bool:
    """Whether it is a `sum_message`: as large as parameters, and not needed before a step's end."""
    return message.gradient and message.stage < 0


class Instruction(NamedTuple):
    """One action of this rank.

    Args:
        action: What is computed.
        takes: What it needs from a neighbouring stage.
        source: The rank of that stage; it may be this one.
        gives: What a neighbouring stage needs from it.
        target: The rank of that stage; it may be this one.
    """

    action: Action
    takes: Message | None
    source: int
    gives: Message | None
    target: int


class Arrival(NamedTuple):
    """A message that another rank sends.

    Args:
        message: Which message it is.
        position: The place, in that rank's actions, of the action that sends it.
        after: How many messages from that rank this one has taken when it is time to post the receive of its tensors.
    """

    message: Message
    position: int
    after: int = 0


@dataclass(frozen=True, kw_only=True)
class Program:
    """What one rank does in a step.

    Args:
        instructions: The rank's actions, in order.
        arrivals: For each peer, which is a rank that this one exchanges messages with, what it sends to this one, in
            its order; its status is the last.
        departures: For each peer, what this rank sends to it, in this one's order; the status is the last.
        consumed: For each message that this rank sends, the place, in the receiver's actions, of the action that takes
            it. Whatever the receiver sends from there on says that the message has arrived.
        final: For each stage, two places in this rank's actions after which its gradients are complete: the one if its
            backward is split, and the one if it is not.
        forwards: The number of forwards.
        neighbours: The number of peers with a neighbouring stage.
    """

    instructions: tuple[Instruction, ...]
    arrivals: dict[int, tuple[Arrival, ...]]
    departures: dict[int, tuple[Message, ...]]
    consumed: dict[Message, int]
    final: dict[int, tuple[int, int]]
    forwards: int
    neighbours: int


def compile_program(
    schedule: Schedule,
    rank: int,
    *,
    forward_only: bool = False,
    holders: Sequence[Sequence[int]] = (),
    broadcasts_loss: bool = False,
) -> Program:
    """Compiles one rank's part of a schedule.

    Args:
        schedule: A valid schedule.
        rank: The rank, within the pipeline.
        forward_only: Whether the backward is left out.
        holders: For each `Shared`, the ranks whose gradients are summed after the last action.
        broadcasts_loss: Whether every rank gets the loss.
    """
    instructions = tuple(_instructions(schedule, rank, forward_only))
    neighbours = {peer for instruction in instructions for peer in (instruction.source, instruction.target)} - {rank}
    ends = _Ends(() if forward_only else holders, schedule.rank_of(schedule.stages - 1) if broadcasts_loss else None)
    others = [peer for peer in range(len(schedule.ranks)) if peer != rank]
    peers = neighbours.union(peer for peer in others if ends.sent(rank, peer) or ends.sent(peer, rank))
    arrivals: dict[int, tuple[Arrival, ...]] = {}
    departures: dict[int, tuple[Message, ...]] = {}
    consumed: dict[Message, int] = {}
    for peer in sorted(peers):
        sent = [mine.gives for mine in instructions if mine.gives is not None and mine.target == peer]
        departures[peer] = (*sent, *ends.sent(rank, peer), STATUS)
        consumed.update(dict.fromkeys(ends.sent(rank, peer), _AT_THE_END))
        coming, position = [], -1  # messages, and the places of what sends them
        for position, theirs in enumerate(_instructions(schedule, peer, forward_only)):
            if theirs.gives is not None and theirs.target == rank:
                coming.append((theirs.gives, position))
            if theirs.takes is not None and theirs.source == rank:
                consumed[theirs.takes] = position
        coming += [(message, position) for message in ends.sent(peer, rank)]
        taken = [mine.takes for mine in instructions if mine.takes is not None and mine.source == peer]
        due = _due([message for message, _ in coming], [*taken, *ends.sent(peer, rank)])
        of_step = (Arrival(*sent, after) for sent, after in zip(coming, due, strict=True))
        arrivals[peer] = (*of_step, Arrival(STATUS, -1))
    return Program(
        instructions=instructions,
        arrivals=arrivals,
        departures=departures,
        consumed=consumed,
        final=_final(instructions),
        forwards=sum(instruction.action.op == FORWARD for instruction in instructions),
        neighbours=len(neighbours),
    )


def _due(coming: Sequence[Message], taken: Sequence[Message]) -> list[int]:
    """For each message that comes from a peer, how many of them are taken when its receive is due.

    What is taken next is due, and with it what comes before that: receives have the order in which the peer sends. Most
    schedules take in that order, too, so that one receive is ahead; some take a message before an earlier one.
    """
    places = {message: place for place, message in enumerate(coming)}
    due: list[int] = []
    for count, message in enumerate(taken):
        due += [count] * (places[message] + 1 - len(due))
    return due


_AT_THE_END = sys.maxsize  # the place of what takes a message after all actions


class _Ends(NamedTuple):
    """What ranks exchange after all actions.

    Args:
        holders: For each `Shared`, the ranks whose gradients are summed.
        root: The rank whose loss every rank gets; None: nobody gets it.
    """

    holders: Sequence[Sequence[int]]
    root: int | None

    def sent(self, source: int, target: int) -> list[Message]:
        """What one rank sends to another one, in order."""
        sums = [sum_message(number) for number, ranks in enumerate(self.holders) if source in ranks and target in ranks]
        if self.root is None:
            return sums
        return [*sums, *([LOSS] if source == self.root else []), *([WELL] if target == self.root else [])]


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
    """`Program.final`. A weight gradient is the last one only of a stage whose backward is split."""
    final: dict[int, tuple[int, int]] = {}
    for position, instruction in enumerate(instructions):
        op, stage, _ = instruction.action
        if op != FORWARD:
            _, if_whole = final.get(stage, (-1, -1))
            final[stage] = (position, if_whole if op == WEIGHT_GRAD else position)
    return final
