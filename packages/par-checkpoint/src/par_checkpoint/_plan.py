"""Who writes or reads which block of which file, and who sends what to whom. Pure, and the same on every rank.

A block is a range of bytes of a file. One rank assembles it from what it holds and what others send, checksums it and
writes it; loading is the same way back. So every byte is checksummed and touches the disk once, however it is cut.
"""

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from par_groups import cut, whole

from ._claims import Held
from ._coverage import row_major

Shape = tuple[int, ...]


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
        self._tensors = tensors
        self._rank = rank
        self._owners = owners
        self._busy = torch.zeros(size, dtype=torch.int64)  # bytes that each rank has in hand
        self._turns = [0] * size
        self._reach = [_reach(held) for held in tensors]
        self._plan = Plan()

    def save(self, blocks: Iterable[Block]) -> Plan:
        """Every block is written by one rank; of replicas one gives."""
        for block in blocks:
            shares = list(self._shares(block))
            owner = self._owners[block.file] if self._owners else self._least_busy(shares, block)
            pieces: list[Piece] = []
            away = False
            for share in shares:
                for box in share.boxes:
                    holders = self._tensors[share.tensor].holders(box)
                    local = bool((holders == owner).any())
                    source = owner if local else int(holders[self._turns[owner] % len(holders)])
                    away = away or not local
                    if self._rank in (source, owner):
                        pieces += share.pieces(box, source, owner)
            self._take(block, owner, pieces, away=away)
        return self._finished()

    def load(self, blocks: Iterable[Block], *, near: bool) -> Plan:
        """Every block that somebody needs is read, and its pieces go to all that hold them.

        Args:
            blocks: All that may be needed.
            near: All ranks share a machine: a rank that needs much of a block reads it itself, from the page cache.
        """
        for block in blocks:
            shares = [share for share in self._shares(block) if share.boxes]
            if not shares:
                continue
            first = self._least_busy(shares, block)
            readers = self._readers(shares, block) if near else [first]
            first = first if first in readers else readers[0]
            taken: dict[int, list[Piece]] = {reader: [] for reader in readers}
            away = False
            for share in shares:
                for box in share.boxes:
                    holders = self._tensors[share.tensor].holders(box)
                    away = away or self._plan.peers or any(rank not in taken for rank in holders.tolist())
                    for source, to in self._deliveries(holders, taken, first):
                        taken[source] += share.pieces(box, source, to)
            for reader, pieces in taken.items():
                self._take(block, reader, pieces, away=away)
        return self._finished()

    def _deliveries(self, holders: torch.Tensor, readers: Container[int], first: int) -> Iterator[tuple[int, int]]:
        """From which reader to which holder, as far as this rank has to do with it; the first serves who reads not."""
        me = self._rank
        if me == first:
            yield from ((me, rank) for rank in holders.tolist() if rank == me or rank not in readers)
        elif bool((holders == me).any()):
            yield (me if me in readers else first), me

    def _take(self, block: Block, rank: int, pieces: list[Piece], *, away: bool) -> None:
        """Puts a block into the hands of a rank."""
        turn = self._turns[rank]
        self._turns[rank] += 1
        self._busy[rank] += block.size
        self._plan.peers = self._plan.peers or away
        if pieces or rank == self._rank:
            task = Task(block=block, turn=turn, rank=rank, pieces=tuple(pieces))
            (self._plan.mine if rank == self._rank else self._plan.others).append(task)

    def _finished(self) -> Plan:
        self._plan.turns = max(self._turns)
        return self._plan

    def _least_busy(self, shares: Sequence["_Share"], block: Block) -> int:
        """Of the ranks that hold about as much of the block as any, the one with the least in hand."""
        most = max((max(share.bytes, default=0) for share in shares), default=0)
        candidates = [
            self._tensors[share.tensor].holders(box)
            for share in shares
            for box, size in zip(share.boxes, share.bytes, strict=True)
            if 2 * size >= most
        ]
        if not candidates:
            return block.file % len(self._turns)
        ranks = candidates[0] if len(candidates) == 1 else torch.cat(candidates)
        if len(ranks) == 1:
            return int(ranks[0])
        return int(ranks[self._busy[ranks].argmin()])

    def _readers(self, shares: Sequence["_Share"], block: Block) -> list[int]:
        """The ranks that need a quarter of the block or more; if there are none, one of those that need most."""
        found = {
            rank
            for share in shares
            for box, size in zip(share.boxes, share.bytes, strict=True)
            if 4 * size >= block.size
            for rank in self._tensors[share.tensor].holders(box).tolist()
        }
        return sorted(found) or [self._least_busy(shares, block)]

    def _shares(self, block: Block) -> Iterator["_Share"]:
        """Who holds how much of each span of a block."""
        for span in block.spans:
            held = self._tensors[span.tensor]
            low, high = self._reach[span.tensor].between(span.start, span.stop)
            rectangles = _rectangles(held.shape, span)
            sizes = _overlaps(held, rectangles, low, high)
            boxes = [low + i for i, size in enumerate(sizes) if size]
            width = held.dtype.itemsize
            yield _Share(
                held=held,
                span=span,
                rectangles=rectangles,
                boxes=boxes,
                bytes=[size * width for size in sizes if size],
            )


