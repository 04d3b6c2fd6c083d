"""The files of a save: which tensor is at which offset, and the blocks of the data."""

import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from ..format.crc import Crc, joined
from ..format.header import DATA_ALIGNMENT, encode_header
from ..format.index import STEMS
from ..format.manifest import BLOCK
from .blocks import Area, Placed
from .claims import GlobalTensor, section_of
from .tasks import RankPlan


@dataclass(frozen=True, kw_only=True)
class File:
    """One safetensors file.

    Args:
        name: Its name relative to the checkpoint's folder.
        section: "model" or "optimizer".
        packed: Its first bytes, compressed: a rank knows of thousands of files, and writes the beginning of a few.
        data_begin: First byte of its data.
        size: Bytes of the file, header included.
        placed: Number, first byte and one past the last byte of each tensor, by first byte.
        block: Bytes of its blocks.
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
        """Its first bytes; empty when it is only read."""
        return zlib.decompress(self.packed) if self.packed else b""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Everything that is known of a save before it writes: the same on every rank, but for the plan.

    Args:
        tensors: All tensors.
        files: All files.
        plan: This rank's part.
        owners: By file, the one rank that writes it; None where all do.
        writers: Writers of the blocks by file; None if they are not needed.
    """

    tensors: Sequence[GlobalTensor]
    files: Sequence[File]
    plan: RankPlan
    owners: Sequence[int] | None
    writers: Sequence[Sequence[int]] | None = None


def lay_out(
    tensors: Sequence[GlobalTensor],
    limit: int,
    stem: str = "model",
    block: Callable[[int], int] | None = None,
    alignment: int = DATA_ALIGNMENT,
) -> list[File]:
    """The files that hold some tensors, filled greedily in the order of the tensors.

    Args:
        tensors: All tensors; their numbers are their places here.
        limit: Bytes of data in a file at most, unless one tensor alone is larger.
        stem: First part of the names of the model's files.
        block: From the bytes of data in a file to those of its blocks; None: all blocks are of the usual size.
        alignment: Bytes at multiples of which the blocks of a file with several blocks begin.
    """
    files = []
    for section, prefix in {**STEMS, "model": stem}.items():
        numbers = {tensor.name: number for number, tensor in enumerate(tensors) if section_of(tensor.key) == section}
        shards = fill([(name, tensors[number].bytes) for name, number in numbers.items()], limit)
        file_names = shard_names(len(shards), prefix, always_numbered=section != "model")
        for file_name, names in zip(file_names, shards, strict=True):
            inside = [tensors[numbers[name]] for name in names]
            several = sum(tensor.bytes for tensor in inside) > BLOCK
            header, stored = encode_header(
                {tensor.name: (tensor.dtype, tensor.shape) for tensor in inside},
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
    """The names of the tensors in each file: files are filled greedily, in the order of the tensors.

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
    """The names of that many files, as transformers numbers them.

    Args:
        count: Number of files.
        stem: First part of the names.
        always_numbered: Whether a single file has a number, too.
    """
    if count == 1 and not always_numbered:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def data_areas(files: Sequence[File]) -> list[Area]:
    """The data of each file in blocks of one size, which may hold parts of several tensors."""
    return [
        Area(file=number, begin=file.data_begin, end=file.size, block=file.block, placed=file.placed)
        for number, file in enumerate(files)
    ]


def tensor_areas(files: Sequence[File]) -> list[Area]:
    """The data of each tensor in blocks by itself.

    So files of others are read: they have no checksums of blocks, and their tensors need not be aligned.
    """
    return [
        Area(file=number, begin=first, end=last, block=BLOCK, placed=((tensor, first, last),))
        for number, file in enumerate(files)
        for tensor, first, last in file.placed
        if first < last
    ]


def join_crcs(files: Sequence[File], crcs: Iterable[torch.Tensor]) -> "list[array[int]]":
    """For each file: the checksums of all its blocks, in order.

    Args:
        files: All files.
        crcs: Checksums of blocks, or of all parts of a block, which are joined; in any order, see `decode_crcs`.
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
    in_parts = in_parts[in_parts[:, 1].argsort(stable=True)]  # within a file, as they follow each other
    for rows in in_parts.split(4096):
        for number, begin, size, crc in rows.tolist():
            place = (begin - files[number].data_begin) // files[number].block
            every[number][place] = joined(every[number][place], crc, size)
    return every


def join_parts(files: Sequence[File], parts: Iterable[Crc]) -> dict[tuple[int, int], int]:
    """By file and number of a block: its checksum.

    Args:
        files: All files.
        parts: The checksums of all parts of each block, in any order.
    """
    found: dict[tuple[int, int], int] = {}
    for number, begin, size, crc in sorted(parts):
        place = number, (begin - files[number].data_begin) // files[number].block
        found[place] = joined(found.get(place, 0), crc, size)
    return found
