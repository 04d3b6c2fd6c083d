"""Who writes or reads which block of which file, and who sends what to whom. Pure, and the same on every rank.

A block is a range of bytes of a file. One rank assembles it from what it holds and what others send, checksums it and
writes it; loading is the same way back. So every byte is checksummed and touches the disk once, however it is cut.

A block that ranks hold in a few runs of bytes, such as rows, needs no sending: each rank writes its run as a block of
its own, and the checksum of the whole is made of theirs.
"""

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from ..format.bytes import bytes_of
from .claims import Held
from .overlap import Holders, Overlap

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
        """Bytes."""
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A rectangle of a tensor that lies in one block and in one box of one rank.

    Args:
        tensor: Its number.
        start: Global index.
        size: Extent; its elements lie in the block with the strides of the whole tensor.
        at: Byte of the block where its first element lies.
        source: The rank that gives it: holds it on a save, reads the block on a load.
        to: The rank that takes it.
    """

    tensor: int
    start: Shape
    size: Shape
    at: int
    source: int
    to: int


@dataclass(frozen=True, kw_only=True)
class Task:
    """A block and the pieces of it that this rank has to do with.

    Args:
        block: The block.
        turn: Its place among the blocks of the rank that has it in hand.
        rank: That rank.
        pieces: In the order in which they are packed.
    """

    block: Block
    turn: int
    rank: int
    pieces: tuple[Piece, ...]


@dataclass(kw_only=True)
class Plan:
    """This rank's part.

    Args:
        mine: The blocks that this rank writes or reads, in order.
        others: Blocks of other ranks, of which it gives or takes pieces.
        turns: The most blocks that any rank has in hand.
        peers: Whether any rank sends anything to another; the same on every rank.
    """

    mine: list[Task] = field(default_factory=list)
    others: list[Task] = field(default_factory=list)
    turns: int = 0
    peers: bool = False


class Planner:
    """Deals blocks out to ranks, the least busy of those that hold most of a block first.

    Args:
        tensors: All tensors and their holders.
        rank: This rank, whose part is wanted.
        size: The number of ranks.
        owners: By file: the one rank that may write it; None lets every rank write into every file.
    """

    def __init__(self, tensors: Sequence[Held], rank: int, size: int, owners: Sequence[int] | None = None) -> None:
        self._rank = rank
        self._owners = owners
        self._busy = torch.zeros(size, dtype=torch.int64, device="cpu")  # bytes that each rank has in hand
        self._hand = bytes_of(self._busy).cast("q")  # the same memory, for one rank at a time
        self._turns = [0] * size
        self._alone = size == 1  # no choice, and nothing to look up
        self._holders = [Holders(held, rank) for held in tensors]
        self._plan = Plan()

    def save(self, blocks: Iterable[Block]) -> Plan:
        """Every block is written by one rank, or in parts by those that hold it in runs; of replicas one gives."""
        for block in blocks:
            shares = list(self._shares(block))
            for part, owner, pieces in self._parts(shares, block) or [self._assembled(shares, block)]:
                self._take(part, owner, pieces)
        return self._finished()

    def load(self, blocks: Iterable[Block], *, near: bool) -> Plan:
        """Every block that somebody needs is read: in parts by those that hold it in runs, else as a whole.

        Then its pieces go to all that hold them.

        Args:
            blocks: All that may be needed.
            near: All ranks share a machine: a rank that needs much of a block reads it itself, from the page cache.
        """
        for block in blocks:
            shares = list(self._shares(block))
            parts = self._parts(shares, block) if not self._alone and self._has_no_copies(shares) else []
            for part, reader, pieces in parts:
                self._take(part, reader, pieces)
            shares = [share for share in shares if share.overlap.boxes]
            if parts or not shares:
                continue
            readers = self._readers(shares, block) if near else [self._main_holder(shares, block)]
            first = min(readers, key=self._hand.__getitem__)
            taken: dict[int, list[Piece]] = {reader: [] for reader in readers}
            for share in shares:
                needing = () if self._alone or self._plan.peers else share.overlap.ranks_with_some()
                self._plan.peers = self._plan.peers or not all(rank in taken for rank in needing)
                for box in share.overlap.boxes if self._rank == first else share.overlap.mine:
                    holders = share.overlap.held.holders(box)
                    for source, to in self._deliveries(holders, taken, first):
                        taken[source] += share.pieces(box, source, to)
            for reader, pieces in taken.items():
                self._take(block, reader, pieces)
        return self._finished()

    def _parts(self, shares: Sequence["_Share"], block: Block) -> list[tuple[Block, int, list[Piece]]]:
        """A block that ranks hold in a few runs of bytes: each run and who writes it. Else nothing."""
        if self._alone or self._owners or not all(share.overlap.holders.flat for share in shares):
            return []
        if sum(len(share.overlap.boxes) for share in shares) > _RUNS:
            return []
        runs: list[tuple[int, list[tuple[Piece, Span]]]] = []
        end = 0
        for share in shares:
            for box in share.overlap.boxes:
                found = []
                for piece in share.pieces(box, -1, -1):
                    span = share.run(piece)
                    if span.at != end:  # boxes overlap
                        return []
                    end += share.bytes(span)
                    found.append((piece, span))
                owner = self._least_busy(share.overlap.held.holders(box), runs[-1][0] if runs else -1)
                if not runs or runs[-1][0] != owner:
                    runs.append((owner, []))
                runs[-1][1].extend(found)
        if end != block.size:
            return []
        ends = [run[0][1].at for _, run in runs[1:]] + [end]
        return [self._part(block, stop, owner, run) for stop, (owner, run) in zip(ends, runs, strict=True)]

    def _part(
        self, block: Block, stop: int, owner: int, run: Sequence[tuple[Piece, Span]]
    ) -> tuple[Block, int, list[Piece]]:
        first = run[0][1].at
        spans = tuple(replace(span, at=span.at - first) for _, span in run)
        part = Block(file=block.file, begin=block.begin + first, end=block.begin + stop, spans=spans)
        if owner != self._rank:
            return part, owner, []
        return part, owner, [replace(piece, at=piece.at - first, source=owner, to=owner) for piece, _ in run]

    def _has_no_copies(self, shares: Sequence["_Share"]) -> bool:
        """Whether nothing of a block is held by two ranks."""
        return all(len(share.overlap.held.holders(box)) == 1 for share in shares for box in share.overlap.boxes)

    def _assembled(self, shares: Sequence["_Share"], block: Block) -> tuple[Block, int, list[Piece]]:
        """A block, the rank that puts it together, and the pieces of it that this rank has to do with."""
        owner = self._owners[block.file] if self._owners else self._main_holder(shares, block)
        pieces: list[Piece] = []
        for share in shares:
            for box, source in self._givers(share.overlap, owner):
                pieces += share.pieces(box, source, owner)
        return block, owner, pieces

    def _givers(self, overlap: Overlap, owner: int) -> Iterator[tuple[int, int]]:
        """Boxes of a block and who gives them to its owner, as far as this rank has to do with it."""
        if owner != self._rank and self._plan.peers and not overlap.mine:
            return
        near = overlap.boxes.keys() if self._alone else overlap.boxes_of(owner)
        self._plan.peers = self._plan.peers or len(near) < len(overlap.boxes)
        for box in overlap.boxes if owner == self._rank else overlap.mine:
            holders = overlap.held.holders(box)
            source = owner if box in near else int(holders[self._turns[owner] % len(holders)])
            if self._rank in (source, owner):
                yield box, source

    def _deliveries(self, holders: torch.Tensor, readers: Container[int], first: int) -> Iterator[tuple[int, int]]:
        """From which reader to which holder, as far as this rank has to do with it; the first serves who reads not."""
        me = self._rank
        if me == first:
            yield from ((me, rank) for rank in holders.tolist() if rank == me or rank not in readers)
        elif bool((holders == me).any()):
            yield (me if me in readers else first), me

    def _take(self, block: Block, rank: int, pieces: list[Piece]) -> None:
        """Puts a block into the hands of a rank."""
        turn = self._turns[rank]
        self._turns[rank] += 1
        self._hand[rank] += block.size
        if pieces or rank == self._rank:
            task = Task(block=block, turn=turn, rank=rank, pieces=tuple(pieces))
            (self._plan.mine if rank == self._rank else self._plan.others).append(task)

    def _finished(self) -> Plan:
        self._plan.turns = max(self._turns)
        return self._plan

    def _main_holder(self, shares: Sequence["_Share"], block: Block) -> int:
        """Of the ranks that hold about as much of the block as any, the one with the least in hand."""
        if self._alone:
            return 0
        ranks = _joined([share.overlap.ranks for share in shares])
        if ranks.numel() == 0:
            return block.file % len(self._turns)
        if ranks.numel() == 1:
            return int(ranks)
        weights = _joined([share.overlap.weights for share in shares])
        return self._least_busy(ranks.masked_select(2 * weights >= weights.max()))

    def _least_busy(self, ranks: torch.Tensor, before: int = -1) -> int:
        """Of some ranks the one that has what comes before in hand, else the one with the least."""
        if ranks.numel() <= _FEW:
            few = ranks.tolist()
            return before if before in few else min(few, key=self._hand.__getitem__)
        if bool((ranks == before).any()):
            return before
        return int(ranks[self._busy.index_select(0, ranks).argmin()])

    def _readers(self, shares: Sequence["_Share"], block: Block) -> list[int]:
        """All that need some of the block if they are few, else those that need a quarter of it or more, or most."""
        if self._alone:
            return [0]
        some = {rank for share in shares for rank in share.overlap.ranks_with_some()}
        if len(some) <= _READERS:
            return sorted(some)
        found = {
            rank for share in shares for rank in share.overlap.ranks[4 * share.overlap.weights >= block.size].tolist()
        }
        return sorted(found) or [self._main_holder(shares, block)]

    def _shares(self, block: Block) -> Iterator["_Share"]:
        """Who holds how much of each span of a block."""
        for span in block.spans:
            yield _Share(span=span, overlap=self._holders[span.tensor].within(span.start, span.stop))


@dataclass(frozen=True, kw_only=True)
class _Share:
    """One span of a block and the boxes that reach into it."""

    span: Span
    overlap: Overlap

    def pieces(self, box: int, source: int, to: int) -> Iterator[Piece]:
        """The rectangles of the span within one box."""
        width, strides = self.overlap.held.dtype.itemsize, self.overlap.holders.strides
        for start, size in self.overlap.parts(box):
            first = sum(i * stride for i, stride in zip(start, strides, strict=True))
            at = self.span.at + (first - self.span.start) * width
            yield Piece(tensor=self.span.tensor, start=start, size=size, at=at, source=source, to=to)

    def run(self, piece: Piece) -> Span:
        """A piece of a flat box, which is one run of elements."""
        start = self.span.start + (piece.at - self.span.at) // self.overlap.held.dtype.itemsize
        return Span(tensor=self.span.tensor, start=start, stop=start + math.prod(piece.size), at=piece.at)

    def bytes(self, span: Span) -> int:
        """Bytes of some of its elements."""
        return (span.stop - span.start) * self.overlap.held.dtype.itemsize


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *parts])
