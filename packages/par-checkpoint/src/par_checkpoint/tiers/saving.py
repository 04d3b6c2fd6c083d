"""Saving into a tier that is local to each host: on every host a folder with its part of the same whole files.

Each host stages and commits its part by itself, as a save of one host's ranks is (see `storage.commit`). The first rank
of all says what the parts have in common, and the first rank of each host does it.
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
    """The hosts of the ranks that save, each of which has a part.

    Args:
        names: Their names, by number.
        of_rank: For each rank, the number of its host.
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
        """The ranks of a host."""
        return tuple(rank for rank, number in enumerate(self.of_rank) if number == host)

    @property
    def leads(self) -> bool:
        """Whether this is the first rank of its host."""
        return self.of_rank.index(self.mine) == self.rank


def hosts_of(ranks: Ranks) -> Hosts:
    """The hosts of some ranks. Collective the first time."""
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
        small: By name: the bytes of the small files, the manifest among them, which every part has.
        written: When the save was committed; of a later save more, though the clock may have been set back.
    """

    small: Mapping[str, bytes]
    written: int


class PartFolder(LocalFolder):
    """The folder of a host's part, see `Folder`.

    Args:
        whole: The checkpoint's folder in the tier, which holds those of parts.
        hosts: The hosts.
        part: The number of the part.
    """

    def __init__(self, whole: LocalFolder, hosts: Hosts, part: int) -> None:
        own = whole.target
        path = str(whole.path / part_name(part, len(hosts.names)))
        super().__init__(path, at=own.at, exchange=own.exchange, patience=own.patience, lease=own.lease)
        self.url, self.whole, self.hosts, self.part = whole.url, whole, hosts, part

    def check_target(self, *, overwrite: bool) -> None:
        """Raises if what is there now must not be replaced."""
        names = [name for name in self.whole.files() if not name.startswith(".part-")]  # what a save leaves that died
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
        """A handle on the staging folder of the part; touches nothing.

        Args:
            nonce: The save's.
            prepared: The files, and who writes their blocks.
            copies: On how many hosts each part is to be.
            overwrite: Whether to replace a part that is there.
        """
        writers = prepared.writers or [()] * len(prepared.files)
        homes = {
            file.name: [self.hosts.of_rank[rank] for rank in of_file]
            for file, of_file in zip(prepared.files, writers, strict=True)
        }
        return PartStaging(self, nonce, prepared.files, homes, copies=copies, overwrite=overwrite)

    def sweep_others(self, save: tuple[int, str]) -> None:
        """Removes the parts of earlier saves from the checkpoint's folder on this host."""
        for name in self.whole.folders():
            if part_of(name) is None:
                continue
            folder = self.whole.child(name)
            try:
                stays = read_part(Path(folder.path))[0].save >= save
            except CheckpointError:
                stays = False
            if not stays:
                folder.remove()


def part_folder(whole: LocalFolder, copies: int, ranks: Ranks) -> PartFolder:
    """The folder of this host's part. Collective.

    Args:
        whole: The checkpoint's folder in a tier that is local to each host.
        copies: On how many hosts each part is to be.
        ranks: The ranks that save.

    Raises:
        ValueError: There are fewer hosts than copies of each part; on every rank.
    """
    hosts = hosts_of(ranks)
    check_hosts(copies, hosts)
    return PartFolder(whole, hosts, hosts.mine)


