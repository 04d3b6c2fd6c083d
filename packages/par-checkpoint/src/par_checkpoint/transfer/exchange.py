"""Messages between ranks: the claims of each rank, and then elements, in rounds of two buffers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Generic, TypeVar

import torch

from par_groups import Claims

from ..plan.tasks import BlockPiece, Task
from .ranks import Ranks, words

Piece = TypeVar("Piece")
Pairs = Mapping[int, Sequence[Piece]]
"""By rank at the other end: its pieces, in the order in which they are packed."""


def words_of(claims: Claims, rank: int) -> list[int]:
    """Return a digest of this rank's claims, whose sums over all ranks identify the claims of all ranks."""
    return words(rank.to_bytes(8) + claims.table() + claims.boxes())


def claims_of_all(ranks: Ranks, mine: Claims) -> list[tuple[Sequence[int], Claims]]:
    """Gather the claims of all ranks, with the ranks that have them; equal claims once. Collective.

    One rank of each pipeline stage sends names, dtypes and shapes; all other data is a few dozen rows per rank.

    Args:
        ranks: Ranks.
        mine: Claims of this rank.
    """
    tables = ranks.distinct_bytes(mine.table())
    table_of = {rank: number for number, (holders, _) in enumerate(tables) for rank in holders}
    decoded = [Claims.decode_table(data) for _, data in tables]
    # Boxes with equal bytes mean different things for different tables, so the table's number is part of the value.
    every = ranks.distinct_bytes(table_of[ranks.rank].to_bytes(8) + mine.boxes())
    return [(holders, decoded[table_of[holders[0]]].with_boxes(data[8:])) for holders, data in every]


class ReusedBuffer:
    """One piece of memory, used again in every round, as large as it ever had to be."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def of(self, size: int) -> torch.Tensor:
        """Return the buffer's first bytes, whose content is undefined."""
        if self._memory.numel() < size:
            self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")  # gone before the larger one comes
            self._memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        return self._memory[:size]


class PieceExchange(Generic[Piece]):
    """The buffers of all rounds, one each way.

    Args:
        ranks: The communicator.
        packed_size: Bytes of a buffer for some pieces.
        limit: Bytes of a buffer above which pieces for one rank are sent in several; the same on every rank. None: all
            go in one.
        alone: Bytes of a piece from which on it has a message of its own, so that no end need copy it if it is
            contiguous there; the same on every rank. None: pieces share messages.
    """

    def __init__(
        self,
        ranks: Ranks,
        packed_size: Callable[[Sequence[Piece]], int],
        *,
        limit: int | None = None,
        alone: int | None = None,
    ) -> None:
        self._ranks, self._packed_size, self._limit, self._alone = ranks, packed_size, limit, alone
        self._leaving, self._arriving = ReusedBuffer(), ReusedBuffer()

    def run(
        self,
        outgoing: Pairs[Piece],
        incoming: Pairs[Piece],
        *,
        fill: Callable[[int, Sequence[Piece], torch.Tensor], torch.Tensor],
        take: Callable[[Sequence[Piece], torch.Tensor], None],
        place: Callable[[Sequence[Piece]], torch.Tensor | None] = lambda _: None,
    ) -> None:
        """Send and receive the pieces of one wave of a round.

        In step s, rank r sends to r + s and receives from r - s. So no two steps can wait for each other in a circle,
        and there is never more than one buffer each way.

        Args:
            outgoing: Pieces to send, by rank.
            incoming: Pieces to receive, by rank.
            fill: Function that packs pieces for a rank into an empty buffer, or returns a buffer that is already
                packed.
            take: Function that unpacks pieces.
            place: Function that returns the memory of received pieces if they need no unpacking.
        """
        ranks = self._ranks
        # Only steps with any message are run; ranks need not agree, because messages are matched pair by pair.
        steps = {(to - ranks.rank) % ranks.size for to in outgoing}
        steps |= {(ranks.rank - source) % ranks.size for source in incoming}
        for step in sorted(steps):
            to, source = (ranks.rank + step) % ranks.size, (ranks.rank - step) % ranks.size
            for leaving, coming in zip_longest(self._parcels(outgoing, to), self._parcels(incoming, source)):
                sending = receiving = home = None
                if coming is not None:
                    size, home = self._packed_size(coming), place(coming)
                    if home is not None and home.numel() < size:  # a buffer ends with a multiple of its alignment
                        home = None
                    arrived = self._arriving.of(size) if home is None else home
                    # The receive is posted before the send is packed, so that the peer's message arrives during the
                    # packing.
                    receiving = ranks.receive(arrived, source)
                if leaving is not None:
                    buffer = fill(to, leaving, self._leaving.of(self._packed_size(leaving)))
                    sending = ranks.send(buffer, to)
                if receiving is not None:
                    receiving.wait()
                    if home is None:
                        take(coming, arrived)
                if sending is not None:
                    sending.wait()

    def _parcels(self, pairs: Pairs[Piece], peer: int) -> Iterator[Sequence[Piece]]:
        """Yield the pieces for or from a rank, as many at a time as fit into one buffer, at least one."""
        pieces = pairs.get(peer, ())
        if pieces and self._limit is None:
            yield pieces
            return
        begin = size = 0
        for number, piece in enumerate(pieces):
            own = self._packed_size([piece])
            size += own
            is_large = self._alone is not None and own >= self._alone
            if number > begin and (size > (self._limit or 0) or is_large):
                yield pieces[begin:number]
                begin, size = number, own
            if is_large:
                yield pieces[begin : number + 1]
                begin, size = number + 1, 0
        if begin < len(pieces):
            yield pieces[begin:]


def by_wave(tasks: Iterable[Task], rank: int) -> list[tuple[Pairs[BlockPiece], Pairs[BlockPiece]]]:
    """Return the pieces of each wave by other rank: those sent to the rank, and those received from it.

    Both are in the order of turns, so that the two ends agree.

    Args:
        tasks: Tasks of one round.
        rank: This rank; a piece whose two ends it is stays here.
    """
    found: dict[int, tuple[dict[int, list[BlockPiece]], dict[int, list[BlockPiece]]]] = {}
    # Sender and receiver must list the pieces of a message in the same order.
    for task in sorted(tasks, key=lambda task: (task.rank, task.turn)):
        for piece in task.pieces:
            if piece.source != piece.to:
                outgoing, incoming = found.setdefault(piece.wave, ({}, {}))
                pairs, peer = (outgoing, piece.to) if piece.source == rank else (incoming, piece.source)
                pairs.setdefault(peer, []).append(piece)
    return [pairs for _, pairs in sorted(found.items())]
