"""The files of a checkpoint and their blocks: where each tensor is stored, and which bytes are one unit of work.

A block is checksummed, written and read as one unit.
"""

import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, groupby
from typing import overload

import torch

from par_groups import GlobalTensor

from ..format.crc import Crc, joined
from ..format.header import DATA_ALIGNMENT, encode_header
from ..format.manifest import BLOCK, STEMS
from .claims import name_of, section_of


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
        # `range` handles negative indices and raises IndexError like a list.
        at = 3 * range(len(self))[place]
        return self._flat[at], self._flat[at + 1], self._flat[at + 2]

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        each = iter(self._flat)
        return zip(each, each, each, strict=True)


@dataclass(frozen=True, kw_only=True)
class TensorSpan:
    """Part of a tensor in a block: row-major elements start .. stop - 1, of `width` bytes, from byte `at` on."""

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
        """Return a block, or bytes low .. high - 1 of it.

        Args:
            number: Number of the block.
            tensors: All tensors.
            low: First byte of the part, relative to the block. Default: 0.
            high: Last byte of the part, plus one. Default: the end of the block.
        """
        start = self.begin + number * self.block
        begin, end = start + low, min(start + (self.block if high is None else high), self.end)
        spans = []
        upcoming = max(bisect_right(self._firsts, begin) - 1, 0)
        # Tensors without elements share their first byte with the next tensor, so the search may land behind a tensor
        # that reaches into the block.
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
        """Yield runs of blocks within one tensor: first block, last plus one, the tensor's first byte, and its number.

        There are several numbers if several tensors are filled from the same bytes. A block that contains the end of a
        tensor and the begin of the next one is a run of its own, without a tensor.
        """
        upcoming = 0
        # Several tensors may be filled from the same bytes, such as tied parameters.
        for (first, last), placed in groupby(self.placed, key=lambda tensor: tensor[1:]):
            # A block that begins before the tensor also holds the end of another tensor.
            low = max(-(-(first - self.begin) // self.block), upcoming)
            # Only the last block of an area may be shorter, and it belongs to the tensor that ends the area.
            high = self.count if last == self.end else (last - self.begin) // self.block
            if low < high:
                yield from ((number, number + 1, 0, ()) for number in range(upcoming, low))
                yield low, high, first, tuple(tensor for tensor, _, _ in placed)
                upcoming = high
        yield from ((number, number + 1, 0, ()) for number in range(upcoming, self.count))

    @cached_property
    def _firsts(self) -> "array[int]":
        return array("q", (first for _, first, _ in self.placed))


@dataclass(frozen=True, kw_only=True)
class File:
    """Safetensors file of a checkpoint.

    Args:
        name: Name relative to the checkpoint's folder.
        section: "model" or "optimizer".
        packed: Compressed first bytes of the file. A rank knows thousands of files, and writes the first bytes of a
            few.
        data_begin: First byte of the data.
        size: Bytes of the file, header included.
        placed: Number, first byte and last byte plus one of each tensor, sorted by first byte.
        block: Size of a block, in bytes.
    """

    name: str
    section: str
    packed: bytes
    data_begin: int
    size: int
    placed: Sequence[tuple[int, int, int]]
    block: int = BLOCK

    @property
    def header(self) -> bytes:
        """First bytes of the file; empty if it is only read."""
        return zlib.decompress(self.packed) if self.packed else b""


def lay_out(
    tensors: Sequence[GlobalTensor],
    limit: int,
    stem: str = "model",
    block: Callable[[int], int] | None = None,
    alignment: int = DATA_ALIGNMENT,
) -> list[File]:
    """Return the files for some tensors, filled greedily in the order of the tensors.

    Args:
        tensors: All tensors; their index here is their number.
        limit: Maximum data in a file, in bytes; a larger tensor gets a file of its own.
        stem: First part of the names of the model's files.
        block: Function from the data of a file to the size of its blocks, both in bytes. Default: the usual size for
            all blocks.
        alignment: Alignment of the blocks of a file with several blocks, in bytes.
    """
    files = []
    for section, prefix in {**STEMS, "model": stem}.items():
        numbers = {
            name_of(tensor.key): number for number, tensor in enumerate(tensors) if section_of(tensor.key) == section
        }
        shards = fill([(name, tensors[number].bytes) for name, number in numbers.items()], limit)
        file_names = shard_names(len(shards), prefix, always_numbered=section != "model")
        for file_name, names in zip(file_names, shards, strict=True):
            inside = [tensors[numbers[name]] for name in names]
            # A file of one block has one writer, so its blocks need no alignment on the disk.
            several = sum(tensor.bytes for tensor in inside) > BLOCK
            header, stored = encode_header(
                {name_of(tensor.key): (tensor.dtype, tensor.shape) for tensor in inside},
                alignment=alignment if several else DATA_ALIGNMENT,
            )
            begin = stored.data_begin
            placed = [(begin + own.begin, begin + own.end, numbers[name]) for name, own in stored.tensors.items()]
            files.append(
                File(
                    name=file_name,
                    section=section,
                    packed=zlib.compress(header, 1),
                    data_begin=begin,
                    size=begin + stored.data_size,
                    placed=Placed((number, first, last) for first, last, number in sorted(placed)),
                    block=BLOCK if block is None else block(stored.data_size),
                )
            )
    return files


def fill(sizes: Sequence[tuple[str, int]], limit: int) -> list[list[str]]:
    """Return the names of the tensors in each file: files are filled greedily, in the order of the tensors.

    As in transformers, a tensor over the limit gets a file of its own, which comes before the one that is being filled.

    Args:
        sizes: Name and bytes of each tensor.
        limit: Bytes of tensors in a file.

    Raises:
        ValueError: A limit below 1.
    """
    if limit < 1:
        raise ValueError(f"limit {limit} leaves no room in a file; give at least 1 byte")
    shards: list[list[str]] = []
    current: list[str] = []
    used = 0
    for name, size in sizes:
        # transformers splits no tensor over files, so a larger one gets a file of its own.
        if size > limit:
            shards.append([name])
            continue
        if used + size > limit:
            shards.append(current)
            current, used = [], 0
        current.append(name)
        used += size
    return [*shards, current] if current else shards


def shard_names(count: int, stem: str = "model", *, always_numbered: bool = False) -> list[str]:
    """Return the names of `count` files, numbered as transformers numbers them.

    Args:
        count: Number of files.
        stem: First part of the names.
        always_numbered: Whether a single file has a number, too.
    """
    if count == 1 and not always_numbered:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def data_areas(files: Sequence[File]) -> list[Area]:
    """Return the data of each file as blocks of one size, which may hold parts of several tensors."""
    return [
        Area(file=number, begin=file.data_begin, end=file.size, block=file.block, placed=file.placed)
        for number, file in enumerate(files)
    ]


def tensor_areas(files: Sequence[File]) -> list[Area]:
    """Return the data of each tensor as blocks of its own.

    So files of others are read: they have no checksums of blocks, and their tensors need not be aligned.
    """
    return [
        Area(file=number, begin=first, end=last, block=BLOCK, placed=((tensor, first, last),))
        for number, file in enumerate(files)
        for tensor, first, last in file.placed
        if first < last
    ]


def join_crcs(files: Sequence[File], crcs: Iterable[torch.Tensor]) -> "list[array[int]]":
    """Return the checksums of all blocks of each file, in order.

    Args:
        files: All files.
        crcs: Checksums of blocks, or of all parts of a block, in any order; see `decode_crcs`. The parts of a block are
            joined.
    """
    counts = [-(-(file.size - file.data_begin) // file.block) for file in files]
    found = [torch.zeros(count, dtype=torch.int64, device="cpu") for count in counts]
    parts = [torch.empty(0, 4, dtype=torch.int64, device="cpu")]
    for rows in crcs:
        numbers, lengths = rows[:, 0].unique_consecutive(return_counts=True)
        for number, inside in zip(numbers.tolist(), rows.split(lengths.tolist()), strict=True):
            file = files[number]
            block = (inside[:, 1] - file.data_begin) // file.block
            begin = file.data_begin + block * file.block
            is_whole = inside[:, 2] == (begin + file.block).clamp_(max=file.size) - begin
            found[number][block[is_whole]] = inside[is_whole, 3]
            parts.append(inside[~is_whole])
    every = [array("I", of_file.tolist()) for of_file in found]
    in_parts = torch.cat(parts)
    # Checksums can only be joined in the order of the bytes.
    in_parts = in_parts[in_parts[:, 1].argsort(stable=True)]  # within a file, as they follow each other
    # A list of Python integers takes many times the memory of the tensor, so only a slice of it exists at a time.
    for rows in in_parts.split(4096):
        for number, begin, size, crc in rows.tolist():
            place = (begin - files[number].data_begin) // files[number].block
            every[number][place] = joined(every[number][place], crc, size)
    return every


def join_parts(files: Sequence[File], parts: Iterable[Crc]) -> dict[tuple[int, int], int]:
    """Return the checksum of each block, by file and number.

    Args:
        files: All files.
        parts: Checksums of all parts of each block, in any order.
    """
    found: dict[tuple[int, int], int] = {}
    for number, begin, size, crc in sorted(parts):
        place = number, (begin - files[number].data_begin) // files[number].block
        found[place] = joined(found.get(place, 0), crc, size)
    return found
