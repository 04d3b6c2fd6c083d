"""The parts of a checkpoint in folders of hosts, as one process sees them: can it be loaded from these?"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike, fspath
from pathlib import Path

from par_groups import Box, cut, whole

from .._errors import CheckpointError, CorruptError
from ..format.manifest import MANIFEST, block_ranges, decode_manifest
from ..storage.commit import is_folder, scan
from ..storage.directory import StoredTensor
from ..storage.folder import Folder, open_folder
from ..storage.local import LocalFolder
from ..storage.outline import read_outline
from ..storage.verify import VerifyReport, wrong_beside, wrong_blocks
from .kept import KeptFolder, SaveId, small_in
from .part import PartRecord, part_of, read_part

AnyPath = str | PathLike[str]


@dataclass(frozen=True, kw_only=True)
class HostShard:
    """A part of a checkpoint, or a copy of one, that a host keeps.

    Args:
        path: Folder of the part.
        number: Number of the part.
        count: Number of parts of the checkpoint, one for each host that saved it.
        host: Name of the host whose data it holds; "" if the part is too corrupt to tell.
        keeper: Name of the host that stores it; another host for a copy.
        saved: Time of the commit in seconds since 1970, by the clock of the first rank.
        bytes: Size of the blocks and small files in it, in bytes.
        fault: Fault that sizes, headers and manifest show; "" for none.
    """

    path: str
    number: int
    count: int
    host: str = ""
    keeper: str = ""
    saved: float = 0.0
    bytes: int = 0
    fault: str = ""


def part_folders(path: AnyPath) -> list[Path]:
    """Return the folders of parts at a path: the path itself, or folders in it; empty if it contains no parts."""
    path = fspath(path)
    if not isinstance(path, str) or "://" in path:
        return []
    folders = [Path(path), *sorted(Path(entry.path) for entry in scan(Path(path)) if is_folder(entry))]
    return [folder for folder in folders if part_of(folder.name) is not None]


def open_checkpoint(path: AnyPath | Sequence[AnyPath]) -> Folder:
    """Open the folder of a checkpoint, or of its parts in folders of one or several hosts, to read.

    Raises:
        TypeError: A path of bytes.
        ValueError: No folder, or several of which none holds parts.
        CheckpointError: No shard is complete enough to identify its checkpoint.
    """
    paths = [path] if isinstance(path, str | bytes | PathLike) else list(path)
    if any(part_folders(each) for each in paths):
        return GatheredFolder(paths)
    if len(paths) != 1:
        raise ValueError(
            f"path is {paths!r}, of which none holds a part of a checkpoint; give one checkpoint, or the folders of "
            "hosts that hold its parts"
        )
    return open_folder(paths[0])


class GatheredFolder(KeptFolder):
    """Read-only checkpoint whose parts, all or some, are in several folders, see `Folder`.

    Args:
        given: Folders of parts, or folders with parts in them.

    Attributes:
        parts: All parts in the folders, including copies, corrupt parts and parts of other saves.
        copies: Folders that have each part of the checkpoint, by number.
        empty: Given folders that hold no part.
    """

    def __init__(self, given: Sequence[AnyPath]) -> None:
        self._given = [Path(fspath(path)) for path in given]
        self.recover()

    def recover(self) -> None:
        """Looks for parts: of the latest save that is there whole, or else of the latest one of which anything is."""
        folders = {given: part_folders(given) for given in self._given}
        self.empty = [given for given, of_it in folders.items() if not of_it]
        self.parts, records = [], {}
        # A part counts once, although it may be given by its own folder and by the folder above.
        for path in dict.fromkeys(path for of_it in folders.values() for path in of_it):
            part, record = _look_at(path)
            self.parts.append(part)
            if record is not None:
                records[path] = record
        found: dict[SaveId, dict[int, list[Path]]] = {}
        for path, record in records.items():
            found.setdefault(record.save, {}).setdefault(record.part, []).append(path)
        if not found:
            raise CorruptError("; ".join(part.fault for part in self.parts) or f"{self.names} holds no part any longer")
        counts = {record.save: len(record.hosts) for record in records.values()}
        # A complete save counts more than a later save of which parts are missing.
        save = max(found, key=lambda save: (len(found[save]) == counts[save], save))
        self.copies: Mapping[int, Sequence[Path]] = found[save]
        every = [path for paths in self.copies.values() for path in paths]
        # Every part has the small files, so those of any part whose files are intact serve.
        small = next((files for files, wrong in map(small_in, every) if not wrong), None)
        there = [(0,) if part in self.copies else () for part in range(counts[save])]
        super().__init__(
            LocalFolder(str(every[0].parent), at=lambda _: None),
            records[every[0]],
            {part: paths[0] for part, paths in self.copies.items()},
            there,
            small or small_in(every[0])[0],
        )

    @property
    def names(self) -> str:
        """The given folders, for messages."""
        return ", ".join(map(str, self._given))

    @property
    def missing(self) -> list[str]:
        """The parts that are in no folder, in words."""
        count = len(self.record.hosts)
        return [
            f"part {part} of {count}, with the data of host {self.record.hosts[part]}, is not in {self.names}; give "
            "the folder of that host, or of one that has a copy"
            for part in range(count)
            if part not in self.copies
        ]

    def absent(self, name: str, number: int, part: int) -> CheckpointError:
        """Return the error for a block of a part that is in no folder."""
        host = self.record.hosts[part]
        return CheckpointError(
            f"block {number} of {name} is in part {part}, with the data of host {host}, which is not in {self.names}; "
            "give the folder of that host, or of one that has a copy"
        )

    def alone(self, part: int, path: Path) -> KeptFolder:
        """Return the checkpoint with only one part."""
        there = [(0,) if number == part else () for number in range(len(self.record.hosts))]
        return KeptFolder(LocalFolder(str(path), at=lambda _: None), self.record, {part: path}, there, self.small)

    def boxes(self, places: Mapping[str, StoredTensor]) -> dict[str, tuple[Box, ...]]:
        """Return the rectangles of each tensor whose elements are in the parts, by name; empty for a missing tensor."""
        ranges: dict[str, list[tuple[int, int]]] = {}
        for name, homes in self.record.homes.items():
            file, of_file = self.files_of[name], ranges.setdefault(name, [])
            for (begin, end), part in zip(block_ranges(file.size, file.data_begin, file.block), homes, strict=True):
                if part in self.copies:
                    # Neighbouring blocks become one range, so that a tensor has few rectangles.
                    first = of_file.pop()[0] if of_file and of_file[-1][1] == begin else begin
                    of_file.append((first, end))
        return {name: tuple(_boxes_of(place, ranges[place.file])) for name, place in places.items()}


def _boxes_of(place: StoredTensor, ranges: Sequence[tuple[int, int]]) -> Iterator[Box]:
    """Yield the rectangles of a tensor in some ranges of bytes of its file, in order."""
    record, width = whole(place.shape, (0,)), place.dtype.itemsize
    for number in range(bisect_right(ranges, place.begin, key=lambda each: each[1]), len(ranges)):
        begin, end = ranges[number]
        if begin >= place.end:
            return
        # An element counts only if all of its bytes are in the range.
        first, last = -(-max(begin - place.begin, 0) // width), (min(end, place.end) - place.begin) // width
        if first < last:  # else a part has half an element
            yield from cut(record, first, last).boxes


def _look_at(path: Path) -> tuple[HostShard, PartRecord | None]:
    """Describe the folder of a shard, and return the shard's record if it is complete."""
    number, count = part_of(path.name) or (0, 0)
    try:
        record, manifest = read_part(path)
    except (CheckpointError, OSError) as error:
        return HostShard(path=str(path), number=number, count=count, fault=str(error)), None
    size = sum(file.size for name, file in manifest.files.items() if name not in record.homes)
    for name, homes in record.homes.items():
        file = manifest.files[name]
        blocks = zip(block_ranges(file.size, file.data_begin, file.block), homes, strict=True)
        # Each part has the header of every file.
        size += file.data_begin + sum(end - begin for (begin, end), part in blocks if part == record.part)
    part = HostShard(
        path=str(path),
        number=number,
        count=count,
        host=record.hosts[record.part],
        keeper=record.hosts[record.keeper],
        saved=record.written / 1e9,
        bytes=size,
    )
    return part, record