@dataclass(frozen=True, kw_only=True)
class _Share:
    """One span of a block and the boxes that reach into it."""

    held: Held
    span: Span
    rectangles: list[tuple[Shape, Shape]]
    boxes: list[int]
    bytes: list[int]

    @property
    def tensor(self) -> int:
        return self.span.tensor

    def pieces(self, box: int, source: int, to: int) -> Iterator[Piece]:
        """The rectangles of the span within one box."""
        box_start, box_size = self.held.starts[box].tolist(), self.held.sizes[box].tolist()
        strides = row_major(self.held.shape)
        for start, size in self.rectangles:
            low = tuple(max(a, b) for a, b in zip(start, box_start, strict=True))
            high = tuple(min(a + n, b + m) for a, n, b, m in zip(start, size, box_start, box_size, strict=True))
            if all(a < b for a, b in zip(low, high, strict=True)):
                first = sum(i * stride for i, stride in zip(low, strides, strict=True))
                yield Piece(
                    tensor=self.tensor,
                    start=low,
                    size=tuple(b - a for a, b in zip(low, high, strict=True)),
                    at=self.span.at + (first - self.span.start) * self.held.dtype.itemsize,
                    source=source,
                    to=to,
                )


@dataclass(frozen=True)
class _Reach:
    """Where in row-major order each box begins, and how far it and all before it reach."""

    first: torch.Tensor
    reached: torch.Tensor

    def between(self, start: int, stop: int) -> tuple[int, int]:
        """The run of boxes outside of which none reaches into elements start .. stop - 1."""
        if len(self.first) <= 4:
            return 0, len(self.first)
        low = int(torch.searchsorted(self.reached, start))
        return low, max(low, int(torch.searchsorted(self.first, stop)))


def _reach(held: Held) -> _Reach:
    if len(held) == 0 or not held.shape:
        return _Reach(torch.zeros(len(held), dtype=torch.int64), torch.zeros(len(held), dtype=torch.int64))
    strides = torch.tensor(row_major(held.shape))
    first = (held.starts * strides).sum(1)
    last = ((held.starts + held.sizes - 1) * strides).sum(1)
    return _Reach(first, last.cummax(0).values)


def _rectangles(shape: Shape, span: Span) -> list[tuple[Shape, Shape]]:
    """A row-major range of a tensor as rectangles: start and size."""
    if span.stop - span.start == math.prod(shape):
        return [((0,) * len(shape), shape)]
    return [(box.start, box.size) for box in cut(whole(shape, ()), span.start, span.stop).boxes]


def _overlaps(held: Held, rectangles: Sequence[tuple[Shape, Shape]], low: int, high: int) -> list[int]:
    if len(held) == 1 and math.prod(held.sizes[0].tolist()) == math.prod(held.shape):  # whole everywhere: most of all
        return [sum(math.prod(size) for _, size in rectangles)]
    starts, stops = held.starts[low:high], held.starts[low:high] + held.sizes[low:high]
    total = torch.zeros(high - low, dtype=torch.int64)
    for start, size in rectangles:
        begin = torch.tensor(start, dtype=torch.int64)
        end = begin + torch.tensor(size, dtype=torch.int64)
        total += (torch.minimum(stops, end) - torch.maximum(starts, begin)).clamp_(min=0).prod(1)
    return total.tolist()
