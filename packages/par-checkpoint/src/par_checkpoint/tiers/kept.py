"""Finding the parts of a checkpoint on the hosts that load it, and reading them: each rank what its host has."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from crc32c import crc32c

from .._errors import CheckpointError, CorruptError, ReplacedError
from ..format.manifest import MANIFEST, FileRecord, Manifest, decode_manifest, record_of
from ..plan.homes import Homes
from ..storage.commit import scan
from ..storage.local import LocalFolder, LocalSource
from ..transfer.ranks import Ranks
from .part import RECORD, SUFFIX, PartRecord, decode_part, encode_part, part_name, part_of, read_part

SaveId = tuple[int, str]


class KeptFolder(LocalFolder):
    """Read-only checkpoint whose parts are on several hosts, see `Folder`.

    The first rank receives the small files and headers; each host reads its own blocks.

    Args:
        whole: Folder of the checkpoint in the tier, on this host.
        record: Record of one of the shards.
        paths: Folders of the parts on this host, by number.
        ranks: Ranks whose host has each part.
        small: Bytes of small files, and headers of files with tensors, by name; on the first rank.

    Attributes:
        notes: Faults of parts that are replaced by copies, as far as sizes and headers show them.
    """

    def __init__(
        self,
        whole: LocalFolder,
        record: PartRecord,
        paths: Mapping[int, Path],
        ranks: Sequence[tuple[int, ...]],
        small: Mapping[str, bytes],
    ) -> None:
        own = whole.target
        super().__init__(whole.url, at=own.at, exchange=own.exchange, patience=own.patience, lease=own.lease)
        self.record, self.paths, self.small = record, paths, small
        self.homes = Homes(record.homes, [tuple(of_part) for of_part in ranks])
        self.notes: list[str] = []
        self.files_of: Mapping[str, FileRecord] = {}
        if MANIFEST in small:
            self.use(decode_manifest(small[MANIFEST]))

    def is_everywhere(self, size: int) -> bool:
        """Return whether each of `size` ranks can read all parts."""
        return all(len(ranks) == size for ranks in self.homes.ranks)

    def use(self, manifest: Manifest | None) -> None:
        """Read from now on the checkpoint of this manifest, which another rank has found."""
        self.files_of = {} if manifest is None else manifest.files

    def recover(self) -> None:
        """Do nothing: the parts are known."""

    def version(self) -> str:
        """Return a text that identifies the save."""
        return f"{self.record.written}-{self.record.nonce}"

    def check_there(self) -> None:
        """Raise ReplacedError if this host's parts are no longer those that were found."""
        for path in self.paths.values():
            try:
                is_there = decode_part((path / RECORD).read_bytes(), str(path)).save == self.record.save
            except (CheckpointError, OSError):
                is_there = False
            if not is_there:
                raise ReplacedError(
                    f"{path} was replaced or removed while it was read; read it when it rests, or save to another path"
                )

    def exists(self) -> bool:
        """Return True: parts were found."""
        return True

    def sizes(self) -> dict[str, int]:
        """Return the size of every file, in bytes."""
        small = {name: len(data) for name, data in self.small.items()}
        return small | {name: record.size for name, record in self.files_of.items()}

    def read(self, name: str, begin: int = 0, end: int | None = None) -> bytes:
        """Return bytes begin .. end - 1 of a file, by default all."""
        known = self.small.get(name, b"")
        size = self.files_of[name].size if name in self.files_of else len(known)
        end = size if end is None else end
        if end <= len(known):
            return known[begin:end]
        with closing(self.open(name)) as source:
            data = bytearray(end - begin)
            source.read_into(begin, memoryview(data))
        return bytes(data)

    def open(self, name: str) -> "KeptSource":  # type: ignore[override]
        """Open a file of which this host's blocks can be read."""
        return KeptSource(self, name)

    def avoid(
        self, wrong: Sequence[tuple[Sequence[int], Sequence[tuple[str, int]]]], ranks: Ranks
    ) -> tuple[list[str], list[str]]:
        """Replace corrupt blocks by their copies on other hosts, from now on.

        Args:
            wrong: Ranks, and the file and number of each block that they found corrupt.
            ranks: Ranks that load.

        Returns:
            Descriptions of the blocks that are read elsewhere, and of the blocks that are lost.
        """
        machine, names = ranks.hosts(), [name for _, name in ranks.machines()]
        spoiled: dict[tuple[str, int], set[int]] = {}
        for found_by, blocks in wrong:
            for block in blocks:
                spoiled.setdefault(block, set()).update(machine[rank] for rank in found_by)
        parts = {name: list(homes) for name, homes in self.homes.parts.items()}
        places = list(self.homes.ranks)
        moved: list[str] = []
        lost: list[str] = []
        for (name, number), hosts in spoiled.items():
            seeing = tuple(rank for rank in places[parts[name][number]] if machine[rank] not in hosts)
            # Blocks with the same readers share one entry, so that the table stays as small as the number of different
            # sets.
            if seeing not in places:
                places.append(seeing)
            # From now on, only hosts whose copy of this block is intact read it.
            parts[name][number] = places.index(seeing)
            folder = part_name(self.record.homes[name][number], len(self.record.hosts))
            what = f"block {number} of {name!r} in {folder} of {self.url!r} is corrupt on host " + " and ".join(
                names[host] for host in sorted(hosts)
            )
            if seeing:
                moved.append(f"{what}, and read on host {names[machine[seeing[0]]]}")
            else:
                lost.append(f"{what}, and there is no other copy of it")
        self.homes = Homes(parts, places)
        return moved, lost

    def absent(self, name: str, number: int, part: int) -> CheckpointError:
        """Return the error for a block of a part that is not on this host."""
        return CheckpointError(
            f"block {number} of {self.url}/{name} is in part {part}, which is on another host than the rank that "
            "compares tensors that the model ties; load from another tier"
        )

    def reader(self, name: str, number: int) -> int:
        """Return the rank that checks a block for all ranks."""
        ranks = self.homes.ranks[self.homes.parts[name][number]]
        # Blocks are spread over all ranks that can read them, so that the hosts share the work of the check.
        return ranks[number % len(ranks)]


