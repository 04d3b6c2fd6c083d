"""Comparing files with their checksums."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import torch
from crc32c import crc32c

from par_groups import bytes_of

from .._errors import CheckpointError, CorruptError, corrupt_block
from ..format.manifest import BLOCK, CONFIG, MANIFEST, FileRecord, Manifest, block_ranges, decode_manifest, record_of
from ..format.strict_json import parse_object
from .directory import Directory, StoredTensor
from .folder import Folder
from .outline import Outline, read_outline, tensors_of, wrong_size


class VerifyReport(list[str]):
    """Faults of a checkpoint, one sentence for each.

    Attributes:
        lost: Faults without a sound replica, because of which the checkpoint cannot be loaded. All of them but where
            parts of hosts were looked at: a fault in a part of which a sound copy was given is none.
    """

    def __init__(self, faults: Iterable[str] = (), lost: Iterable[str] | None = None) -> None:
        super().__init__(faults)
        self.lost = list(self if lost is None else lost)


def check_blocks(
    folder: Folder,
    outline: Outline,
    threads: int = 2,
    is_mine: Callable[[str, int], bool] = lambda *_: True,
    wrong: list[tuple[str, int]] | None = None,
) -> None:
    """Read all data, or this rank's part of it, and compare every block with its checksum, if it has one.

    Args:
        folder: Folder of the checkpoint.
        outline: Content of the checkpoint.
        threads: Number of blocks to read concurrently. Default: 2.
        is_mine: Function of a file and a block number that returns whether this rank reads the block; -1 is the header.
            Default: it reads all.
        wrong: List that receives the file and number of every block that differs. Default: the first one raises.

    Raises:
        CorruptError: A block differs; the message names the first such block and the tensors in it.
    """
    first = None
    for name, record in {} if outline.manifest is None else outline.manifest.files.items():
        for number, text in wrong_blocks(folder, name, record, outline.directories, threads, is_mine):
            first = first or CorruptError(f"{text}. Nothing was changed")
            if wrong is None:
                raise first
            wrong.append((name, number))
    if first is not None:
        raise first


def check_same(folder: Folder, outline: Outline, pairs: Iterable[tuple[str, str]]) -> None:
    """Raise unless tensors that are tied in the model have the same values in the files.

    Args:
        folder: The checkpoint's folder.
        outline: Content of the checkpoint.
        pairs: Pairs of names that are one tensor in the model.

    Raises:
        CheckpointError: The values differ, so it is unknown which tensor is right.
    """
    pairs, places = sorted(pairs), outline.places("model")
    pickled = tensors_of(folder, outline.pickled["model"]) if pairs and "model" in outline.pickled else None
    for first, second in pairs:
        if pickled is None:
            equal = _equal_bytes(folder, places[first], places[second])
        else:
            one, other = pickled[first], pickled[second]
            is_like = (one.dtype, one.shape) == (other.dtype, other.shape)
            equal = is_like and bytes_of(one.contiguous()) == bytes_of(other.contiguous())
        if not equal:
            raise CheckpointError(
                f"{first!r} and {second!r} are one tensor in the model, but differ in {folder.url!r}; untie them in "
                "the model, or remove the wrong one from the files"
            )


def faults_of(folder: Folder, *, deep: bool) -> VerifyReport:
    """Return the faults of a checkpoint.

    Args:
        folder: The checkpoint's folder.
        deep: Whether to read all data. False checks only sizes, headers, index and manifest.
    """
    try:
        outline = read_outline(folder)
    except (CheckpointError, OSError) as error:
        # One fault may hide others, so each file is also checked by itself.
        return VerifyReport(_wrong_one_by_one(folder, deep=deep) or [str(error)])
    manifest = outline.manifest
    if manifest is None:
        return VerifyReport(
            [f"{folder.url!r} has no manifest: it was not saved here, so there are no checksums to compare with"]
        )
    wrong = wrong_beside(folder, manifest, deep=deep)
    for name, record in manifest.files.items() if deep else ():
        wrong.extend(text for _, text in wrong_blocks(folder, name, record, outline.directories))
    return VerifyReport(wrong)


def _wrong_one_by_one(folder: Folder, *, deep: bool) -> list[str]:
    """Find what is wrong with single files where all of them together make no sense."""
    try:
        manifest = decode_manifest(folder.read(MANIFEST))
    except (CheckpointError, OSError):
        return []
    sizes, wrong = folder.sizes(), []
    for name, record in manifest.files.items():
        text = wrong_size(folder, name, record, sizes)
        if text is not None:
            wrong.append(text)
        elif deep:
            wrong.extend(text for _, text in wrong_blocks(folder, name, record, {}))
    return wrong


def check_beside(folder: Folder, outline: Outline) -> None:
    """Check that the files beside the tensors, such as a config's and a tokenizer's, are what was saved.

    Raises:
        CorruptError: The first that is not.
    """
    wrong = [] if outline.manifest is None else wrong_beside(folder, outline.manifest, deep=True)
    if wrong:
        raise CorruptError(f"{wrong[0]}. Nothing was changed; verify='auto' loads all the same")


def wrong_beside(folder: Folder, manifest: Manifest, *, deep: bool) -> list[str]:
    """Return the faults of files without tensors, such as a config or a tokenizer.

    Args:
        folder: The checkpoint's folder.
        manifest: Manifest of the checkpoint.
        deep: Whether to compare checksums, except for the config, which users edit. False only checks that the files
            exist, and that the config is JSON.
    """
    sizes = folder.sizes()
    wrong = []
    for name, record in manifest.beside.items():
        path = f"{folder.url}/{name}"
        if name not in sizes:
            wrong.append(
                f"{path} is missing, but was saved with the weights: bring it back, or copy that of another step"
            )
        # People edit config.json, so it only has to be readable, which is checked below.
        elif deep and record is not None and name != CONFIG and record_of(folder.read(name), record.block) != record:
            wrong.append(
                f"{path} is not what was saved, but edited or damaged: bring it back, or save again to vouch for it"
            )
    if CONFIG in sizes:
        try:
            parse_object(folder.read(CONFIG), f"{folder.url}/{CONFIG}")
        except (CheckpointError, OSError) as error:
            wrong.append(str(error))
    return wrong


def wrong_blocks(
    folder: Folder,
    name: str,
    record: FileRecord,
    directories: Mapping[str, Directory],
    threads: int = 2,
    is_mine: Callable[[str, int], bool] = lambda *_: True,
) -> Iterator[tuple[int, str]]:
    """Yield number and description of every block of a file, header first, whose checksum is wrong."""
    ranges = [(number, *ends) for number, ends in enumerate(block_ranges(record.size, record.data_begin, record.block))]
    if record.data_begin:
        # The header has a checksum of its own, because it is written before the blocks exist.
        ranges.insert(0, (-1, 0, record.data_begin))
    mine = [block for block in ranges if is_mine(name, block[0])]
    if not mine:
        return
    with closing(folder.open(name)) as source, ThreadPoolExecutor(threads) as pool:

        def checksum(block: tuple[int, int, int]) -> int:
            _, begin, end = block
            memory = bytes_of(torch.empty(end - begin, dtype=torch.uint8, device="cpu"))
            source.read_into(begin, memory)
            return crc32c(memory)

        # Results arrive in the order of the blocks, so the first fault in the file is the first one reported.
        for (number, begin, end), crc in zip(mine, pool.map(checksum, mine), strict=True):
            if number < 0 and crc != record.header_crc:
                yield number, f"the header of {folder.url}/{name} is corrupt: its checksum is wrong"
            elif number >= 0 and crc != record.crcs[number]:
                tensors = [
                    tensor
                    for directory in directories.values()
                    for tensor, place in directory.places.items()
                    if place.file == name and place.begin < end and place.end > begin
                ]
                yield number, corrupt_block(f"{folder.url}/{name}", number, begin, tensors)


def _equal_bytes(folder: Folder, a: StoredTensor, b: StoredTensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return all(
        # A tensor may be larger than memory, so it is compared block by block.
        folder.read(a.file, a.begin + low, min(a.begin + low + BLOCK, a.end))
        == folder.read(b.file, b.begin + low, min(b.begin + low + BLOCK, b.end))
        for low in range(0, a.end - a.begin, BLOCK)
    )
