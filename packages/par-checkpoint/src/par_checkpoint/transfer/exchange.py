"""Messages between ranks: the claims of each rank, and then elements, in rounds of two buffers."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Generic, TypeVar

import torch

from par_groups import Claims

from ..plan.tasks import BlockPiece, Task
from .ranks import PeerTransfer, Ranks, words

Piece = TypeVar("Piece")
Pairs = Mapping[int, Sequence[Piece]]
"""By rank at the other end: its pieces, in the order in which they are packed."""

_UNDER_WAY = 64  # messages in one direction that may be under way at the same time


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


class MessageWindow:
    """The messages under way in one direction, and the buffers that they use round-robin.

    Args:
        buffers: Number of buffers.
    """

    def __init__(self, buffers: int) -> None:
        self._buffers = [ReusedBuffer() for _ in range(buffers)]
        self._next = 0
        # In the order in which they began: the transfer, the number of its buffer or None, and what ends it.
        self._under_way: deque[tuple[PeerTransfer, int | None, Callable[[], object]]] = deque()

    def buffer(self, size: int) -> torch.Tensor:
        """Return the next buffer, after the message that used it last has ended."""
        while any(buffer == self._next for _, buffer, _ in self._under_way):
            self._end_first()
        return self._buffers[self._next].of(size)

    def begin(self, transfer: PeerTransfer, *, uses_buffer: bool, end: Callable[[], object] = lambda: None) -> None:
        """Add a message.

        Args:
            transfer: The message.
            uses_buffer: Whether it is in the memory that `buffer` has returned.
            end: Function that is called once it has been transferred.
        """
        self._under_way.append((transfer, self._next if uses_buffer else None, end))
        if uses_buffer:
            self._next = (self._next + 1) % len(self._buffers)
        if len(self._under_way) > _UNDER_WAY:
            self._end_first()

    def finish(self) -> None:
        """Wait for all messages."""
        while self._under_way:
            self._end_first()

    def _end_first(self) -> None:
        """Wait for the message that began first."""
        transfer, _, end = self._under_way.popleft()
        transfer.wait()
        end()


class PieceExchange(Generic[Piece]):
    """The buffers of all rounds, the same number each way.

    Args:
        ranks: The communicator.
        packed_size: Bytes of a buffer for some pieces.
        limit: Bytes of a buffer above which pieces for one rank are sent in several; the same on every rank. None: all
            go in one.
        alone: Bytes of a piece from which on it has a message of its own, so that no end need copy it if it is
            contiguous there; the same on every rank. None: pieces share messages.
        buffers: Number of buffers each way. With several, a rank packs one message while others travel.
    """

    def __init__(
        self,
        ranks: Ranks,
        packed_size: Callable[[Sequence[Piece]], int],
        *,
        limit: int | None = None,
        alone: int | None = None,
        buffers: int = 1,
    ) -> None:
        self._ranks, self._packed_size, self._limit, self._alone = ranks, packed_size, limit, alone
        self._buffers = buffers
        self._windows: list[tuple[MessageWindow, MessageWindow]] = []  # of the last run, as no message uses them

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

        In step s, rank r sends to r + s and receives from r - s.

        Args:
            outgoing: Pieces to send, by rank.
            incoming: Pieces to receive, by rank.
            fill: Function that packs pieces for a rank into an empty buffer, or returns a buffer that is already
                packed.
            take: Function that unpacks pieces.
            place: Function that returns the memory of received pieces if they need no unpacking.
        """
        ranks = self._ranks
        # A run that fails leaves messages behind. They may still use their buffers, so the next run gets others.
        windows = self._windows.pop() if self._windows else (MessageWindow(self._buffers), MessageWindow(self._buffers))
        sending, receiving = windows
        # Only steps with any message are run; ranks need not agree, because messages are matched pair by pair.
        steps = {(to - ranks.rank) % ranks.size for to in outgoing}
        steps |= {(ranks.rank - source) % ranks.size for source in incoming}
        # A message has the same step and the same number in its step on both ranks, and both begin and end messages in
        # this order. So both ends of the first message that has not ended reach it, and no ranks wait in a circle.
        for step in sorted(steps):
            to, source = (ranks.rank + step) % ranks.size, (ranks.rank - step) % ranks.size
            for leaving, coming in zip_longest(self._parcels(outgoing, to), self._parcels(incoming, source)):
                if coming is not None:
                    size, home = self._packed_size(coming), place(coming)
                    # The receive is posted before the send is packed, so that the peer's message arrives during the
                    # packing.
                    if home is not None and home.numel() == size:  # the message of several pieces has padding
                        receiving.begin(ranks.receive(home, source), uses_buffer=False)
                    else:
                        arrived = receiving.buffer(size)
                        receiving.begin(
                            ranks.receive(arrived, source), uses_buffer=True, end=partial(take, coming, arrived)
                        )
                if leaving is not None:
                    buffer = sending.buffer(self._packed_size(leaving))
                    packed = fill(to, leaving, buffer)
                    sending.begin(ranks.send(packed, to), uses_buffer=packed.data_ptr() == buffer.data_ptr())
        receiving.finish()
        sending.finish()
        self._windows.append(windows)

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
            # A large piece travels alone. A message of one piece has no padding, so it can arrive in the tensor
            # itself.
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