class KeptSource:
    """A file that is being read, from the parts of it on this host; see `FileSource`. Threads may read at once."""

    stride = LocalSource.stride

    def __init__(self, folder: KeptFolder, name: str) -> None:
        self._folder, self._name = folder, name
        self._record = folder.files_of[name]
        self.size = self._record.size
        self._sources = {part: LocalSource(path / f"{name}{SUFFIX}") for part, path in folder.paths.items()}

    def read_into(self, begin: int, view: memoryview) -> None:
        """Fill the view with the bytes from `begin` on."""
        while len(view):
            number, end = -1, self._record.data_begin
            # Bytes before `data_begin` belong to the header, which every part has.
            if begin >= end:
                number = (begin - end) // self._record.block
                end += (number + 1) * self._record.block
            count = min(len(view), end - begin)
            self._source_of(number).read_into(begin, view[:count])
            begin, view = begin + count, view[count:]

    def _source_of(self, number: int) -> LocalSource:
        """Return the part of the file that contains a block; any part for the header, and for a file in every part."""
        parts = self._folder.record.homes.get(self._name)
        wanted = parts[number] if number >= 0 and parts is not None else min(self._sources, default=-1)
        if wanted not in self._sources:
            raise self._folder.absent(self._name, number, wanted)
        return self._sources[wanted]

    def ranged(self, begin: int, end: int) -> "KeptSource":
        """Open the file once more."""
        del begin, end
        return KeptSource(self._folder, self._name)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        for source in self._sources.values():
            source.close()


@dataclass(frozen=True)
class SeenShards:
    """Parts of one checkpoint on a host.

    Args:
        parts: Count of the parts of each save, and the numbers of the complete parts on this host.
        broken: Texts about faulty shards.
    """

    parts: Mapping[SaveId, tuple[int, tuple[int, ...]]]
    broken: tuple[str, ...]


def seen_in(whole: Path) -> tuple[SeenShards, dict[tuple[SaveId, int], Path]]:
    """Return the parts in the folder of a checkpoint on this host.

    Returns:
        The parts, to be sent to other ranks, and the folder of each complete part by save and number.
    """
    paths: dict[tuple[SaveId, int], Path] = {}
    counts: dict[SaveId, int] = {}
    broken = []
    for entry in sorted(scan(whole), key=lambda entry: entry.name):
        # Links are never followed: a part must be a folder that a save has created.
        if part_of(entry.name) is None or not entry.is_dir(follow_symlinks=False):
            continue
        try:
            record, _ = read_part(Path(entry.path))
        except CorruptError as error:
            broken.append(str(error))
            continue
        paths[record.save, record.part] = Path(entry.path)
        counts[record.save] = len(record.hosts)
    parts = {save: (count, tuple(part for of, part in paths if of == save)) for save, count in counts.items()}
    return SeenShards(parts, tuple(broken)), paths