def check_hosts(copies: int, hosts: Hosts) -> None:
    """Raises ValueError unless there are as many hosts as copies of each part."""
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
    """A part under way, see `Staging`.

    Args:
        folder: The part's folder.
        nonce: The save's.
        files: The files with tensors.
        homes: By name of a file: for each block, the part that it is in.
        copies: On how many hosts each part is to be.
        overwrite: Whether to replace a part that is there.
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

    def create(self, names: Iterable[str], needed: int) -> None:
        """Notes what is asked for."""
        self.asked.names = tuple(names)
        self.asked.needed = needed - sum(file.size for file in self.files)

    def allocate(self, name: str, size: int, *, head: int = 0, block: int = BLOCK) -> None:
        """Notes what is asked for."""
        del head, block
        self.asked.sizes[name] = size

    def write(self, name: str, data: bytes) -> None:
        """Notes a small file, which every part has."""
        self.asked.small[name] = data

    def invite(self) -> _Asked:  # type: ignore[override]
        """What every host does."""
        return self.asked

    def attach(self, invitation: _Asked | None = None) -> None:
        """The first rank of a host makes the part's staging folder there, and all of its ranks see it."""
        if invitation is None:
            raise RuntimeError("a part cannot be staged without what all parts have in common; a bug of par-checkpoint")
        self.asked = invitation
        if self.folder.hosts.leads:
            self.folder.check_target(overwrite=self.overwrite)
            super().create(invitation.names, self._needed())
            for name, size in invitation.sizes.items():
                super().allocate(name, size)
        super().attach()

    def _needed(self) -> int:
        """Bytes of this part, and of those that come after it from the hosts before."""
        count, copies = len(self.folder.hosts.names), self.copies
        parts = {(self.folder.part - distance) % count for distance in range(copies)}
        own = 0
        for file in self.files:
            blocks = block_ranges(file.size, file.data_begin, file.block)
            of_file = zip(blocks, self.homes[file.name], strict=True)
            own += sum(end - begin for (begin, end), part in of_file if part in parts)
        return own + copies * (self.asked.needed + sum(file.data_begin for file in self.files))

    def check_local(self) -> None:
        """Raises if another host's part is being staged in this host's folder: then they share it."""
        hosts = self.folder.hosts
        for number, name in enumerate(hosts.names):
            beside = part_name(number, len(hosts.names))
            if number != hosts.mine and (self.folder.whole.path / f".{beside}.tmp-{self.nonce}").exists():
                raise ValueError(
                    f"copies was given, but hosts {hosts.names[hosts.mine]} and {name} share the first tier, of "
                    f"{self.folder.url!r}; give a folder of each host's own, such as '/dev/shm/run', or no copies"
                )

    def writer(self, name: str) -> LocalWriter:
        """A file of the part to write into, with the places of the whole file."""
        return super().writer(f"{name}{SUFFIX}")

    def publish(self, *, overwrite: bool, index: tuple[str, bytes] | None = None) -> None:
        """Does nothing yet: `complete_part` and `publish_part` do it on every host."""

    def newest(self) -> int:
        """When the latest save was committed of which this host has a part under the checkpoint's name; 0 for none."""
        newest = 0
        for name in self.folder.whole.folders():
            if part_of(name) is not None:
                with suppress(CheckpointError, OSError):  # what is broken is not loaded
                    path = self.folder.whole.path / name / RECORD
                    newest = max(newest, decode_part(path.read_bytes(), str(path)).written)
        return newest

    def common(self, newest: int) -> Common:
        """Return the common content of all shards, on the first rank after all requests.

        Args:
            newest: When the latest save was committed of which any host has a part. The present one counts as later,
                whatever the clock says: it may have been set back.
        """
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
        """The first rank of the host writes what all parts have: headers, small files, and the part's record."""
        if not self.folder.hosts.leads:
            return
        for file in self.files:
            if file.name not in common.small:  # one without blocks is among these
                writer = self.writer(file.name)
                writer.write_at(0, memoryview(file.header))
                writer.finish()
        for name, data in common.small.items():
            super().write(name, data)
        writer = LocalStaging.writer(self, RECORD)
        writer.write_at(0, memoryview(encode_part(self.record(common))))
        writer.finish()

    def publish_part(self) -> None:
        """The first rank of the host makes the staged part the part."""
        if self.folder.hosts.leads:
            if self._lease is not None:
                self._lease.check()
            replaces = self.folder.exists()
            if replaces and not self.overwrite:
                raise CheckpointError(f"another process wrote {self.folder.url} in the meantime: save to another path")
            self.folder.target.commit(self.nonce, replaces=replaces)
        self.close()

    def discard(self) -> None:
        """Every rank: ends it, see `close`."""
        self.close()

    def close(self) -> None:
        """Ends the lease; the rank that holds it removes a staging folder that was not committed."""
        if self._lease is not None:
            erase(self._path)
        super().close()


@dataclass(frozen=True, kw_only=True)
class SavedShards:
    """A save whose parts are there.

    Args:
        staging: That of this host's part.
        common: Content that all shards have in common.
    """

    staging: PartStaging
    common: Common


def commit_parts(staging: PartStaging, ranks: Ranks) -> SavedShards:
    """Commits the part of each host, once the first rank has said what all parts have. Collective.

    All hosts finish every step that needs disk space before one of them renames its shard.
    """
    newest = max(of_rank for _, of_rank in ranks.distinct(staging.newest() if staging.folder.hosts.leads else 0))
    common = ranks.on_first(lambda: staging.common(newest))
    ranks.agree(lambda: staging.complete_part(common))
    ranks.agree(staging.publish_part)
    return SavedShards(staging=staging, common=common)
