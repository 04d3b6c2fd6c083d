"""Who writes or reads which block of which file, and who sends what to whom. Pure, and the same on every rank.

A block is a range of bytes of a file. One rank assembles it from what it holds and what others send, checksums it and
writes it; loading is the same way back. So every byte is checksummed and touches the disk once, however it is cut.

A block that ranks hold in a few runs of bytes, such as rows, needs no sending: each rank writes its run as a block of
its own, and the checksum of the whole block is made of theirs.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from ..format.bytes import bytes_of
from .claims import GlobalTensor
from .overlap import BoxIndex, Overlap

Shape = tuple[int, ...]

_READERS = 4  # of one block from the page cache: reading it so often costs less than sending
_FEW = 16  # ranks that are sooner compared one by one than as a tensor
_RUNS = 16  # of a block that ranks write by themselves: more would be small writes


@dataclass(frozen=True, kw_only=True)
class Span:
    """What lies of one tensor in a block: row-major elements start .. stop - 1, from byte `at` of the block."""

    tensor: int
    start: int
    stop: int
    at: int


@dataclass(frozen=True, kw_only=True)
class Block:
    """Bytes begin .. end - 1 of a file, and what they hold."""

    file: int
    begin: int
    end: int
    spans: tuple[Span, ...]

    @property
    def size(self) -> int:
        """Bytes of the block."""
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A rectangle of a tensor that lies in one block and in one box of one rank.

    Args:
        tensor: Number of the tensor.
        start: Global index of its first element.
        size: Extent on each dim; its elements lie in the block with the strides of the whole tensor.
        at: Byte of the block where its first element lies.
        source: The rank that gives it: holds it on a save, reads the block on a load.
        to: The rank that takes it: assembles the block on a save, holds it on a load.
    """

    tensor: int
    start: Shape
    size: Shape
    at: int
    source: int
    to: int


@dataclass(frozen=True, kw_only=True)
class Task:
    """A block and the pieces of it that this rank gives or takes.

    Args:
        block: The block.
        turn: Its place among the blocks of the rank that writes or reads it.
        rank: The rank that writes or reads it.
        pieces: The pieces in the order in which they are packed.
    """

    block: Block
    turn: int
    rank: int
    pieces: tuple[Piece, ...]


@dataclass(kw_only=True)
class Plan:
    """This rank's part of a save or a load.

    Args:
        mine: The blocks that this rank writes or reads, in order.
        others: Blocks that other ranks write or read, of which this rank gives or takes pieces.
        turns: The most blocks that any rank writes or reads.
        peers: Whether any rank sends anything to another; the same on every rank.
    """

    mine: list[Task] = field(default_factory=list)
    others: list[Task] = field(default_factory=list)
    turns: int = 0
    peers: bool = False


@dataclass(frozen=True, kw_only=True)
class _Share:
    """One span of a block, and the boxes that reach into it."""

    span: Span
    overlap: Overlap

    def pieces(self, box: int, source: int, to: int) -> Iterator[Piece]:
        """The rectangles of the span within one box, on their way from one rank to another."""
        width, strides = self.overlap.tensor.dtype.itemsize, self.overlap.index.strides
        for start, size in self.overlap.parts(box):
            first = sum(i * stride for i, stride in zip(start, strides, strict=True))
            at = self.span.at + (first - self.span.start) * width
            yield Piece(tensor=self.span.tensor, start=start, size=size, at=at, source=source, to=to)


