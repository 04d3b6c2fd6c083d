"""Sending pieces between ranks, round by round, two buffers at a time."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from ..plan.plan import Piece, Task
from .buffers import Buffer
from .ranks import Ranks

Pairs = Mapping[int, Sequence[Piece]]
"""Pieces by the other rank, in the order in which they are packed."""


class Room:
    """The two buffers of all rounds, one each way.

    Args:
        sizes: Bytes of a buffer for some pieces.
    """

    def __init__(self, sizes: Callable[[Sequence[Piece]], int]) -> None:
        self._sizes = sizes
        self._leaving, self._arriving = Buffer(), Buffer()

    def to_send(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """A buffer for what is sent."""
        return self._leaving.of(self._sizes(pieces))

    def to_receive(self, pieces: Sequence[Piece]) -> torch.Tensor:
        """A buffer for what is received."""
        return self._arriving.of(self._sizes(pieces))


def exchange(
    ranks: Ranks,
    room: Room,
    outgoing: Pairs,
    incoming: Pairs,
    *,
    fill: Callable[[int, torch.Tensor], torch.Tensor],
    take: Callable[[int, torch.Tensor], None],
) -> None:
    """Sends and receives one round's pieces.

    In step s, rank r sends to r + s and receives from r - s. So no two steps can wait for each other in a circle, and
    there is never more than one buffer each way.

    Args:
        ranks: The communicator.
        room: Its buffers.
        outgoing: What goes to whom.
        incoming: What comes from whom.
        fill: Packs what goes to a rank into an empty buffer, or gives one that is packed already.
        take: Unpacks what came from a rank.
    """
    for step in range(1, ranks.size):
        to, source = (ranks.rank + step) % ranks.size, (ranks.rank - step) % ranks.size
        sending = receiving = None
        if source in incoming:
            arrived = room.to_receive(incoming[source])
            receiving = ranks.receive(arrived, source)
        if to in outgoing:
            buffer = fill(to, room.to_send(outgoing[to]))
            sending = ranks.send(buffer, to)
        if receiving is not None:
            receiving.wait()
            take(source, arrived)
        if sending is not None:
            sending.wait()


def by_peer(tasks: Iterable[Task], other: Callable[[Piece], int], rank: int) -> dict[int, list[Piece]]:
    """The pieces of some tasks whose other end is another rank, by that rank; within one in the order of its turns."""
    found: dict[int, list[Piece]] = {}
    for task in sorted(tasks, key=lambda task: (task.rank, task.turn)):
        for piece in task.pieces:
            if other(piece) != rank:
                found.setdefault(other(piece), []).append(piece)
    return found


def rounds(tasks: Sequence[Task], turns: int, each: int) -> Iterator[list[Task]]:
    """The tasks of every `each` turns."""
    dealt: list[list[Task]] = [[] for _ in range(-(-turns // each))]
    for task in tasks:
        dealt[task.turn // each].append(task)
    yield from dealt
