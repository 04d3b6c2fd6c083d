"""Blocks on their way from rank to rank, all ranks in one order."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ..transfer.ranks import PeerTransfer, Ranks

_UNDER_WAY = 4  # blocks of a rank that are sent or received at a time


@dataclass(frozen=True, kw_only=True)
class Move:
    """A block that one rank reads and one takes, perhaps the same.

    Args:
        file: The file.
        number: The number of the block in it.
        size: Its bytes.
        source: The rank that reads it.
        owner: The rank that takes it.
    """

    file: str
    number: int
    size: int
    source: int
    owner: int


def travel(
    moves: Iterable[Move],
    ranks: Ranks,
    read: Callable[[Move, torch.Tensor], None],
    take: Callable[[Move, torch.Tensor], None],
) -> BaseException | None:
    """Makes the moves in which this rank takes part. Every rank calls it, with its part of one list of all moves.

    All go through that list in its order, and wait for their oldest block alone when several are under way. So of all
    blocks under way the first one in the list has both its ranks waiting for it, and nobody waits in a circle.

    Whatever fails here, this rank goes on giving and receiving until the end, so that no other waits for it, or calls
    what it gives broken; it takes no more.

    Args:
        moves: The moves of this rank, in the order of the list.
        ranks: The ranks, through a communicator that nothing else uses meanwhile.
        read: Reads a block into a buffer of its size.
        take: Does something with a block that has arrived.

    Returns:
        The first error on this rank, if there was one.

    Raises:
        RuntimeError: Another rank is gone.
    """
    error: BaseException | None = None
    under_way: deque[tuple[Move, torch.Tensor, PeerTransfer | None]] = deque()

    def attempted(act: Callable[[Move, torch.Tensor], None], move: Move, block: torch.Tensor) -> None:
        nonlocal error
        try:
            act(move, block)
        except Exception as failure:  # the others still count on this rank's messages
            error = error or failure

    def finish() -> None:
        move, block, transfer = under_way.popleft()
        if transfer is not None:
            transfer.wait()
        if move.owner == ranks.rank and error is None:
            attempted(take, move, block)

    for move in moves:
        block = torch.zeros(move.size, dtype=torch.uint8, device="cpu")
        transfer = None
        if move.source == ranks.rank:
            attempted(read, move, block)
            if move.owner != ranks.rank:
                transfer = ranks.send(block, move.owner)
        else:
            transfer = ranks.receive(block, move.source)
        under_way.append((move, block, transfer))
        while len(under_way) > _UNDER_WAY:
            finish()
    while under_way:
        finish()
    return error
