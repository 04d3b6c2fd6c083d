"""A test of the tiers before a run begins: each must be writable and visible on the hosts that need it."""

import uuid
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from .._errors import CheckpointError
from ..storage.folder import open_folder
from ..storage.local import LocalFolder
from ..transfer.ranks import Ranks
from .saving import Hosts, check_copies, check_hosts, hosts_of

if TYPE_CHECKING:
    from ..storage.remote import RemoteFolder


def check_tiers(roots: Sequence[str], copies: int | None, ranks: Ranks) -> None:
    """Raise the error that a save to these tiers would raise, on every rank. Collective.

    Each tier receives a file, which is removed again. Missing folders are created, and removed if the test fails.

    Args:
        roots: The folder of the steps in each tier.
        copies: Number of hosts that keep each part in the first tier; None: all ranks see the first tier.
        ranks: The ranks that save.

    Raises:
        TypeError, ValueError: An argument is not valid.
        StoreError: An object store refuses the write.
    """
    hosts = hosts_of(ranks)

    def look() -> None:
        first = open_folder(roots[0])
        if copies is not None:
            check_copies(copies, first, "huggingface")
            check_hosts(copies, hosts)

    ranks.agree(look)
    nonce = ranks.on_first(lambda: uuid.uuid4().hex[:12])
    made: list[Path] = []
    try:
        for number, root in enumerate(roots):
            folder = open_folder(root)
            if isinstance(folder, LocalFolder):
                is_local = copies is not None and number == 0
                _check_local(folder.path, nonce, hosts, ranks, made, is_local=is_local)
            else:
                ranks.on_first(partial(_check_remote, root, f".probe-{nonce}"))
    except (ValueError, CheckpointError):  # all ranks have this error
        # A folder can be removed only after every host has removed its file from it.
        ranks.agree(lambda: None)
        for path in made:
            with suppress(OSError):  # another process may have written there since
                path.rmdir()
        raise


def _check_local(folder: Path, nonce: str, hosts: Hosts, ranks: Ranks, made: list[Path], *, is_local: bool) -> None:
    """Write a file on each host, and check which files the other hosts see.

    Args:
        folder: The folder.
        nonce: Unique part of the files' names.
        hosts: The hosts.
        ranks: The ranks.
        made: List that receives the created folders, the innermost first.
        is_local: Whether each host should have its own folder.
    """

    def file_of(host: int) -> Path:
        return folder / f".probe-{nonce}-{host}"

    def leave() -> None:
        try:
            absent = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            made.extend(absent)
            file_of(hosts.mine).write_bytes(b"")
        except OSError as error:
            raise ValueError(
                f"the tier {str(folder)!r} cannot be written on {hosts.names[hosts.mine]}: {error.strerror}; give a "
                "folder that can, or leave it out"
            ) from None

    def look() -> None:
        beside = [number for number in range(len(hosts.names)) if number != hosts.mine and file_of(number).exists()]
        if is_local and beside:
            raise ValueError(
                f"copies was given, but hosts {hosts.names[hosts.mine]} and {hosts.names[beside[0]]} share the first "
                f"tier, {str(folder)!r}; give a folder of each host's own, such as '/dev/shm/run', or no copies"
            )
        if not is_local and not file_of(0).exists():
            raise ValueError(
                f"{hosts.names[hosts.mine]} does not see the tier {str(folder)!r} that {hosts.names[0]} sees; give one "
                "that all hosts share, or, where the first tier is local to each host, say how many copies to keep"
            )

    # Rank 0 creates the folder first. On a shared tier, the other hosts then do not count it as a folder that they have
    # created and may remove.
    try:
        ranks.agree(lambda: leave() if hosts.rank == 0 else None)
        ranks.agree(lambda: leave() if hosts.leads and hosts.rank else None)
        ranks.agree(lambda: look() if hosts.leads else None)
    finally:
        if hosts.leads:
            with suppress(OSError):  # a tier that is not writable has already raised its error
                file_of(hosts.mine).unlink(missing_ok=True)


def _check_remote(root: str, name: str) -> None:
    """Write an object and remove it."""
    folder = cast("RemoteFolder", open_folder(root))
    try:
        folder.store.put(f"{folder.path}/{name}", b"probe")
        folder.store.delete(folder.path, [name])
    except OSError as error:
        raise ValueError(
            f"the tier {root!r} cannot be written: {error}; give a folder or URL that can, or leave it out"
        ) from error
