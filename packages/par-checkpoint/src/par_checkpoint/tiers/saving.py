"""Saving into a tier that is local to each host: each host has a folder with its part of the same files.

Each host stages and commits its part separately, like a save of one host's ranks (see `storage.commit`). Rank 0 defines
the content that all parts have in common, and the first rank of each host writes it.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from crc32c import crc32c

from .._errors import CheckpointError
from ..format.manifest import BLOCK, MANIFEST, block_ranges
from ..plan.files import File
from ..plan.plan import Prepared
from ..storage.commit import erase
from ..storage.folder import Folder
from ..storage.local import LocalFolder, LocalStaging, LocalWriter
from ..transfer.ranks import Ranks
from .part import RECORD, SUFFIX, PartRecord, decode_part, encode_part, part_name, part_of, read_part


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Hosts of the ranks that save; each host has one part.

    Args:
        names: Names of the hosts, by number.
        of_rank: Number of each rank's host.
        rank: This rank.
    """

    names: tuple[str, ...]
    of_rank: tuple[int, ...]
    rank: int

    @property
    def mine(self) -> int:
        """The number of this rank's host."""
        return self.of_rank[self.rank]

    def ranks(self, host: int) -> tuple[int, ...]:
        """Return the ranks of a host."""
        return tuple(rank for rank, number in enumerate(self.of_rank) if number == host)

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of its host."""
        return self.of_rank.index(self.mine) == self.rank


def hosts_of(ranks: Ranks) -> Hosts:
    """Return the hosts of some ranks. The first call is collective."""
    names = tuple(name for _, name in ranks.machines())
    return Hosts(names=names, of_rank=tuple(ranks.hosts()), rank=ranks.rank)


def check_copies(copies: int, folder: Folder, style: str) -> None:
    """Raise ValueError unless the first tier can keep the shards of hosts, as far as one host can tell.

    Args:
        copies: Number of hosts that keep each shard.
        folder: Folder of the checkpoint in the first tier.
        style: Style of the files.
    """
    if not isinstance(folder, LocalFolder):
        raise ValueError(
            f"copies is {copies}, but the first tier, of {folder.url!r}, is no folder of a host; give one such as "
            "'/dev/shm/run' first, or leave copies out"
        )
    if style != "huggingface":
        raise ValueError(f"copies is {copies} and style is {style!r}, of which one rank writes all; use 'huggingface'")


@dataclass(frozen=True, kw_only=True)
class Common:
    """Content that all shards of a save have in common, apart from blocks.

    Args:
        small: Bytes of the small files that every part has, including the manifest, by name.
        written: Time of the commit in nanoseconds. A later save has a greater value even if the clock was set back.
    """

    small: Mapping[str, bytes]
    written: int


class PartFolder(LocalFolder):
    """The folder of a host's part, see `Folder`.

    Args:
        whole: The checkpoint's folder in the tier, which contains the folders of parts.
        hosts: The hosts.
        part: Number of the part.
    """

    def __init__(self, whole: LocalFolder, hosts: Hosts, part: int) -> None:
        own = whole.target
        path = str(whole.path / part_name(part, len(hosts.names)))
        super().__init__(path, at=own.at, exchange=own.exchange, patience=own.patience, lease=own.lease)
        self.url, self.whole, self.hosts, self.part = whole.url, whole, hosts, part

    def check_target(self, *, overwrite: bool) -> None:
        """Raise if the path exists and must not be replaced."""
        # Hidden names are remnants of dead saves. They are no checkpoint, so they need no `overwrite`.
        names = [name for name in self.whole.files() if not name.startswith(".part-")]
        if names and not overwrite:
            raise FileExistsError(
                f"{self.url!r} exists on {self.hosts.names[self.hosts.mine]}; pass overwrite=True to replace it, or "
                "choose another path"
            )
        foreign = [name for name in names if part_of(name.partition("/")[0]) is None]
        if foreign:
            raise CheckpointError(
                f"{self.url} holds what is no part of a host, such as {foreign[0]}, and is not replaced by parts: "
                "move it away, or save to another path"
            )

    def stage_part(self, nonce: str, prepared: Prepared, *, copies: int, overwrite: bool) -> "PartStaging":
        """Return a handle on the staging folder of the part, without creating the folder.

        Args:
            nonce: Nonce of the save.
            prepared: The files, and the writers of their blocks.
            copies: Number of hosts that keep each part.
            overwrite: Whether to replace an existing part.
        """
        writers = prepared.writers or [()] * len(prepared.files)
        homes = {
            file.name: [self.hosts.of_rank[rank] for rank in of_file]
            for file, of_file in zip(prepared.files, writers, strict=True)
        }
        return PartStaging(self, nonce, prepared.files, homes, copies=copies, overwrite=overwrite)

    def sweep_others(self, save: tuple[int, str]) -> None:
        """Remove the parts of earlier saves from the checkpoint's folder on this host."""
        for name in self.whole.folders():
            if part_of(name) is None:
                continue
            folder = self.whole.child(name)
            # A part of a later save stays: that save may have committed while this one was still copying. A broken part
            # is of no use to any load, so it goes.
            try:
                stays = read_part(Path(folder.path))[0].save >= save
            except CheckpointError:
                stays = False
            if not stays:
                folder.remove()


