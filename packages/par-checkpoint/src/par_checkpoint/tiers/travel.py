"""Transfers of blocks between ranks. All ranks follow one order, so that they cannot deadlock."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ..transfer.ranks import PeerTransfer, Ranks

_UNDER_WAY = 4  # number of blocks that a rank sends or receives at a time


@dataclass(frozen=True, kw_only=True)
class Move:
    """The transfer of a block from its reader to its receiver, which may be the same rank.

    Args:
        file: Name of the file.
        number: Number of the block in the file.
        size: Bytes of the block.
        source: The rank that reads the block.
        owner: The rank that takes the block.
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
    """Carry out the moves of this rank. Every rank calls it with its part of one list of all moves.

    After an error this rank still sends and receives until the end, so that no other rank waits for it. It takes no
    further blocks.

    Args:
        moves: Moves of this rank, in the order of the list.
        ranks: The ranks, with a communicator that no other call uses at the same time.
        read: Function that reads a block into a buffer of the block's size.
        take: Function that takes a block that has arrived.

    Returns:
        The first error on this rank, or None.

    Raises:
        RuntimeError: Another rank is gone.
    """
    error: BaseException | None = None
    under_way: deque[tuple[Move, torch.Tensor, PeerTransfer | None]] = deque()

    def attempted(act: Callable[[Move, torch.Tensor], None], move: Move, block: torch.Tensor) -> None:
        nonlocal error
        try:
            act(move, block)
        except Exception as failure:  # the other ranks still wait for this rank's messages
            error = error or failure

    def finish() -> None:
        move, block, transfer = under_way.popleft()
        if transfer is not None:
            transfer.wait()
        if move.owner == ranks.rank and error is None:
            attempted(take, move, block)

    # All ranks follow one list, and each rank waits only for its oldest block. So both ranks of the first unfinished
    # block in the list always wait for that block, and it can finish: no circle of waiting ranks is possible.
    for move in moves:
        # A block that cannot be read is sent as zeros. Its owner finds the wrong checksum, and both ranks report
        # errors.
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
