"""The blocks of files, which are checksummed, written and read as units."""

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby
from typing import overload

from .claims import GlobalTensor


class Placed(Sequence[tuple[int, int, int]]):
    """Number, first byte and one past the last byte of each tensor in a file, kept as integers of 8 bytes each.

    Args:
        placed: All of them.
    """

    def __init__(self, placed: Iterable[tuple[int, int, int]]) -> None:
        self._flat = array("q", chain.from_iterable(placed))

    def __len__(self) -> int:
        return len(self._flat) // 3

    @overload
    def __getitem__(self, place: int) -> tuple[int, int, int]: ...

    @overload
    def __getitem__(self, place: slice) -> "Placed": ...

    def __getitem__(self, place: "int | slice") -> "tuple[int, int, int] | Placed":
        if isinstance(place, slice):
            return Placed(self[number] for number in range(*place.indices(len(self))))
        at = 3 * range(len(self))[place]
        return self._flat[at], self._flat[at + 1], self._flat[at + 2]

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        each = iter(self._flat)
        return zip(each, each, each, strict=True)


@dataclass(frozen=True, kw_only=True)
class TensorSpan:
    """What lies of one tensor in a block: row-major elements start .. stop - 1, of `width` bytes, from byte `at` on."""

    tensor: int
    start: int
    stop: int
    at: int
    width: int

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Spans of tensors in the block, in order."""
        return self.start, self.stop, self.at, self.width


@dataclass(frozen=True, kw_only=True)
class FileBlock:
    """Bytes begin .. end - 1 of a file, and what they hold."""

    file: int
    begin: int
    end: int
    spans: tuple[TensorSpan, ...]

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
    placed: Sequence[tuple[int, int, int]]

    @property
    def count(self) -> int:
        """The number of blocks."""
        return -(-(self.end - self.begin) // self.block)

    def at(self, number: int, tensors: Sequence[GlobalTensor], low: int = 0, high: int | None = None) -> FileBlock:
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
        for place in range(upcoming, len(self.placed)):
            tensor, first, last = self.placed[place]
            if first >= end:
                break
            if last > max(first, begin):
                width = tensors[tensor].dtype.itemsize
                inside, stop = max(first, begin), min(last, end)
                spans.append(
                    TensorSpan(
                        tensor=tensor,
                        start=(inside - first) // width,
                        stop=(stop - first) // width,
                        at=inside - begin,
                        width=width,
                    )
                )
        return FileBlock(file=self.file, begin=begin, end=end, spans=tuple(spans))

    def stretches(self) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
        """The blocks in runs, each within a tensor: first, one past the last, the tensor's first byte, and its number.

        There are several numbers where tensors are filled from the same bytes. A block with parts of tensors that lie
        one after the other is a run by itself, of no tensor.
        """
        upcoming = 0
        for (first, last), placed in groupby(self.placed, key=lambda tensor: tensor[1:]):
            low = max(-(-(first - self.begin) // self.block), upcoming)
            high = self.count if last == self.end else (last - self.begin) // self.block
            if low < high:
                yield from ((number, number + 1, 0, ()) for number in range(upcoming, low))
                yield low, high, first, tuple(tensor for tensor, _, _ in placed)
                upcoming = high
        yield from ((number, number + 1, 0, ()) for number in range(upcoming, self.count))

    @cached_property
    def _firsts(self) -> "array[int]":
        return array("q", (first for _, first, _ in self.placed))