def part_folder(whole: LocalFolder, copies: int, ranks: Ranks) -> PartFolder:
    """Return the folder of this host's part. Collective.

    Args:
        whole: The checkpoint's folder in a tier that is local to each host.
        copies: Number of hosts that keep each part.
        ranks: The ranks that save.

    Raises:
        ValueError: `copies` is greater than the number of hosts; on every rank.
    """
    hosts = hosts_of(ranks)
    check_hosts(copies, hosts)
    return PartFolder(whole, hosts, hosts.mine)


def check_hosts(copies: int, hosts: Hosts) -> None:
    """Raise ValueError if there are fewer hosts than copies of each part."""
    if copies > len(hosts.names):
        raise ValueError(
            f"copies is {copies}, but the ranks are on {len(hosts.names)} host{'s' * (len(hosts.names) > 1)} "
            f"({', '.join(hosts.names[:8])}); give {len(hosts.names)} at most, or start ranks on more hosts"
        )


@dataclass
class _Asked:
    """Requests to the first rank, which each host carries out."""

    names: tuple[str, ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)
    small: dict[str, bytes] = field(default_factory=dict)
    needed: int = 0


class PartStaging(LocalStaging):
    """The staging folder of a part, see `Staging`.

    Args:
        folder: The part's folder.
        nonce: Nonce of the save.
        files: The files with tensors.
        homes: Number of the part that stores each block, by name of the file.
        copies: Number of hosts that keep each part.
        overwrite: Whether to replace an existing part.
    """

    def __init__(
        self,
        folder: PartFolder,
        nonce: str,
        files: Sequence[File],
        homes: Mapping[str, Sequence[int]],
        *,
        copies: int,
        overwrite: bool,
    ) -> None:
        super().__init__(folder, nonce)
        self.folder, self.nonce, self.files, self.homes = folder, nonce, files, homes
        self.copies, self.overwrite = copies, overwrite
        self.asked = _Asked()

    # Only rank 0 calls `create`, `allocate` and `write`, but each host has its own disk. So these methods record the
    # requests, `invite` sends them to all ranks, and the first rank of each host carries them out.

    def create(self, names: Iterable[str], needed: int) -> None:
        """Record the names of the files and the bytes of the small ones."""
        self.asked.names = tuple(names)
        # The blocks of the files are counted later, by `_needed`, because this host has only its own part of them.
        self.asked.needed = needed - sum(file.size for file in self.files)

    def allocate(self, name: str, size: int, *, head: int = 0, block: int = BLOCK) -> None:
        """Record the size of a file."""
        del head, block
        self.asked.sizes[name] = size

    def write(self, name: str, data: bytes) -> None:
        """Record a small file, which every part contains."""
        self.asked.small[name] = data

    def invite(self) -> _Asked:  # type: ignore[override]
        """Return the requests that every host carries out."""
        return self.asked

    def attach(self, invitation: _Asked | None = None) -> None:
        """Create the part's staging folder on the first rank of each host, and wait for it on the other ranks."""
        if invitation is None:
            raise RuntimeError("attach() of a part needs an invitation; this is a bug in par-checkpoint")
        self.asked = invitation
        if self.folder.hosts.leads:
            self.folder.check_target(overwrite=self.overwrite)
            super().create(invitation.names, self._needed())
            for name, size in invitation.sizes.items():
                super().allocate(name, size)
        super().attach()

    def _needed(self) -> int:
        """Return the bytes that this host needs: for its own part and for the copies that it keeps for other hosts."""
        count, copies = len(self.folder.hosts.names), self.copies
        parts = {(self.folder.part - distance) % count for distance in range(copies)}
        own = 0
        for file in self.files:
            blocks = block_ranges(file.size, file.data_begin, file.block)
            of_file = zip(blocks, self.homes[file.name], strict=True)
            own += sum(end - begin for (begin, end), part in of_file if part in parts)
        return own + copies * (self.asked.needed + sum(file.data_begin for file in self.files))

    def check_local(self) -> None:
        """Raise ValueError if another host stages its part in the same folder: the hosts then share the tier."""
        hosts = self.folder.hosts
        for number, name in enumerate(hosts.names):
            beside = part_name(number, len(hosts.names))
            if number != hosts.mine and (self.folder.whole.path / f".{beside}.tmp-{self.nonce}").exists():
                raise ValueError(
                    f"copies was given, but hosts {hosts.names[hosts.mine]} and {name} share the first tier, of "
                    f"{self.folder.url!r}; give a folder of each host's own, such as '/dev/shm/run', or no copies"
                )

    def writer(self, name: str) -> LocalWriter:
        """Open a file of the part for writing. Its offsets are the offsets of the full file."""
        return super().writer(f"{name}{SUFFIX}")

    def publish(self, *, overwrite: bool, index: tuple[str, bytes] | None = None) -> None:
        """Do nothing, because `complete_part` and `publish_part` publish the part on every host."""

    def newest(self) -> int:
        """Return the commit time of the latest save that has a part on this host, or 0 without a part."""
        newest = 0
        for name in self.folder.whole.folders():
            if part_of(name) is not None:
                with suppress(CheckpointError, OSError):  # no load uses a broken part
                    path = self.folder.whole.path / name / RECORD
                    newest = max(newest, decode_part(path.read_bytes(), str(path)).written)
        return newest

    def common(self, newest: int) -> Common:
        """Return the common content of all shards, on the first rank after all requests.

        Args:
            newest: Commit time of the latest save that has a part on any host.
        """
        # A load takes the save with the greatest time. The clock may have been set back since the last save, and the
        # maximum makes this save the newest one anyway.
        return Common(small=self.asked.small, written=max(time.time_ns(), newest + 1))

    def record(self, common: Common) -> PartRecord:
        """Return the record of this shard."""
        return PartRecord(
            part=self.folder.part,
            keeper=self.folder.hosts.mine,
            written=common.written,
            nonce=self.nonce,
            hosts=self.folder.hosts.names,
            manifest=crc32c(common.small[MANIFEST]),
            homes=self.homes,
        )

    def complete_part(self, common: Common) -> None:
        """Write the content that all parts have, on the first rank of the host: headers, small files and the record."""
        if not self.folder.hosts.leads:
            return
        for file in self.files:
            if file.name not in common.small:  # a file without blocks is a small file
                writer = self.writer(file.name)
                writer.write_at(0, memoryview(file.header))
                writer.finish()
        for name, data in common.small.items():
            super().write(name, data)
        # The record is the last file. A folder without one is no part, so a crash before this point leaves a staging
        # folder that no load takes for a part.
        writer = LocalStaging.writer(self, RECORD)
        writer.write_at(0, memoryview(encode_part(self.record(common))))
        writer.finish()

    def publish_part(self) -> None:
        """Commit the staged part, on the first rank of the host."""
        if self.folder.hosts.leads:
            # A process that was stopped for minutes may have lost its lease, and its staging folder may be half swept.
            if self._lease is not None:
                self._lease.check()
            replaces = self.folder.exists()
            if replaces and not self.overwrite:
                raise CheckpointError(f"another process wrote {self.folder.url} in the meantime: save to another path")
            self.folder.target.commit(self.nonce, replaces=replaces)
        self.close()

    def discard(self) -> None:
        """End the staging on this rank, see `close`."""
        self.close()

    def close(self) -> None:
        """End the lease. The rank that holds it removes a staging folder that was not committed."""
        # The lease goes last: a folder without a lease could be swept by another process at the same time.
        if self._lease is not None:
            erase(self._path)
        super().close()


@dataclass(frozen=True, kw_only=True)
class SavedShards:
    """A save with committed parts on all hosts.

    Args:
        staging: Staging of this host's part.
        common: Content that all shards have in common.
    """

    staging: PartStaging
    common: Common


def commit_parts(staging: PartStaging, ranks: Ranks) -> SavedShards:
    """Commit the part of each host. Collective."""
    # All hosts finish every step that needs disk space before the first host renames its part. If a host ran out of
    # space after another one had renamed, the old checkpoint would be incomplete and the new one, too.
    newest = max(of_rank for _, of_rank in ranks.distinct(staging.newest() if staging.folder.hosts.leads else 0))
    common = ranks.on_first(lambda: staging.common(newest))
    ranks.agree(lambda: staging.complete_part(common))
    ranks.agree(staging.publish_part)
    return SavedShards(staging=staging, common=common)
