"""A rank's part of a save or a load: a few integers for each block, and its pieces when its turn has come."""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from par_groups import GlobalTensor

from .deal import Deal, Together
from .files import Area, FileBlock, TensorSpan
from .overlap import BoxIndex, BoxOverlap
from .replicas import Hop, Replicas

Shape = tuple[int, ...]
Run = TypeVar("Run", "AssignedRun", "HeldRun")


@dataclass(frozen=True, kw_only=True)
class BlockPiece:
    """A rectangle of a tensor that lies in one block and in one box of one rank.

    Args:
        tensor: Number of the tensor.
        start: Global index of the first element.
        size: Extent on each dim; in the block, the elements have the strides of the full tensor.
        at: Offset of the first element in the block, in bytes.
        source: Rank that sends the piece: on a save it holds it, on a load it reads the block or holds the same box.
        to: Rank that receives the piece: on a save it assembles the block, on a load it holds the piece.
        wave: Number of the wave within a round. A rank sends in a wave only what it has read, or received in an earlier
            wave.
    """

    tensor: int
    start: Shape
    size: Shape
    at: int
    source: int
    to: int
    wave: int = 0

    @property
    def count(self) -> int:
        """The number of its elements."""
        return math.prod(self.size)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A block and those of its pieces that this rank sends or receives.

    Args:
        block: The block.
        turn: Index of the block among the blocks that `rank` writes or reads and of which other ranks send or receive
            pieces.
        rank: The rank that writes or reads the block.
        pieces: The pieces in the order in which they are packed.
    """

    block: FileBlock
    turn: int
    rank: int
    pieces: tuple[BlockPiece, ...]

    @property
    def has_gaps(self) -> bool:
        """Whether its pieces do not make up what lies in the block."""
        return sum(piece.count for piece in self.pieces) < sum(span.stop - span.start for span in self.block.spans)


@dataclass(frozen=True)
class AssignedRun:
    """Run of blocks that is assigned to ranks.

    Args:
        deal: Assignment of the blocks.
        sends: Whether any rank sends pieces to another rank.
    """

    deal: Deal
    sends: bool

    @property
    def first(self) -> int:
        """The first block."""
        return self.deal.first

    @property
    def stop(self) -> int:
        """One past the last block."""
        return self.deal.stop


@dataclass(frozen=True)
class HeldRun:
    """A run of blocks first .. stop - 1 of which each rank writes or reads what it holds."""

    first: int
    stop: int


class Blocks:
    """Blocks of all areas, with the pieces of each block that one rank sends or receives.

    Args:
        tensors: All tensors.
        indexes: Boxes of each tensor.
        areas: Data areas of the files.
        rank: Rank whose pieces are listed.
        hosts: Number of each rank's host. None: all ranks share one host.
        saving: Whether the ranks save; else they load.
    """

    def __init__(
        self,
        tensors: Sequence[GlobalTensor],
        indexes: Sequence[BoxIndex],
        areas: Sequence[Area],
        rank: int,
        *,
        hosts: Sequence[int] | None,
        saving: bool,
    ) -> None:
        self.areas, self.rank, self.saving = areas, rank, saving
        self._tensors, self._indexes, self._hosts = tensors, indexes, hosts
        self._runs: dict[
            int, Sequence[AssignedRun | HeldRun]
        ] = {}  # by area: those with blocks in which this rank takes part
        self._replicas: dict[tuple[BoxIndex, int, tuple[int, ...]], Replicas] = {}

    def mine(self, turn: int, area: int, number: int, low: int, high: int) -> Task:
        """Return the task for a block, or bytes low .. high - 1 of it, that this rank writes or reads."""
        block = self.areas[area].at(number, self._tensors, low, high)
        run = self.run_of(area, number)
        pieces: list[BlockPiece] = []
        for span, overlap in self._overlaps(block):
            if isinstance(run, HeldRun) or not run.sends:
                for box in overlap.boxes_of(self.rank):
                    pieces += _pieces(span, overlap, box, self.rank, self.rank)
            elif self.saving:
                own = overlap.index.held_by(self.rank)
                for box in overlap.boxes:
                    # The replicas take turns as senders, so that no rank sends the same box for every block.
                    source = self.rank if box in own else _in_turn(self.givers(overlap.index, box, self.rank), turn)
                    pieces += _pieces(span, overlap, box, source, self.rank)
            else:
                own = overlap.index.held_by(self.rank)
                # If several ranks read a block together, only one of them sends it to the others.
                is_sender = next(run.deal.segments(number, number + 1))[0] == self.rank
                for box in overlap.boxes:
                    if box in own:
                        pieces += _pieces(span, overlap, box, self.rank, self.rank)
                    for hop in self._hops(run, overlap.index, box, self.rank) if is_sender else ():
                        pieces += _pieces(span, overlap, box, hop.source, hop.to, hop.wave)
        return Task(block=block, turn=turn, rank=self.rank, pieces=tuple(pieces))

    def other(self, turn: int, rank: int, area: int, number: int) -> Task:
        """Return the task for a block that another rank writes or reads: the pieces that this rank sends or takes."""
        block = self.areas[area].at(number, self._tensors)
        run = self.run_of(area, number)
        pieces: list[BlockPiece] = []
        for span, overlap in self._overlaps(block):
            index = overlap.index
            for box in overlap.boxes_of(self.rank):
                if not self.saving:
                    for hop in self._hops(run, index, box, rank):
                        pieces += _pieces(span, overlap, box, hop.source, hop.to, hop.wave)
                elif box not in index.held_by(rank) and _in_turn(self.givers(index, box, rank), turn) == self.rank:
                    pieces += _pieces(span, overlap, box, self.rank, rank)
        return Task(block=block, turn=turn, rank=rank, pieces=tuple(pieces))

    def givers(self, index: BoxIndex, box: int, taker: int) -> Sequence[int]:
        """Return the ranks that send a box to a rank that does not hold it, in round-robin order."""
        return self._replicas_of(index, box).givers(taker)

    def _hops(self, run: AssignedRun | HeldRun, index: BoxIndex, box: int, reader: int) -> Iterator[Hop]:
        """Yield this rank's hops of a box from the rank that sends it to all holders that do not read it."""
        # Ranks that read the block themselves need no hop.
        readers = run.deal.ranks if isinstance(run, AssignedRun) and isinstance(run.deal, Together) else ()
        return self._replicas_of(index, box, readers).hops(reader, self.rank)

    def _replicas_of(self, index: BoxIndex, box: int, without: tuple[int, ...] = ()) -> Replicas:
        """Return the ranks that hold a box, without some of them."""
        key = index, box, without
        if key not in self._replicas:
            holders = [rank for rank in index.holders(box) if rank not in without]
            self._replicas[key] = Replicas(holders, self._hosts)
        return self._replicas[key]

    def parts(self, area: int, number: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of a block that this rank holds, and writes or reads: first byte, and last plus one."""
        block = self.areas[area].at(number, self._tensors)
        for low, high, holder in parts_of(block, self._overlaps(block), area + number):
            if holder == self.rank:
                yield low, high

    def keep(self, area: int, runs: Sequence[AssignedRun | HeldRun], numbers: Iterable[int]) -> None:
        """Keep the runs of some blocks of an area, of all its runs, to be asked about these blocks later."""
        kept: list[AssignedRun | HeldRun] = []
        for number in sorted(numbers):
            if not kept or number >= kept[-1].stop:
                kept.append(_run_of(runs, number))
        if kept:
            self._runs[area] = kept

    def reached(self, area: int) -> Iterator[tuple[int, int, BoxIndex, int]]:
        """Yield this rank's boxes in an area: first block, last block plus one, boxes of the tensor, and box number."""
        own = self.areas[area]
        for tensor, begin, _ in own.placed:
            index, width = self._indexes[tensor], self._tensors[tensor].dtype.itemsize
            for box in index.held_by(self.rank):
                # From the first to the last element of the box: in between may be blocks without any of its elements.
                first, last = index.cut.ends(box)
                low, high = begin + first * width - own.begin, begin + last * width - own.begin
                yield low // own.block, -(-high // own.block), index, box

    def run_of(self, area: int, number: int) -> AssignedRun | HeldRun:
        """Return the run that contains a block; this rank takes part in it."""
        return _run_of(self._runs[area], number)

    def is_wanted(self, area: int, number: int) -> bool:
        """Return whether any rank holds a part of a block."""
        return any(overlap.boxes for _, overlap in self._overlaps(self.areas[area].at(number, self._tensors)))

    def _overlaps(self, block: FileBlock) -> list[tuple[TensorSpan, BoxOverlap]]:
        """Return the overlap of each span of a block with the boxes of ranks."""
        return [(span, self._indexes[span.tensor].within(span.start, span.stop)) for span in block.spans]


class RankPlan:
    """Part of one rank in a save or a load.

    Args:
        blocks: Blocks of all areas.
        listed: Blocks in which this rank takes part.
        turns: Maximum number of blocks that any rank writes or reads with other ranks; equal on every rank.
        window: Number of blocks that one request of a load reads.
    """

    def __init__(self, blocks: Blocks, listed: "BlockList", turns: int, *, window: int = 1) -> None:
        self.turns, self.peers = turns, listed.peers
        self._blocks = blocks
        shared, own = _rows(listed.shared, 5), _rows(listed.alone, 5)
        count = len(own)  # in which nobody else takes part: they are spread over the turns of the others
        places = torch.arange(count, device="cpu")
        if window > 1:  # which stays in one round
            _, lengths = torch.stack([own[:, 1], own[:, 2] // window], 1).unique_consecutive(dim=0, return_counts=True)
            places = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        # Blocks without other ranks are spread evenly over the rounds, so that they fill the time of messages.
        own[:, 0] = places * turns // max(count, 1) if turns else places
        self._mine, self._others = _by_turn(torch.cat([shared, own])), _by_turn(_rows(listed.others, 4))

    @property
    def mine(self) -> Iterator[Task]:
        """The blocks that this rank writes or reads, in order."""
        return (self._blocks.mine(*row) for row in self._mine.tolist())

    @property
    def others(self) -> Iterator[Task]:
        """Blocks that other ranks write or read, of which this rank gives or takes pieces, in order."""
        return self._of_others(self._others)

    def _of_others(self, rows: torch.Tensor) -> Iterator[Task]:
        tasks = (self._blocks.other(*row) for row in rows.tolist())
        return (task for task in tasks if task.pieces)  # a box may reach around a block

    def files(self) -> list[int]:
        """Return the number of the file of each block that this rank writes or reads."""
        return [self._blocks.areas[area].file for area in self._mine[:, 1].tolist()]

    def rounds(self, size: int | None) -> Iterator[tuple[list[Task], list[Task]]]:
        """Yield this rank's blocks and the blocks of other ranks in rounds of `size` turns.

        If ranks send each other pieces, all ranks have the same number of rounds. The pieces are computed round by
        round.

        Args:
            size: Number of turns of a round; None: all turns.
        """
        mine, others = self._mine[:, 0].contiguous(), self._others[:, 0].contiguous()
        # All ranks must run the same number of rounds if they exchange pieces, even ranks with fewer blocks.
        turns = self.turns if self.peers else len(mine)
        for first in range(0, turns, size or max(turns, 1)):
            last = turns if size is None else first + size
            edges = torch.tensor([first, last], device="cpu")
            own, given = torch.searchsorted(mine, edges).tolist(), torch.searchsorted(others, edges).tolist()
            yield (
                [self._blocks.mine(*row) for row in self._mine[slice(*own)].tolist()],
                list(self._of_others(self._others[slice(*given)])),
            )


def parts_of(
    block: FileBlock, overlaps: Iterable[tuple[TensorSpan, BoxOverlap]], number: int = 0, *, limit: int | None = None
) -> list[tuple[int, int, int]]:
    """Return the parts of a block that ranks hold in runs of bytes: first byte, last plus one, and the part's rank.

    Args:
        block: The block.
        overlaps: Overlap of each of its spans with the boxes of ranks.
        number: The block's number, by which replicas take turns.
        limit: The most runs; None: any number.

    Returns:
        The runs one after the other; none where the block does not consist of so few.
    """
    found: list[tuple[int, int, int]] = []
    count, end = 0, 0
    for span, overlap in overlaps:
        runs = overlap.stretch.runs(None if limit is None else limit - count)
        if runs is None:
            return []
        count += len(runs)
        for start, stop, box in runs:
            low, high = span.at + (start - span.start) * span.width, span.at + (stop - span.start) * span.width
            if low != end:  # boxes overlap, or leave something out
                return []
            holders = overlap.index.holders(box)
            before = found[-1][2] if found else -1
            # A replica that has the part before takes this part as well: two parts become one write.
            holder = before if before in holders else _in_turn(holders, number)
            if holder == before:
                low = found.pop()[0]
            found.append((low, high, holder))
            end = high
    return found if end == block.size else []


class BlockList:
    """Blocks in which a rank takes part, as a few integers each; it stores nothing about all other blocks.

    Args:
        blocks: Blocks of all areas.
        dealt: Runs of blocks of each area, in order.

    Attributes:
        shared: Blocks that this rank writes or reads with other ranks: turn, area, number, first byte, last plus one.
        alone: Blocks in which no other rank takes part, with the same fields; they have no turn yet.
        others: Blocks of other ranks that may contain pieces of this rank: turn, rank, area, number.
        peers: Whether any rank sends pieces to another rank; equal on every rank.
    """

    def __init__(self, blocks: Blocks, dealt: Iterable[Sequence[AssignedRun | HeldRun]]) -> None:
        self.shared, self.alone, self.others = array("q"), array("q"), array("q")
        self.peers = False
        for area, runs in enumerate(dealt):
            self.peers |= any(isinstance(run, AssignedRun) and run.sends for run in runs)
            blocks.keep(area, runs, {*self._list_mine(blocks, area, runs), *self._list_others(blocks, area, runs)})

    def _list_mine(self, blocks: Blocks, area: int, runs: Sequence[AssignedRun | HeldRun]) -> Iterator[int]:
        """List the blocks of an area that this rank writes or reads, and yield their numbers."""
        own = blocks.areas[area]
        is_full = sum(last - first for _, first, last in own.placed) == own.end - own.begin
        for run in runs:
            if isinstance(run, AssignedRun):
                rows = self.shared if run.sends else self.alone
                for number, turn in run.deal.of(blocks.rank):
                    if blocks.saving or (is_full and run.sends) or blocks.is_wanted(area, number):
                        rows.extend((turn, area, number, 0, own.block))
                        yield number
        numbers: set[int] = set()
        parts = [run for run in runs if isinstance(run, HeldRun)]
        if parts:
            for first, stop, _, _ in blocks.reached(area):
                for run in _between(parts, first, stop):
                    numbers.update(range(max(first, run.first), min(stop, run.stop)))
        for number in sorted(numbers):
            for low, high in blocks.parts(area, number):
                self.alone.extend((0, area, number, low, high))
                yield number

    def _list_others(self, blocks: Blocks, area: int, runs: Sequence[AssignedRun | HeldRun]) -> Iterator[int]:
        """List the blocks of an area, of other ranks, that this rank may have pieces of, and yield their numbers."""
        rank = blocks.rank
        given: dict[int, tuple[int, int]] = {}
        shared = [run for run in runs if isinstance(run, AssignedRun) and run.sends]
        if not shared:
            return
        for first, stop, index, box in blocks.reached(area):
            for run in _between(shared, first, stop):
                # Ranks that read a block together need no pieces of it from each other.
                if isinstance(run.deal, Together) and rank in run.deal.ranks:
                    continue
                for other, turn, numbers in run.deal.segments(first, stop):
                    # The writer of a block needs no piece of a box that it holds itself.
                    if other == rank or (blocks.saving and box in index.held_by(other)):
                        continue
                    givers = blocks.givers(index, box, other) if blocks.saving else (rank,)
                    if rank not in givers:
                        continue
                    # The sender of a block follows from its turn, so this rank's blocks are every len(givers)-th of the
                    # run.
                    for at in range((givers.index(rank) - turn) % len(givers), len(numbers), len(givers)):
                        given[numbers[at]] = turn + at, other
        for number, (turn, other) in given.items():
            self.others.extend((turn, other, area, number))
            yield number


def _run_of(runs: Sequence[AssignedRun | HeldRun], number: int) -> AssignedRun | HeldRun:
    """Return the run that contains a block."""
    return runs[bisect_right(runs, number, key=lambda run: run.first) - 1]


def _between(runs: "Sequence[Run]", first: int, stop: int) -> "Sequence[Run]":
    """Return the runs that contain any of the blocks first .. stop - 1."""
    low = bisect_right(runs, first, key=lambda run: run.stop)
    return runs[low : bisect_left(runs, stop, key=lambda run: run.first)]


def _rows(values: "array[int]", width: int) -> torch.Tensor:
    """Return integers as an int64 tensor of rows."""
    if not values:
        return torch.empty(0, width, dtype=torch.int64, device="cpu")
    return torch.frombuffer(values, dtype=torch.int64).view(-1, width)


def _by_turn(rows: torch.Tensor) -> torch.Tensor:
    """Sort rows by their first column (stable)."""
    return rows[rows[:, 0].argsort(stable=True)]


def _in_turn(ranks: Sequence[int], turn: int) -> int:
    """Return one of several ranks, round-robin by turn."""
    return ranks[turn % len(ranks)]


def _pieces(
    span: TensorSpan, overlap: BoxOverlap, box: int, source: int, to: int, wave: int = 0
) -> Iterator[BlockPiece]:
    """Yield the rectangles of a span within one box, as pieces from one rank to another."""
    for start, size in overlap.stretch.parts(box):
        first = sum(i * stride for i, stride in zip(start, overlap.index.cut.strides, strict=True))
        at = span.at + (first - span.start) * span.width
        yield BlockPiece(tensor=span.tensor, start=start, size=size, at=at, source=source, to=to, wave=wave)