@dataclass(frozen=True, kw_only=True)
class FoundShards:
    """Shards of a checkpoint that all ranks can read together.

    Args:
        ranks: Ranks whose host has each part, by save.
        broken: Texts about faulty shards.
    """

    ranks: Mapping[SaveId, Sequence[tuple[int, ...]]]
    broken: Sequence[str]

    @property
    def whole(self) -> SaveId | None:
        """The latest save all of whose parts are there."""
        return max((save for save, parts in self.ranks.items() if all(parts)), default=None)

    def missing(self) -> str:
        """Describe the missing parts of the latest save that has any part."""
        save = max(self.ranks)
        parts = self.ranks[save]
        lost = [str(part) for part, ranks in enumerate(parts) if not ranks]
        which = f"part {lost[0]} is" if len(lost) == 1 else f"parts {', '.join(lost[:8])} are"
        return "; ".join([f"of {len(parts)} parts, {which} on no host that loads", *self.broken[:3]])


def united(seen: Sequence[tuple[Sequence[int], SeenShards]]) -> FoundShards:
    """Return the parts that all ranks can read together.

    Args:
        seen: Ranks, and the parts that they can read; equal values once.
    """
    found: dict[SaveId, list[tuple[int, ...]]] = {}
    for ranks, own in seen:
        for save, (count, parts) in own.parts.items():
            places = found.setdefault(save, [()] * count)
            for part in parts:
                # A part may be on several hosts: on its own host and, as a copy, on neighbours.
                places[part] = tuple(sorted((*places[part], *ranks)))
    return FoundShards(ranks=found, broken=[text for _, own in seen for text in own.broken])


def find_kept(whole: LocalFolder, ranks: Ranks) -> tuple[KeptFolder | None, str | None]:
    """Find the checkpoint of a tier that is local to each host, if its hosts have all parts of one save. Collective.

    Args:
        whole: The checkpoint's folder in the tier.
        ranks: The ranks that load.

    Returns:
        The checkpoint, or None and what is missing of one, or None twice where there is nothing.
    """
    seen, paths = ranks.agree(lambda: seen_in(whole.path))
    found = united(ranks.distinct(seen))
    if not found.ranks:
        return None, "; ".join(found.broken[:3]) or None
    save = found.whole
    if save is None:
        return None, found.missing()
    mine = {part: path for (of, part), path in paths.items() if of == save}
    # One rank per host reads the small files of its parts, so each file is read once.
    leads = any(of_host[0] == ranks.rank for of_host, _ in ranks.machines())
    own, wrong = ranks.agree(lambda: _sound_small(mine.values() if leads else ()))
    every = [files for _, files in ranks.distinct(own) if files]  # of all hosts the same, but for those that were lost
    notes = [text for _, of_rank in ranks.distinct(wrong) for text in of_rank]
    if not every:
        return None, "; ".join(notes)
    record = decode_part(every[0][RECORD], f"{whole.url}/{RECORD}")
    kept = KeptFolder(whole, record, mine, found.ranks[save], every[0])
    kept.notes = [*found.broken[:3], *notes]
    return kept, None


def _sound_small(parts: Iterable[Path]) -> tuple[dict[str, bytes], list[str]]:
    """Return the small files from the first part of this host without a fault, and the faults of the others.

    Returns:
        Bytes by name, equal in every part of a save, and empty if no part is intact; and descriptions of the faults.
    """
    faults: list[str] = []
    for part in parts:
        small, wrong = small_in(part)
        faults += wrong
        if not wrong:
            record = decode_part(small[RECORD], str(part / RECORD))
            # Records differ only in the part and its host. Without these two fields, all hosts have equal bytes.
            return small | {RECORD: encode_part(replace(record, part=0, keeper=0))}, faults
    return {}, faults


def small_in(part: Path) -> tuple[dict[str, bytes], list[str]]:
    """Return the files that every part has: its record, the small files, and the headers of files with tensors.

    Returns:
        Bytes by name, and descriptions of the files that differ from what was written.
    """
    record, manifest = read_part(part)
    small, wrong = {RECORD: (part / RECORD).read_bytes()}, []
    for name in (MANIFEST, *manifest.files, *manifest.beside):
        own, path = manifest.files.get(name), part / f"{name}{SUFFIX}"
        try:
            with path.open("rb") as file:
                small[name] = file.read(-1 if own is None or name not in record.homes else own.data_begin)
        except FileNotFoundError:
            wrong.append(f"{path} is missing")
            continue
        if own is None:  # the manifest, which `read_part` has checked, and what people edit
            continue
        if crc32c(small[name][: own.data_begin]) != own.header_crc:
            wrong.append(f"the header of {path} is corrupt: its checksum is wrong")
        elif name not in record.homes and record_of(small[name], own.block) != own:
            wrong.append(f"{path} is corrupt: its checksum is wrong")
    return small, wrong