def faults_of_parts(folder: GatheredFolder, *, deep: bool) -> VerifyReport:
    """Return the faults in the parts of a checkpoint, with every copy checked, and the faults that prevent a load.

    Args:
        folder: Folder with the parts.
        deep: Whether to read all data. False checks only sizes, headers, index and manifest.
    """
    faults = [part.fault for part in folder.parts if part.fault]
    faults += [f"{path} holds no part of a checkpoint" for path in folder.empty]
    lost = folder.missing
    every = [(part, path) for part, paths in folder.copies.items() for path in paths]
    of_small = [small_in(path)[1] for _, path in every]
    faults += [text for wrong in of_small for text in wrong]
    # Without the small files of at least one part, nothing can be loaded.
    if all(of_small):
        lost += faults
    try:
        outline = read_outline(folder)
    except CheckpointError as error:
        return VerifyReport([*faults, *folder.missing, str(error)], [*lost, str(error)])
    faults += [*folder.missing, *wrong_beside(folder, decode_manifest(folder.small[MANIFEST]), deep=deep)]
    bad: dict[tuple[str, int], list[str]] = {}
    for part, path in every if deep else ():
        alone = folder.alone(part, path)
        for name, record in folder.files_of.items():
            homes = folder.record.homes.get(name, ())
            is_mine = partial(_is_of, homes, part)
            for number, text in wrong_blocks(alone, name, record, outline.directories, is_mine=is_mine):
                bad.setdefault((name, number), []).append(text)
    for (name, number), texts in bad.items():
        faults += texts
        # A block is lost only if every copy of it is corrupt.
        if len(texts) == len(folder.copies[folder.record.homes[name][number]]):
            lost += texts
    return VerifyReport(faults, lost)


def _is_of(homes: Sequence[int], part: int, name: str, number: int) -> bool:
    """Return whether a block is in a part, for a file whose blocks are in the parts `homes`."""
    del name
    return 0 <= number < len(homes) and homes[number] == part
