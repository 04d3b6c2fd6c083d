"""Background copies after every host has its shard: to the memory of neighbour hosts, and to the next tier."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from heapq import merge

import torch
from crc32c import crc32c

from par_groups import bytes_of

from .._copy import copy_checkpoint
from .._errors import CheckpointError, corrupt
from ..format.manifest import FileRecord, Manifest
from ..storage.files import Writer
from ..storage.folder import Folder, Staging
from ..transfer.ranks import Ranks
from .kept import KeptFolder, KeptSource
from .part import RECORD, decode_part
from .saving import Hosts, PartFolder, PartStaging, SavedShards
from .travel import Move, travel


def _kept_of(saved: SavedShards) -> KeptFolder:
    """Return a saved checkpoint for reading. Each host has only its own part."""
    staging, folder = saved.staging, saved.staging.folder
    headers = {file.name: file.header for file in staging.files}
    return KeptFolder(
        folder.whole,
        staging.record(saved.common),
        {folder.part: folder.path},
        [folder.hosts.ranks(host) for host in range(len(folder.hosts.names))],
        {**headers, **saved.common.small},
    )


def copy_on(
    saved: SavedShards, next_tier: Folder | None, ranks: Ranks, nonce: str, *, overwrite: bool, threads: int
) -> bool:
    """Copy the parts to the neighbours of their hosts, and the checkpoint to the next tier. Collective.

    Args:
        saved: The save.
        next_tier: The checkpoint's folder in the next tier, which all ranks see; None: no further tier.
        ranks: The ranks that saved, with a communicator that no other call uses at the same time.
        nonce: Unique name of the copy in the next tier, the same on every rank.
        overwrite: Whether to replace a checkpoint in the next tier.
        threads: Number of threads per rank that write small files there.

    Returns:
        Whether the checkpoint was copied. It is not copied if a later save has replaced it in this tier.

    Raises:
        CheckpointError, OSError: A copy failed, or a part is gone, for example after a cleanup of temporary files.
    """
    kept = _kept_of(saved)

    def is_replaced() -> bool:
        return ranks.tell(lambda: (None, [int(_is_replaced(saved))]), 1)[1] != [0]

    def copy_to_next() -> None:
        if next_tier is not None:
            carrier = _ShardCopier(kept, saved.staging.folder.hosts)
            copy_checkpoint(kept, next_tier, ranks, nonce, overwrite=overwrite, threads=threads, carrier=carrier)

    if is_replaced():
        return False
    errors: list[Exception] = []
    for act in (partial(_copy_to_neighbours, saved, kept, ranks), copy_to_next):
        try:
            act()
        except (CheckpointError, OSError) as error:
            # All ranks have this error. The copy to the next tier is still tried: a disk may have space when the
            # neighbours' memory has none.
            errors.append(error)
    # A later save may have removed the parts while they were copied. That is no failure of this save.
    if errors and is_replaced():
        return False
    if errors:
        raise errors[0]
    return True


def _is_replaced(saved: SavedShards) -> bool:
    """Return whether a later save has replaced this host's part.

    Raises:
        CheckpointError: The part is gone, and no other part has replaced it.
    """
    folder = saved.staging.folder
    path = folder.target.seen() / RECORD
    try:
        return decode_part(path.read_bytes(), str(path)).save != saved.staging.record(saved.common).save
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{folder.path} on {folder.hosts.names[folder.hosts.mine]} is gone before it was copied on; keep cleaners "
            "of temporary files away from this tier, and save again"
        ) from error


def _copy_to_neighbours(saved: SavedShards, kept: KeptFolder, ranks: Ranks) -> None:
    """Copy the part of each host to the next `copies - 1` hosts.

    A copy is committed like the part itself: it appears on its host in one step and complete, or it does not appear.
    """
    staging = saved.staging
    hosts = staging.folder.hosts
    for distance in range(1, staging.copies):
        part = (hosts.mine - distance) % len(hosts.names)
        folder = PartFolder(staging.folder.whole, hosts, part)
        # A copy of an earlier save may be in the same place, and this copy replaces it.
        copy = PartStaging(folder, staging.nonce, staging.files, staging.homes, copies=1, overwrite=True)
        acts: list[Callable[[], None]] = [
            partial(copy.attach, staging.asked),
            partial(_bring, kept, copy, distance, ranks),
            partial(copy.complete_part, saved.common),
            copy.publish_part,
        ]
        # The ranks agree after every step. If a step failed on one host, the other hosts must not begin the next one,
        # in which they would wait for blocks from it.
        try:
            for act in acts:
                ranks.agree(act)
        finally:
            copy.close()
    # Parts of earlier saves go only now. Until every copy is complete, they are the only ones that survive the loss of
    # a host.
    if hosts.leads:
        staging.folder.sweep_others(staging.record(saved.common).save)


def _bring(kept: KeptFolder, copy: PartStaging, distance: int, ranks: Ranks) -> None:
    """Send the blocks of this host's part to a neighbour, and write the blocks of another host's part here."""
    hosts, count = copy.folder.hosts, len(copy.folder.hosts.names)

    def moves_of(part: int) -> Iterator[tuple[int, int, Move]]:
        sources, owners = hosts.ranks(part), hosts.ranks((part + distance) % count)
        blocks = ((name, i) for name, homes in kept.homes.parts.items() for i, home in enumerate(homes) if home == part)
        for place, (name, number) in enumerate(blocks):
            source, owner = sources[place % len(sources)], owners[place % len(owners)]
            if ranks.rank in (source, owner):
                size = _size(kept.files_of[name], number)
                yield place, part, Move(file=name, number=number, size=size, source=source, owner=owner)

    # `travel` needs one order for all ranks. Every rank sorts by place and part, so the two lists are merged by these.
    ours = merge(moves_of(hosts.mine), moves_of(copy.folder.part), key=lambda move: move[:2])
    _make(kept, (move for _, _, move in ours), ranks, lambda move: copy.writer(move.file))


@dataclass(frozen=True)
class _ShardCopier:
    """The copier of all hosts' blocks into a tier that all ranks see; see `CheckpointCopier` of `_copy`."""

    kept: KeptFolder
    hosts: Hosts

    @property
    def files(self) -> Collection[str]:
        """The files with tensors."""
        return self.kept.homes.parts.keys()

    def carry(self, manifest: Manifest, staging: Staging, target: Folder, ranks: Ranks, *, by_file: bool) -> None:
        """Copy this rank's blocks. If one rank writes a file, the other ranks send their blocks to it."""
        kept, hosts = self.kept, self.hosts
        by_host = [hosts.ranks(host) for host in range(len(hosts.names))]

        def moves() -> Iterator[Move]:
            for place, (name, homes) in enumerate(kept.homes.parts.items()):
                record = manifest.files[name]
                # An object store takes several blocks as one part of an upload, which one rank must write. It is a rank
                # of the host that has the first of these blocks.
                step = max(target.block(record.size - record.data_begin) // record.block, 1)
                for number, home in enumerate(homes):
                    first = homes[number // step * step]
                    owners = by_host[first]
                    owner = place % ranks.size if by_file else owners[number // step % len(owners)]
                    sources = by_host[home]
                    source = owner if owner in sources else sources[number % len(sources)]
                    if ranks.rank in (owner, source):
                        size = _size(record, number)
                        yield Move(file=name, number=number, size=size, source=source, owner=owner)

        _make(kept, moves(), ranks, lambda move: staging.writer(move.file), headers=True)


def _make(
    kept: KeptFolder, moves: Iterator[Move], ranks: Ranks, open_: Callable[[Move], Writer], *, headers: bool = False
) -> None:
    """Move blocks from a checkpoint's parts into files.

    Args:
        kept: The checkpoint.
        moves: Moves of this rank.
        ranks: The ranks.
        open_: Function that opens the file of a block for writing.
        headers: Whether to write a file's header with its first block; default False.
    """
    sources: dict[str, KeptSource] = {}
    writers: dict[str, Writer] = {}

    def check(move: Move, block: torch.Tensor) -> None:
        if crc32c(bytes_of(block)) != kept.files_of[move.file].crcs[move.number]:
            where = f"block {move.number} in the memory of rank {move.source}'s host"
            raise corrupt(f"{kept.url}/{move.file}", f"{where} is not what was written, and was not copied")

    def read(move: Move, block: torch.Tensor) -> None:
        if move.file not in sources:
            sources[move.file] = kept.open(move.file)
        record = kept.files_of[move.file]
        sources[move.file].read_into(record.data_begin + move.number * record.block, bytes_of(block))
        check(move, block)

    def take(move: Move, block: torch.Tensor) -> None:
        record = kept.files_of[move.file]
        # `read` has checked a block of this rank. A block of another rank is checked again, because memory or network
        # may have changed it on the way.
        if move.source != ranks.rank:
            check(move, block)
        if move.file not in writers:
            writers[move.file] = open_(move)
        if headers and move.number == 0:
            writers[move.file].write_at(0, memoryview(kept.small[move.file]))
        writers[move.file].write_at(record.data_begin + move.number * record.block, bytes_of(block))

    error: BaseException | None = None
    try:
        error = travel(moves, ranks, read, take)
    finally:
        for source in sources.values():
            source.close()
        for writer in writers.values():
            if error is not None:
                writer.abort()
    if error is not None:
        raise error
    for writer in writers.values():
        writer.finish()


def _size(record: FileRecord, number: int) -> int:
    """Return the bytes of a block of a file."""
    begin = record.data_begin + number * record.block
    return min(begin + record.block, record.size) - begin
