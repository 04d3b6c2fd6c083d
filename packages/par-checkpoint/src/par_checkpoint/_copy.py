"""Copying a checkpoint from one folder to another: the same files, checked on the way, committed like a save."""

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from crc32c import crc32c

from par_groups import bytes_of

from ._errors import corrupt
from .format.manifest import MANIFEST, FileRecord, Manifest, decode_manifest, encode_index, encode_manifest, index_of
from .storage.files import FileSource, Writer
from .storage.folder import Folder, Staging
from .storage.outline import read_outline
from .storage.sharing import Sharing
from .transfer.errors import attempt
from .transfer.memory import MemoryPool
from .transfer.ranks import Ranks
from .transfer.workers import Workers


class CheckpointCopier(Protocol):
    """Source of blocks for a copy if no rank sees all of the source."""

    @property
    def files(self) -> Collection[str]:
        """The files whose blocks it brings."""

    def carry(self, manifest: Manifest, staging: Staging, target: Folder, ranks: Ranks, *, by_file: bool) -> None:
        """Write this rank's blocks on every rank, `by_file` if each file has one writer."""


def copy_checkpoint(
    source: Folder,
    target: Folder,
    ranks: Ranks,
    nonce: str,
    *,
    overwrite: bool,
    threads: int,
    of: str | None = None,
    carrier: CheckpointCopier | None = None,
) -> bool:
    """Copy a complete checkpoint, which appears in one step or not at all. Collective.

    Every byte is compared with its checksum during the copy. The ranks share the blocks if several ranks can write one
    file, else the files.

    Args:
        source: Folder of the checkpoint, visible to all ranks unless there is a carrier.
        target: Folder to create.
        ranks: Ranks that copy, over a communicator that nothing else uses during the copy.
        nonce: Name of the copy, new and equal on every rank.
        overwrite: Whether to replace an existing checkpoint.
        threads: Number of threads of a rank that read, checksum and write; each holds a block.
        of: Version of the source to copy, as `Folder.version` returns it on rank 0. Default: the current one.
        carrier: Source of the blocks of large files. Default: ranks read them from `source`.

    Returns:
        Whether the checkpoint is copied; False if another checkpoint has replaced it in the source.

    Raises:
        CheckpointError, OSError: Reading or writing failed; the target is unchanged.
    """

    def look() -> tuple[bytes, bool] | None:
        if of is not None and source.version() not in (of, None):
            return None
        return source.read(MANIFEST), target.sharing is Sharing.FILES

    found = ranks.on_first(look)
    if found is None:
        return False
    data, by_file = found
    manifest = decode_manifest(data)
    source.use(manifest)
    copy = _Copy(source, target.stage(nonce, by_owner=by_file), manifest, target, overwrite, by_file, carrier)
    try:
        copy.run(ranks, threads)
    except Exception:
        # A save that replaced the source has removed the files that this copy still read. That is no fault of the copy.
        if ranks.on_first(lambda: of is not None and source.version() not in (of, None)):
            return False
        raise
    return True


