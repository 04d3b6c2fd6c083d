"""Checking files against their checksums."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from os import PathLike

import torch
from crc32c import crc32c

from .._errors import CheckpointError, CorruptError, corrupt_block
from ..format.bytes import bytes_of
from ..format.header import parse_object
from ..format.manifest import BLOCK, MANIFEST, FileRecord, Manifest, blocks_of, decode_manifest
from ..transfer.ranks import Ranks, attempt
from .commit import CONFIG
from .directory import Place
from .found import Found, check_sizes, look, tensors_of
from .storage import Folder, open_folder
from .unmixed import unmixed

Range = tuple[int, int, int]
"""Number, first byte and one past the last byte of a block."""


def verify(path: str | PathLike[str], deep: bool = True) -> list[str]:
    """Checks a checkpoint. No process group is needed.

    Args:
        path: Its folder.
        deep: Whether to read all data; else sizes, headers, index and manifest alone.

    Returns:
        What is wrong, each in words: empty for a checkpoint that is whole.

    Raises:
        ReplacedError: It was replaced while it was read, again and again.
    """
    folder = open_folder(path)
    return unmixed(folder, partial(_wrong, folder, deep=deep))


def _wrong(folder: Folder, *, deep: bool) -> list[str]:
    """What is wrong with a checkpoint."""
    found, error = attempt(partial(look, folder))
    if error is not None:
        if not isinstance(error, CheckpointError | OSError):
            raise error
        return _wrong_alone(folder, deep=deep) or [str(error)]
    if found is None or found.manifest is None:
        return [f"{folder.url!r} has no manifest: it was not saved here, so there are no checksums to compare with"]
    wrong = _wrong_config(folder, found.manifest)
    if not deep:
        return wrong
    for name, record in found.manifest.files.items():
        wrong += [describe(folder, found, name, each) for each in wrong_blocks(folder, name, record, threads=2)]
    return wrong


def _wrong_config(folder: Folder, manifest: Manifest) -> list[str]:
    """What is wrong with the model's config, which people edit: it has no checksum, but must be there and be JSON."""
    sizes = folder.sizes()
    lost = [
        f"{folder.url}/{name} is missing, but was saved with the weights: bring it back, or copy that of another step"
        for name in manifest.beside
        if name not in sizes
    ]
    if CONFIG not in sizes:
        return lost
    _, error = attempt(lambda: parse_object(folder.read(CONFIG), f"{folder.url}/{CONFIG}"))
    return lost if error is None else [*lost, str(error)]


def _wrong_alone(folder: Folder, *, deep: bool) -> list[str]:
    """What is wrong with each file by itself, where all together make no sense."""
    manifest, _ = attempt(lambda: decode_manifest(folder.read(MANIFEST)))
    if manifest is None:
        return []
    sizes, wrong = folder.sizes(), []
    for name, record in manifest.files.items():
        _, error = attempt(partial(check_sizes, folder, replace(manifest, files={name: record}), sizes))
        if error is not None:
            wrong.append(str(error))
        elif deep:
            wrong += [
                describe(folder, Found(manifest=manifest), name, each)
                for each in wrong_blocks(folder, name, record, threads=2)
            ]
    return wrong


def look_closely(folder: Folder) -> Found:
    """What a checkpoint holds, after every byte was compared with its checksum, where there are some.

    Raises:
        CorruptError: Naming blocks and tensors.
    """
    found = look(folder)
    check_blocks(folder, found, Ranks(None, 0), threads=2)
    return found


def check_blocks(folder: Folder, found: Found, ranks: Ranks, threads: int) -> None:
    """A pass over all files before anything is changed; each rank takes its share.

    Raises:
        CorruptError: Naming blocks and tensors; on every rank.
    """
    if found.manifest is None:
        return

    def check() -> None:
        for name, record in found.manifest.files.items() if found.manifest else ():
            bad = wrong_blocks(folder, name, record, threads=threads, share=(ranks.rank, ranks.size))
            if bad:
                raise CorruptError(f"{describe(folder, found, name, bad[0])}. Nothing was changed")

    ranks.agree(check)


def wrong_blocks(
    folder: Folder, name: str, record: FileRecord, *, threads: int, share: tuple[int, int] = (0, 1)
) -> list[Range]:
    """The blocks whose checksum is not the recorded one; number -1 stands for the header.

    Args:
        folder: Where the file is.
        name: The file.
        record: What the manifest says of it.
        threads: How many read at a time.
        share: Look at every n-th block, from the i-th on: (i, n).
    """
    ranges = [
        (number, begin, end)
        for number, (begin, end) in enumerate(blocks_of(record.size, record.data_begin, record.block))
    ]
    expected = dict(enumerate(record.crcs))
    if record.data_begin:
        ranges.insert(0, (-1, 0, record.data_begin))
        expected[-1] = record.header_crc
    with closing(folder.open(name)) as source, ThreadPoolExecutor(threads) as pool:

        def is_wrong(block: Range) -> bool:
            number, begin, end = block
            buffer = torch.empty(end - begin, dtype=torch.uint8, device="cpu")
            memory = bytes_of(buffer)
            source.read_into(begin, memory)
            return crc32c(memory) != expected[number]

        mine = ranges[share[0] :: share[1]]
        return [block for block, bad in zip(mine, pool.map(is_wrong, mine), strict=True) if bad]


def describe(folder: Folder, found: Found, name: str, block: Range) -> str:
    """A wrong block in words."""
    number, begin, end = block
    if number < 0:
        return f"the header of {folder.url}/{name} is corrupt: its checksum is wrong"
    tensors = [
        tensor
        for directory in found.directories.values()
        for tensor, place in directory.places.items()
        if place.file == name and place.begin < end and place.end > begin
    ]
    return corrupt_block(f"{folder.url}/{name}", number, begin, tensors)


def check_same(folder: Folder, found: Found, pairs: Iterable[tuple[str, str]]) -> None:
    """Checks that tensors which are tied in the model hold the same values in the files.

    Raises:
        CheckpointError: They differ: which of them is right, nobody can tell.
    """
    pairs, places = sorted(pairs), found.places("model")
    pickled = tensors_of(folder, found.pickled["model"]) if pairs and "model" in found.pickled else None
    for first, second in pairs:
        if pickled is None:
            equal = _equal(folder, places[first], places[second])
        else:
            equal = _equal_tensors(pickled[first], pickled[second])
        if not equal:
            raise CheckpointError(
                f"{first!r} and {second!r} are one tensor in the model, but differ in {folder.url!r}; untie them in "
                "the model, or remove the wrong one from the files"
            )


def _equal_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and bytes_of(a.contiguous()) == bytes_of(b.contiguous())


def _equal(folder: Folder, a: Place, b: Place) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    size = a.end - a.begin
    return all(
        folder.read(a.file, a.begin + low, min(a.begin + low + BLOCK, a.end))
        == folder.read(b.file, b.begin + low, min(b.begin + low + BLOCK, b.end))
        for low in range(0, size, BLOCK)
    )
