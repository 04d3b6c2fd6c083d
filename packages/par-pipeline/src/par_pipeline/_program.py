"""Derivation of a rank's sends and receives from its actions. Pure arithmetic, shared by the wire and the runtime."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .schedules.actions import FORWARD, WEIGHT_GRAD, Action
from .schedules.schedule import Schedule


class Message(NamedTuple):
    """Outputs that a stage sends to the next stage, or gradients that it sends back.

    Args:
        gradient: Whether the message contains gradients of a stage's outputs; False for a stage's inputs.
        stage: Stage that receives the message.
        microbatch: Number of the microbatch, from 0.
    """

    gradient: bool
    stage: int
    microbatch: int


STATUS = Message(gradient=False, stage=-1, microbatch=-1)
"""Message from a rank to its peers at the end of a step."""

WELL = Message(gradient=False, stage=-2, microbatch=-1)
"""Message from a rank to the rank with the loss, after all work except the loss, if every rank receives the loss."""

LOSS = Message(gradient=False, stage=-3, microbatch=-1)
"""Loss of the batch, from the rank with the last stage to all other ranks, after they have sent `WELL`."""


def sum_message(number: int) -> Message:
    """Return the message in which holders of shared parameters exchange gradients to sum.

    Args:
        number: Index of the `Shared` in the pipeline, from 0.
    """
    return Message(gradient=True, stage=-1, microbatch=number)


def is_sum(message: Message) -> bool:
    """Return whether a message is a `sum_message`, which is as large as parameters and needed at a step's end."""
    return message.gradient and message.stage < 0


class Instruction(NamedTuple):
    """Action of this rank with its messages.

    Args:
        action: Action.
        takes: Message that the action needs from a neighbouring stage; None if it needs no message.
        source: Rank of that stage; may be this rank.
        gives: Message that a neighbouring stage needs from the action; None if no stage needs one.
        target: Rank of that stage; may be this rank.
    """

    action: Action
    takes: Message | None
    source: int
    gives: Message | None
    target: int


class ExpectedMessage(NamedTuple):
    """Message that another rank sends.

    Args:
        message: Message.
        position: Index, in that rank's actions, of the action that sends it.
        after: Number of messages from that rank that this rank has taken when it posts the receive of the tensors.
            Default: 0.
    """

    message: Message
    position: int
    after: int = 0


@dataclass(frozen=True, kw_only=True)
class Program:
    """Actions and messages of one rank in a step.

    A peer is a rank with which this rank exchanges messages.

    Args:
        instructions: Actions of the rank, in order.
        arrivals: Messages from each peer, in the peer's order; its status is the last.
        departures: Messages to each peer, in this rank's order; the status is the last.
        consumed: Index of the receiver's action that takes a message, for each message that this rank sends. Any later
            message from the receiver proves that the message has arrived.
        final: Two indices of this rank's actions for each stage, after which its gradients are complete: the first if
            the stage's backward is split, the second if it is not.
        forwards: Number of forwards.
        neighbours: Number of peers with a neighbouring stage.
    """

    instructions: tuple[Instruction, ...]
    arrivals: dict[int, tuple[ExpectedMessage, ...]]
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
    """Compile one rank's part of a schedule.

    Args:
        schedule: Valid schedule.
        rank: Rank within the pipeline.
        forward_only: Whether to skip the backward. Default: False.
        holders: Ranks whose gradients are summed after the last action, for each `Shared`. Default: none.
        broadcasts_loss: Whether every rank receives the loss. Default: False.
    """
    instructions = tuple(_instructions(schedule, rank, forward_only))
    neighbours = {peer for instruction in instructions for peer in (instruction.source, instruction.target)} - {rank}
    ends = _Ends(() if forward_only else holders, schedule.rank_of(schedule.stages - 1) if broadcasts_loss else None)
    others = [peer for peer in range(len(schedule.ranks)) if peer != rank]
    peers = neighbours.union(peer for peer in others if ends.sent(rank, peer) or ends.sent(peer, rank))
    arrivals: dict[int, tuple[ExpectedMessage, ...]] = {}
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
            # This rank's send buffer is free once the receiver's later message proves that it has run the action which
            # takes the message.
            if theirs.takes is not None and theirs.source == rank:
                consumed[theirs.takes] = position
        coming += [(message, position) for message in ends.sent(peer, rank)]
        taken = [mine.takes for mine in instructions if mine.takes is not None and mine.source == peer]
        due = _due([message for message, _ in coming], [*taken, *ends.sent(peer, rank)])
        of_step = (ExpectedMessage(*sent, after) for sent, after in zip(coming, due, strict=True))
        # The status comes last, so that its arrival means that the peer has sent everything else.
        arrivals[peer] = (*of_step, ExpectedMessage(STATUS, -1))
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
    """Return, for each message from a peer, the number of messages taken when its receive must be posted.

    The receive of the next message that this rank takes must be posted, and before it all receives of earlier messages,
    because receives follow the order in which the peer sends. Most schedules take messages in that order, too; then one
    receive is posted ahead. Some schedules take a message before an earlier message.
    """
    places = {message: place for place, message in enumerate(coming)}
    due: list[int] = []
    for count, message in enumerate(taken):
        due += [count] * (places[message] + 1 - len(due))
    return due


_AT_THE_END = sys.maxsize  # the place of what takes a message after all actions


class _Ends(NamedTuple):
    """Messages that ranks exchange after all actions.

    Args:
        holders: Ranks whose gradients are summed, for each `Shared`.
        root: Rank that sends its loss to every rank; None: the loss is not sent.
    """

    holders: Sequence[Sequence[int]]
    root: int | None

    def sent(self, source: int, target: int) -> list[Message]:
        """Return the messages from one rank to another rank, in order."""
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
    """Return `Program.final`. A weight gradient can be the last action only of a stage with a split backward."""
    final: dict[int, tuple[int, int]] = {}
    for position, instruction in enumerate(instructions):
        op, stage, _ = instruction.action
        if op != FORWARD:
            _, if_whole = final.get(stage, (-1, -1))
            final[stage] = (position, if_whole if op == WEIGHT_GRAD else position)
    return final