@dataclass(frozen=True)
class _Copy:
    """A copy under way."""

    source: Folder
    staging: Staging
    manifest: Manifest
    target: Folder
    overwrite: bool
    by_file: bool
    carrier: CheckpointCopier | None

    def run(self, ranks: Ranks, threads: int) -> None:
        """Copy and commit. After any error the staging folder is removed."""
        carrier = self.carrier
        large = {
            # A file of at most one unit cannot be shared between ranks; rank 0 copies it before the commit.
            name: record
            for name, record in self.manifest.files.items()
            if (record.size > self._unit(record) if carrier is None else name in carrier.files and record.crcs)
        }

        def make() -> object:
            self.target.repair()
            self.target.check_target(overwrite=self.overwrite)
            self.staging.create(list(self.manifest.files), sum(record.size for record in self.manifest.files.values()))
            if self.staging.positional:
                for name, record in large.items():
                    block = self.target.block(record.size - record.data_begin)
                    self.staging.allocate(name, record.size, head=record.data_begin, block=block)
            return self.staging.invite()

        try:
            invitation = ranks.on_first(make)
            ranks.agree(lambda: self.staging.attach(invitation))
            if carrier is None:
                _, error = attempt(lambda: self._copy_share(large, ranks, threads))
            else:
                share = partial(carrier.carry, self.manifest, self.staging, self.target, ranks, by_file=self.by_file)
                _, error = attempt(share)
            # Every rank comes here, whether its share failed or not; otherwise the others would wait for it.
            ranks.raise_first(error)
            if self.staging.joins:
                ranks.agree(lambda: self.staging.complete((ranks.rank, ranks.size)))
            ranks.on_first(lambda: self._commit(large))
        except BaseException:
            if ranks.rank == 0:
                self.staging.discard()
            self.staging.close()
            raise
        self.staging.close()

    def _unit(self, record: FileRecord) -> int:
        """Return the number of bytes to copy at a time: full blocks of the target and of the source's checksums."""
        return math.lcm(self.target.block(record.size - record.data_begin), record.block)

    def _copy_share(self, large: dict[str, FileRecord], ranks: Ranks, threads: int) -> None:
        """Copy this rank's blocks, or its files where each has one writer."""
        # A file that is written from its beginning to its end has one thread that writes.
        with Workers(threads if self.staging.positional else 1, "par-checkpoint-tier") as workers:
            for number, (name, record) in enumerate(large.items()):
                begins = list(range(record.data_begin, record.size, self._unit(record)))
                if not self.by_file:
                    # Each file begins with another rank. Otherwise rank 0 would get the first block of every file, and
                    # many files have few blocks.
                    begins = [begin for place, begin in enumerate(begins, number) if place % ranks.size == ranks.rank]
                elif number % ranks.size != ranks.rank:
                    begins = []
                if begins:
                    self._copy_file(name, record, begins, workers)

    def _copy_file(self, name: str, record: FileRecord, begins: Sequence[int], workers: Workers) -> None:
        """Copy what begins at some bytes of a file, each to the end of its unit."""
        pool = MemoryPool(self._unit(record))
        with closing(self.source.open(name)) as opened:
            writer = self.staging.writer(name)

            def copy(begin: int) -> None:
                with pool.lent() as memory:
                    self._copy_unit(name, record, begin, bytes_of(memory), opened, writer)

            try:
                for job in [workers.submit(partial(copy, begin)) for begin in begins]:
                    job.result()
            except BaseException:
                # A store keeps the parts of an upload, and charges for them, until the upload is ended.
                writer.abort()
                raise
            writer.finish()

    def _copy_unit(
        self, name: str, record: FileRecord, begin: int, memory: memoryview, source: FileSource, writer: Writer
    ) -> None:
        """Read some blocks, check them and write them; the header goes with the first."""
        # The header goes with the first block. A file without a header begins with its data.
        if begin == record.data_begin and begin:
            header = bytes_of(torch.empty(begin, dtype=torch.uint8, device="cpu"))
            source.read_into(0, header)
            self._check(name, crc32c(header) == record.header_crc)
            writer.write_at(0, header)
        data = memory[: min(len(memory), record.size - begin)]
        source.read_into(begin, data)
        first = (begin - record.data_begin) // record.block
        # The check comes before the write, so that a corrupt block never reaches the target.
        for number, low in enumerate(range(0, len(data), record.block), first):
            self._check(name, crc32c(data[low : low + record.block]) == record.crcs[number])
        block = self.target.block(record.size - record.data_begin)
        for low in range(0, len(data), block):
            writer.write_at(begin + low, data[low : low + block])

    def _check(self, name: str, is_right: bool) -> None:
        """Raise CorruptError unless a checksum is right."""
        if not is_right:
            raise corrupt(f"{self.source.url}/{name}", "is not what was written, and was not copied")

    def _commit(self, large: dict[str, FileRecord]) -> None:
        """Write the small files and the manifest, and make the folder the checkpoint."""
        for name, data in self._small(large):
            self.staging.write(name, data)
        manifest = replace(self.manifest, generation=self.staging.generation)
        self.staging.write(MANIFEST, encode_manifest(manifest))
        index = None
        places = read_outline(self.source).places("model") if manifest.generation else {}
        if places and manifest.style == "huggingface":  # transformers looks for it beside the manifest
            weight_map = {name: f"{manifest.generation}/{place.file}" for name, place in places.items()}
            total = sum(place.end - place.begin for place in places.values())
            parameters = sum(math.prod(place.shape) for place in places.values())
            index = index_of(manifest.stem), encode_index(weight_map, total, parameters)
        self.staging.publish(overwrite=self.overwrite, index=index)

    def _small(self, large: dict[str, FileRecord]) -> Iterator[tuple[str, bytes]]:
        """Yield the files that one rank copies, and the files without checksums."""
        for name, record in self.manifest.files.items():
            if name not in large:
                data = self.source.read(name)
                crcs = [
                    crc32c(data[low : low + record.block]) for low in range(record.data_begin, len(data), record.block)
                ]
                is_whole = len(data) == record.size and crcs == list(record.crcs)
                self._check(name, is_whole and crc32c(data[: record.data_begin]) == record.header_crc)
                yield name, data
        for name in self.manifest.beside:
            yield name, self.source.read(name)
