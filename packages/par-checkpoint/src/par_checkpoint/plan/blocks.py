"""The blocks that files are cut into: what is checksummed, written and read as one."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from .claims import GlobalTensor


@dataclass(frozen=True, kw_only=True)
class Span:
    """What lies of one tensor in a block: row-major elements start .. stop - 1, of `width` bytes, from byte `at` on."""

    tensor: int
    start: int
    stop: int
    at: int
    width: int

    @property
    def place(self) -> tuple[int, int, int, int]:
        """What lies where, of whichever tensor."""
        return self.start, self.stop, self.at, self.width


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
class Area:
    """A stretch of a file that is cut into blocks of one size; the last block may be shorter.

    Args:
        file: Number of the file.
        begin: First byte of the stretch.
        end: One past its last byte.
        block: Bytes of a block.
        placed: Number, first byte and one past the last byte of each tensor, by first byte.
    """

    file: int
    begin: int
    end: int
    block: int
    placed: tuple[tuple[int, int, int], ...]

    @property
    def count(self) -> int:
        """The number of blocks."""
        return -(-(self.end - self.begin) // self.block)

    def at(self, number: int, tensors: Sequence[GlobalTensor], low: int = 0, high: int | None = None) -> Block:
        """One of the blocks, or bytes low .. high - 1 of it.

        Args:
            number: Its number.
            tensors: All tensors.
            low: First byte of the part that is wanted, counted from the block's first.
            high: One past its last byte; None: all to the end.
        """
        start = self.begin + number * self.block
        begin, end = start + low, min(start + (self.block if high is None else high), self.end)
        spans = []
        upcoming = max(bisect_right(self._firsts, begin) - 1, 0)
        while upcoming and self.placed[upcoming - 1][2] > begin:  # behind tensors without elements
            upcoming -= 1
        for tensor, first, last in self.placed[upcoming:]:
            if first >= end:
                break
            if last > max(first, begin):
                width = tensors[tensor].dtype.itemsize
                inside, stop = max(first, begin), min(last, end)
                spans.append(
                    Span(
                        tensor=tensor,
                        start=(inside - first) // width,
                        stop=(stop - first) // width,
                        at=inside - begin,
                        width=width,
                    )
                )
        return Block(file=self.file, begin=begin, end=end, spans=tuple(spans))

    def stretches(self) -> Iterator[tuple[int, int, tuple[int, ...]]]:
        """The blocks in runs: first, one past the last, and the numbers of the tensors of which each has all of it.

        These are several where they are filled from the same bytes. A block with parts of tensors that lie one after
        the other is a run by itself, of no tensor.
        """
        upcoming = 0
        for (first, last), placed in groupby(self.placed, key=lambda tensor: tensor[1:]):
            low = max(-(-(first - self.begin) // self.block), upcoming)
            high = self.count if last == self.end else (last - self.begin) // self.block
            if low < high:
                yield from ((number, number + 1, ()) for number in range(upcoming, low))
                yield low, high, tuple(tensor for tensor, _, _ in placed)
                upcoming = high
        yield from ((number, number + 1, ()) for number in range(upcoming, self.count))

    @cached_property
    def _firsts(self) -> list[int]:
        return [first for _, first, _ in self.placed]
