"""Where every tensor lies: files, offsets, and the blocks that files are cut into."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..format.crc import Crc, joined
from ..format.header import encode_header
from ..format.index import STEMS
from ..format.manifest import BLOCK
from .claims import Held
from .entry import name_of, section_of
from .plan import Block, Span


@dataclass(frozen=True, kw_only=True)
class File:
    """One safetensors file.

    Args:
        name: Relative to the checkpoint's folder.
        section: "model" or "optimizer".
        header: Its first bytes; empty when it is only read.
        data_begin: Where the data begins.
        size: Bytes in all.
        placed: Tensor number, first byte and one past the last byte, by first byte.
        block: Bytes of its blocks.
    """

    name: str
    section: str
    header: bytes
    data_begin: int
    size: int
    placed: tuple[tuple[int, int, int], ...]
    block: int = BLOCK


def lay_out(tensors: Sequence[Held], limit: int) -> list[File]:
    """Fills files greedily in the order of the tensors.

    Args:
        tensors: All of them; their numbers are their places here.
        limit: Bytes of data in a file at most, unless one tensor alone is larger.
    """
    files = []
    for section, stem in STEMS.items():
        numbers = {held.key: number for number, held in enumerate(tensors) if section_of(held.key) == section}
        sizes = [(key, _bytes(tensors[number])) for key, number in numbers.items()]
        shards = fill(sizes, limit) if sizes else []
        names = shard_names(len(shards), stem, always_numbered=section != "model")
        for name, keys in zip(names, shards, strict=True):
            files.append(_file(name, section, {key: numbers[key] for key in keys}, tensors))
    return files


def blocks_of(files: Sequence[File], tensors: Sequence[Held]) -> Iterator[Block]:
    """The data of all files in blocks of one size, which may hold parts of several tensors; the last is shorter."""
    for number, file in enumerate(files):
        upcoming, held = 0, file.placed
        for begin in range(file.data_begin, file.size, file.block):
            end = min(begin + file.block, file.size)
            while upcoming < len(held) and held[upcoming][2] <= begin:
                upcoming += 1
            spans = []
            for tensor, first, last in held[upcoming:]:
                if first >= end:
                    break
                if last > max(first, begin):
                    width = tensors[tensor].dtype.itemsize
                    low, high = max(first, begin), min(last, end)
                    spans.append(
                        Span(
                            tensor=tensor,
                            start=(low - first) // width,
                            stop=(high - first) // width,
                            at=low - begin,
                        )
                    )
            yield Block(file=number, begin=begin, end=end, spans=tuple(spans))


def tensor_blocks(files: Sequence[File], tensors: Sequence[Held]) -> Iterator[Block]:
    """The same for files of others, which have no checksums and need not be aligned: blocks of single tensors."""
    for number, file in enumerate(files):
        for tensor, first, last in file.placed:
            width = tensors[tensor].dtype.itemsize
            for begin in range(first, last, BLOCK):
                end = min(begin + BLOCK, last)
                span = Span(tensor=tensor, start=(begin - first) // width, stop=(end - first) // width, at=0)
                yield Block(file=number, begin=begin, end=end, spans=(span,))


def join_crcs(files: Sequence[File], crcs: Iterable[Crc]) -> list[dict[int, int]]:
    """By file: the checksums of blocks by number, those of parts joined.

    Args:
        files: All of them.
        crcs: Of blocks or of all their parts, in any order.
    """
    by_file: list[dict[int, int]] = [{} for _ in files]
    for number, begin, size, crc in sorted(crcs):
        block = (begin - files[number].data_begin) // files[number].block
        by_file[number][block] = joined(by_file[number].get(block, 0), crc, size)
    return by_file


def _file(name: str, section: str, numbers: Mapping[str, int], tensors: Sequence[Held]) -> File:
    by_name = {name_of(key): number for key, number in numbers.items()}
    header, stored = encode_header({key: (tensors[n].dtype, tensors[n].shape) for key, n in by_name.items()})
    placed = sorted(
        (stored.data_begin + each.begin, stored.data_begin + each.end, by_name[key])
        for key, each in stored.tensors.items()
    )
    return File(
        name=name,
        section=section,
        header=header,
        data_begin=stored.data_begin,
        size=stored.data_begin + stored.data_size,
        placed=tuple((number, begin, end) for begin, end, number in placed),
    )


def _bytes(held: Held) -> int:
    return held.dtype.itemsize * math.prod(held.shape)


def fill(sizes: Sequence[tuple[str, int]], limit: int) -> list[list[str]]:
    """Deals tensors out to files, greedily and in their order.

    A tensor over the limit gets a file of its own, which comes before the one that is being filled.

    Args:
        sizes: Name and bytes of each tensor.
        limit: Bytes of tensors in a file.

    Returns:
        The names in each file.

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
    """The names of that many files.

    Args:
        count: How many.
        stem: What the names begin with.
        always_numbered: Number a single file, too.
    """
    if count == 1 and not always_numbered:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
