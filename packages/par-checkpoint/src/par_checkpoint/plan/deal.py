"""Formulas that assign a run of blocks to ranks: every rank can compute the rank of any block, and lists only its own.

The turn of a block is its index among the blocks that one rank writes or reads together with other ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Rotation:
    """Blocks of a run, assigned to the ranks round-robin.

    Args:
        first: Number of the first block.
        stop: Number of the last block, plus one.
        ranks: The ranks that take blocks.
        start: Index in `ranks` of the rank that takes the first block.
        turns: Turn of the first block of each rank in this run.
    """

    first: int
    stop: int
    ranks: tuple[int, ...]
    start: int
    turns: tuple[int, ...]

    def of(self, rank: int) -> Iterator[tuple[int, int]]:
        """Yield the blocks that a rank takes, with their turns there."""
        if rank in self.ranks:
            place = self.ranks.index(rank)
            # The rank at index `start` takes the first block, so this rank begins as many blocks later as it is
            # behind that rank.
            begin = self.first + (place - self.start) % len(self.ranks)
            for turn, block in enumerate(range(begin, self.stop, len(self.ranks)), self.turns[place]):
                yield block, turn

    def segments(self, first: int, stop: int) -> Iterator[tuple[int, int, range]]:
        """Yield the blocks first ..

        Stop - 1 in evenly spaced runs of one rank: rank, turn of the first block, and run.
        """
        count = len(self.ranks)
        for place, rank in enumerate(self.ranks):
            begin = self.first + (place - self.start) % count
            # The rank takes every `count`-th block, so its first block at or behind `first` follows by arithmetic
            # instead of a loop.
            skipped = max(-(-(first - begin) // count), 0)
            blocks = range(begin + skipped * count, min(stop, self.stop), count)
            if blocks:
                yield rank, self.turns[place] + skipped, blocks


@dataclass(frozen=True)
class Windows:
    """Windows of a run of blocks, assigned to the ranks round-robin.

    A window is a number of consecutive blocks that a rank reads with one request.

    Args:
        first: Number of the first block, which begins a window.
        stop: Number of the last block, plus one.
        ranks: The ranks that take windows.
        start: Index in `ranks` of the rank that takes the first window.
        turns: Turn of the first block of each rank in this run.
        window: Number of blocks in a window; the last window may be shorter.
    """

    first: int
    stop: int
    ranks: tuple[int, ...]
    start: int
    turns: tuple[int, ...]
    window: int

    @property
    def count(self) -> int:
        """The number of windows."""
        return -(-(self.stop - self.first) // self.window)

    def numbers(self, place: int) -> range:
        """Return the windows of the rank at an index in `ranks`."""
        return range((place - self.start) % len(self.ranks), self.count, len(self.ranks))

    def of(self, rank: int) -> Iterator[tuple[int, int]]:
        """Yield the blocks that a rank takes, with their turns there."""
        if rank in self.ranks:
            for number in self.numbers(self.ranks.index(rank)):
                first = self.first + number * self.window
                for _, turn, blocks in self.segments(first, first + self.window):
                    yield from zip(blocks, range(turn, turn + len(blocks)), strict=True)

    def segments(self, first: int, stop: int) -> Iterator[tuple[int, int, range]]:
        """Yield the blocks first .. stop - 1 in runs of one rank: rank, turn of the first block, and run."""
        for number, done, blocks in _stretches(max(first, self.first), min(stop, self.stop), self.first, self.window):
            place = (self.start + number) % len(self.ranks)
            # The rank has taken one window in every full round before this one, so its turn follows without a loop.
            turn = self.turns[place] + number // len(self.ranks) * self.window + done
            yield self.ranks[place], turn, blocks


@dataclass(frozen=True)
class ByteShares:
    """Consecutive runs of the blocks of several areas, one run for each rank.

    Args:
        first: Number of the first block.
        stop: Number of the last block, plus one.
        chosen: Ranks that take blocks of any of the areas.
        offset: Number of blocks in the areas before.
        chunk: Number of blocks per rank.
        turns: Number of blocks of each rank before the blocks of all these areas.
    """

    first: int
    stop: int
    chosen: tuple[int, ...]
    offset: int
    chunk: int
    turns: tuple[int, ...]

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take some of the blocks."""
        last = self.offset + self.stop - self.first - 1
        return self.chosen[self.offset // self.chunk : last // self.chunk + 1]

    def of(self, rank: int) -> Iterator[tuple[int, int]]:
        """Yield the blocks that a rank takes, with their turns there."""
        if rank in self.ranks:
            for _, turn, blocks in (part for part in self.segments(self.first, self.stop) if part[0] == rank):
                yield from zip(blocks, range(turn, turn + len(blocks)), strict=True)

    def segments(self, first: int, stop: int) -> Iterator[tuple[int, int, range]]:
        """Yield the blocks first .. stop - 1 in runs of one rank: rank, turn of the first block, and run."""
        before = self.first - self.offset
        for place, done, blocks in _stretches(max(first, self.first), min(stop, self.stop), before, self.chunk):
            yield self.chosen[place], self.turns[place] + done, blocks


@dataclass(frozen=True)
class Together:
    """Blocks that all ranks read, from the page cache of their machine.

    One of the ranks sends each block to other machines.

    Args:
        first: Number of the first block.
        stop: Number of the last block, plus one.
        ranks: Ranks that read.
        turns: Number of blocks of each rank before this run.
    """

    first: int
    stop: int
    ranks: tuple[int, ...]
    turns: tuple[int, ...]

    def of(self, rank: int) -> Iterator[tuple[int, int]]:
        """Yield the blocks that a rank reads, with their turns there."""
        if rank in self.ranks:
            turn = self.turns[self.ranks.index(rank)]
            yield from zip(range(self.first, self.stop), range(turn, turn + self.stop - self.first), strict=True)

    def segments(self, first: int, stop: int) -> Iterator[tuple[int, int, range]]:
        """Yield the blocks first ..

        Stop - 1 one by one: the rank that sends the block, the turn there, and the block.
        """
        # All ranks have read the block, so the sends are rotated, too, to spread the network traffic.
        sending = Rotation(self.first, self.stop, self.ranks, self.first % len(self.ranks), self.turns)
        for rank, _, blocks in sending.segments(first, stop):
            for block in blocks:
                yield rank, self.turns[self.ranks.index(rank)] + block - self.first, range(block, block + 1)


Deal = Rotation | Windows | ByteShares | Together
"""Who writes or reads the blocks first .. stop - 1 of an area."""


def _stretches(begin: int, end: int, zero: int, width: int) -> Iterator[tuple[int, int, range]]:
    """Yield the blocks begin .. end - 1 in stretches of `width`; the first stretch begins at block `zero`.

    Yields:
        Number of the stretch, number of its blocks before these, and these blocks.
    """
    while begin < end:
        number, done = divmod(begin - zero, width)
        after = min(begin + width - done, end)
        yield number, done, range(begin, after)
        begin = after