class Planner:
    """Deals blocks out to ranks: of those that hold most of a block, to the one with the fewest bytes so far.

    Args:
        tensors: All tensors and their holders.
        rank: This rank, whose part is wanted.
        size: The number of ranks.
        owners: By file: the one rank that may write it. None lets every rank write into every file.
        whole: Whether one rank writes all of a block, however ranks hold it.
        window: Bytes of a file, from its first block on, that one rank reads in a row where it can; 0: of a block.
    """

    def __init__(
        self,
        tensors: Sequence[GlobalTensor],
        rank: int,
        size: int,
        owners: Sequence[int] | None = None,
        *,
        whole: bool = False,
        window: int = 0,
    ) -> None:
        self._rank = rank
        self._owners = owners
        self._whole = whole or owners is not None
        self._window = window
        self._last = (-1, -1, -1)  # reader of the last block of a load, its file, and the window in it
        self._load = torch.zeros(size, dtype=torch.int64, device="cpu")  # bytes that each rank has to do with so far
        self._load_of = bytes_of(self._load).cast("q")  # the same memory, for one rank at a time
        self._turns = [0] * size
        self._is_alone = size == 1  # no choice, and nothing to look up
        self._boxes = [BoxIndex(tensor, rank) for tensor in tensors]
        self._plan = Plan()

    def save(self, blocks: Iterable[Block]) -> Plan:
        """Every block is written by one rank, or in parts by those that hold it in runs; of replicas one gives."""
        for block in blocks:
            shares = self._shares(block)
            parts = self._parts(shares, block)
            for part, writer, pieces in parts:
                self._assign(part, writer, pieces)
            if not parts:
                writer = self._owners[block.file] if self._owners else self._main_holder(shares, block)
                self._assign(block, writer, self._gathered(shares, writer))
        return self._finished()

    def load(self, blocks: Iterable[Block], *, near: bool) -> Plan:
        """Every block that somebody needs is read, in parts by those that hold it in runs, or as a whole.

        A block that is read as a whole is read by one rank, or by a few where they share a machine; its pieces then go
        to all ranks that hold them.

        Args:
            blocks: All blocks that may be needed.
            near: Whether all ranks share a machine: a rank that needs much of a block then reads it itself, from the
                page cache.
        """
        for block in blocks:
            shares = self._shares(block)
            no_copies = not self._is_alone and all(
                len(share.overlap.tensor.holders(box)) == 1 for share in shares for box in share.overlap.boxes
            )
            parts = self._parts(shares, block) if no_copies else []
            for part, reader, pieces in parts:
                self._assign(part, reader, pieces)
            shares = [share for share in shares if share.overlap.boxes]
            if parts or not shares:
                continue
            readers = self._readers(shares, block) if near else [self._reader(shares, block)]
            for reader, pieces in self._delivered(shares, readers).items():
                self._assign(block, reader, pieces)
        return self._finished()

    def _shares(self, block: Block) -> list[_Share]:
        """Who holds how much of each span of a block."""
        return [
            _Share(span=span, overlap=self._boxes[span.tensor].within(span.start, span.stop)) for span in block.spans
        ]

    def _parts(self, shares: Sequence[_Share], block: Block) -> list[tuple[Block, int, list[Piece]]]:
        """A block that ranks hold in a few runs of bytes: each run, the rank that writes it, and its own pieces of it.

        Nothing where the block does not consist of such runs.
        """
        if self._is_alone or self._whole or not all(share.overlap.index.are_runs for share in shares):
            return []
        if sum(len(share.overlap.boxes) for share in shares) > _RUNS:
            return []
        runs: list[tuple[int, list[tuple[Piece, Span]]]] = []  # of one rank each, which may hold several boxes in a row
        end = 0
        for share in shares:
            width = share.overlap.tensor.dtype.itemsize
            for box in share.overlap.boxes:
                found = []
                for piece in share.pieces(box, -1, -1):
                    if piece.at != end:  # boxes overlap
                        return []
                    start = share.span.start + (piece.at - share.span.at) // width
                    count = math.prod(piece.size)
                    found.append((piece, Span(tensor=piece.tensor, start=start, stop=start + count, at=piece.at)))
                    end += count * width
                holder = self._least_busy(share.overlap.tensor.holders(box), runs[-1][0] if runs else -1)
                if not runs or runs[-1][0] != holder:
                    runs.append((holder, []))
                runs[-1][1].extend(found)
        if end != block.size:
            return []
        ends = [run[0][1].at for _, run in runs[1:]] + [end]
        return [self._part(block, stop, holder, run) for stop, (holder, run) in zip(ends, runs, strict=True)]

    def _part(
        self, block: Block, stop: int, holder: int, run: Sequence[tuple[Piece, Span]]
    ) -> tuple[Block, int, list[Piece]]:
        """One run of a block as a block of its own, which ends at byte `stop` of the whole one."""
        first = run[0][1].at
        spans = tuple(replace(span, at=span.at - first) for _, span in run)
        part = Block(file=block.file, begin=block.begin + first, end=block.begin + stop, spans=spans)
        if holder != self._rank:
            return part, holder, []
        return part, holder, [replace(piece, at=piece.at - first, source=holder, to=holder) for piece, _ in run]

    def _gathered(self, shares: Sequence[_Share], writer: int) -> list[Piece]:
        """The pieces of a block that this rank gives to its writer; on the writer, all pieces that it takes.

        What the writer holds comes from itself. Of anything else the holders give in turn.
        """
        pieces: list[Piece] = []
        for share in shares:
            overlap = share.overlap
            if writer != self._rank and self._plan.peers and not overlap.mine:
                continue
            own = overlap.boxes.keys() if self._is_alone else overlap.boxes_of(writer)
            self._plan.peers = self._plan.peers or len(own) < len(overlap.boxes)
            for box in overlap.boxes if writer == self._rank else overlap.mine:
                holders = overlap.tensor.holders(box)
                source = writer if box in own else int(holders[self._turns[writer] % len(holders)])
                if self._rank in (source, writer):
                    pieces += share.pieces(box, source, writer)
        return pieces

    def _delivered(self, shares: Sequence[_Share], readers: Sequence[int]) -> dict[int, list[Piece]]:
        """By reader of a block: the pieces that this rank takes from it; on a reader, all pieces that it gives.

        Readers take what they hold from themselves. All other holders get theirs from one of the readers, the one with
        the fewest bytes so far.
        """
        me, sender = self._rank, min(readers, key=self._load_of.__getitem__)
        pieces: dict[int, list[Piece]] = {reader: [] for reader in readers}
        for share in shares:
            overlap = share.overlap
            if not (self._is_alone or self._plan.peers):
                self._plan.peers = not all(rank in pieces for rank in overlap.ranks_with_some())
            for box in overlap.boxes if me == sender else overlap.mine:
                holders = overlap.tensor.holders(box)
                if me == sender:
                    for rank in holders.tolist():
                        if rank == me or rank not in pieces:
                            pieces[me] += share.pieces(box, me, rank)
                elif bool((holders == me).any()):
                    source = me if me in pieces else sender
                    pieces[source] += share.pieces(box, source, me)
        return pieces

    def _assign(self, block: Block, rank: int, pieces: list[Piece]) -> None:
        """Gives a block to the rank that writes or reads it."""
        turn = self._turns[rank]
        self._turns[rank] += 1
        self._load_of[rank] += block.size
        if pieces or rank == self._rank:
            task = Task(block=block, turn=turn, rank=rank, pieces=tuple(pieces))
            (self._plan.mine if rank == self._rank else self._plan.others).append(task)

    def _finished(self) -> Plan:
        """The plan, when all blocks are assigned."""
        self._plan.turns = max(self._turns)
        return self._plan

    def _reader(self, shares: Sequence[_Share], block: Block) -> int:
        """The main holder of a block; where a window began with another block, its reader, if it holds as much."""
        if not self._window:
            return self._main_holder(shares, block)
        if block.file != self._last[1]:
            self._first = block.begin
        window = (block.begin - self._first) // self._window
        before, file, last = self._last
        if (file, last) != (block.file, window):
            before = -1
        reader = self._main_holder(shares, block, before)
        if reader != before:  # a window lies in one round
            step = max(1, self._window // block.size)
            self._turns[reader] = -(-self._turns[reader] // step) * step
        self._last = (reader, block.file, window)
        return reader

    def _main_holder(self, shares: Sequence[_Share], block: Block, before: int = -1) -> int:
        """Chooses, of the ranks that hold about as much of the block as any, the one with the fewest bytes so far.

        Args:
            shares: Who holds how much of it.
            block: The block.
            before: A rank that is to have it rather than any other of those.
        """
        if self._is_alone:
            return 0
        ranks = _joined([share.overlap.ranks for share in shares])
        if ranks.numel() == 0:
            return block.file % len(self._turns)
        if ranks.numel() == 1:
            return int(ranks)
        weights = _joined([share.overlap.weights for share in shares])
        return self._least_busy(ranks.masked_select(2 * weights >= weights.max()), before)

    def _least_busy(self, ranks: torch.Tensor, before: int = -1) -> int:
        """Chooses the rank that has what comes before the block, else the one with the fewest bytes so far."""
        if ranks.numel() <= _FEW:
            few = ranks.tolist()
            return before if before in few else min(few, key=self._load_of.__getitem__)
        if bool((ranks == before).any()):
            return before
        return int(ranks[self._load.index_select(0, ranks).argmin()])

    def _readers(self, shares: Sequence[_Share], block: Block) -> list[int]:
        """All that need some of the block if they are few, else those that need a quarter of it or more, or most."""
        if self._is_alone:
            return [0]
        some = {rank for share in shares for rank in share.overlap.ranks_with_some()}
        if len(some) <= _READERS:
            return sorted(some)
        much = {
            rank for share in shares for rank in share.overlap.ranks[4 * share.overlap.weights >= block.size].tolist()
        }
        return sorted(much) or [self._main_holder(shares, block)]


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The int64 tensors one after the other; often there is one alone, and nothing to copy."""
    return parts[0] if len(parts) == 1 else torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *parts])
