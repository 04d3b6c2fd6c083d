"""Sending pieces between ranks, round by round, two buffers at a time."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from ..plan.tasks import Piece, Task
from .ranks import Ranks

Pairs = Mapping[int, Sequence[Piece]]
"""By rank at the other end: its pieces, in the order in which they are packed."""


class Buffer:
    """One piece of memory, used again in every round, as large as it ever had to be."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def of(self, size: int) -> torch.Tensor:
        """The buffer's first bytes; what was in them is lost."""
        if self._memory.numel() < size:
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # gone before the larger one comes
            self._memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._memory[:size]


class Exchange:
    """The buffers of all rounds, one each way.

    Args:
        ranks: The communicator.
        packed_size: Bytes of a buffer for some pieces.
    """

    def __init__(self, ranks: Ranks, packed_size: Callable[[Sequence[Piece]], int]) -> None:
        self._ranks, self._packed_size = ranks, packed_size
        self._leaving, self._arriving = Buffer(), Buffer()

    def run(
        self,
        outgoing: Pairs,
        incoming: Pairs,
        *,
        fill: Callable[[int, torch.Tensor], torch.Tensor],
        take: Callable[[int, torch.Tensor], None],
    ) -> None:
        """Sends and receives the pieces of one round.

        In step s, rank r sends to r + s and receives from r - s. So no two steps can wait for each other in a circle,
        and there is never more than one buffer each way.

        Args:
            outgoing: What goes to whom.
            incoming: What comes from whom.
            fill: Packs what goes to a rank into an empty buffer, or gives one that is packed already.
            take: Unpacks what came from a rank.
        """
        ranks = self._ranks
        for step in range(1, ranks.size):
            to, source = (ranks.rank + step) % ranks.size, (ranks.rank - step) % ranks.size
            sending = receiving = None
            if source in incoming:
                arrived = self._arriving.of(self._packed_size(incoming[source]))
                receiving = ranks.receive(arrived, source)
            if to in outgoing:
                buffer = fill(to, self._leaving.of(self._packed_size(outgoing[to])))
                sending = ranks.send(buffer, to)
            if receiving is not None:
                receiving.wait()
                take(source, arrived)
            if sending is not None:
                sending.wait()


def by_peer(tasks: Iterable[Task], other: Callable[[Piece], int], rank: int) -> dict[int, list[Piece]]:
    """By other rank: the pieces of some tasks that it gives or takes, in the order of turns.

    Args:
        tasks: Tasks of one round.
        other: The rank at the other end of a piece.
        rank: This rank; a piece whose other end it is stays here.
    """
    found: dict[int, list[Piece]] = {}
    for task in sorted(tasks, key=lambda task: (task.rank, task.turn)):
        for piece in task.pieces:
            if other(piece) != rank:
                found.setdefault(other(piece), []).append(piece)
    return found
