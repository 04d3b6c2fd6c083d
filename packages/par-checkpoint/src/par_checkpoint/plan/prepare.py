"""From what every rank holds to files and a plan; the same on every rank, and made once for each layout."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from .._session import Session
from ..transfer.ranks import Ranks
from .claims import Claims, Held, check_covered, merge
from .entry import name_of
from .files import File, blocks_of, lay_out
from .plan import Plan, Planner


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What is written where, and this rank's part of it.

    Args:
        tensors: All tensors.
        files: All files.
        plan: This rank's part.
        owners: By file, the one rank that writes it; None if all do.
    """

    tensors: Sequence[Held]
    files: Sequence[File]
    plan: Plan
    owners: Sequence[int] | None


def prepare_save(session: Session, claims: bytes, digests: Sequence[bytes], limit: int, *, by_owner: bool) -> Prepared:
    """The plan of a save. Collective when it is not known yet.

    Args:
        session: The ranks that save.
        claims: What this rank holds.
        digests: Of the claims of all ranks.
        limit: Bytes of tensors in a file.
        by_owner: Whether one rank writes a whole file.

    Raises:
        ValueError: Ranks that disagree about a tensor, or elements that nobody holds; on every rank.
    """
    ranks = session.ranks
    key = hashlib.sha256(b"".join(digests)).digest(), limit, by_owner
    known = session.plan(key)
    if known is None:
        tensors = merge(all_claims(ranks, claims, digests))
        check_covered(tensors)
        files = lay_out(tensors, limit)
        owners = _owners(files, ranks.size) if by_owner else None
        plan = Planner(tensors, ranks.rank, ranks.size, owners).save(blocks_of(files, tensors))
        known = Prepared(tensors=tensors, files=files, plan=plan, owners=owners)
        session.keep(key, known)
    return known


def all_claims(ranks: Ranks, mine: bytes, digests: Sequence[bytes]) -> list[tuple[Sequence[int], Claims]]:
    """Everybody's claims; of ranks that hold the same, the first says it for all. Collective if any differ."""
    if len(set(digests)) == 1:
        return [(range(ranks.size), Claims.decode(mine))]
    first = digests.index(digests[ranks.rank]) == ranks.rank
    every = ranks.gather(mine if first else None)
    same: dict[bytes, list[int]] = {}
    for rank, each in enumerate(digests):
        same.setdefault(each, []).append(rank)
    return [(holders, Claims.decode(every[holders[0]] or b"")) for holders in same.values()]


def check_replicas(ranks: Ranks, samples: Sequence[tuple[str, int]], digests: Sequence[bytes]) -> None:
    """Checks that tensors which several ranks call theirs, whole and without a record, begin with the same values.

    A tensor-parallel shard whose record is missing looks just like a replica; saved as one, it would be lost silently.
    Collective where they differ.

    Args:
        ranks: Who saves.
        samples: Key, and a checksum of the first elements.
        digests: Of the samples of all ranks.

    Raises:
        ValueError: Naming those that differ; on every rank.
    """
    if len(set(digests)) == 1:
        return
    seen: dict[str, tuple[int, int]] = {}
    different: dict[str, tuple[int, int]] = {}
    for rank, each in enumerate(ranks.gather(list(samples))):
        for key, crc in each:
            first, of_first = seen.setdefault(key, (rank, crc))
            if crc != of_first:
                different.setdefault(key, (first, rank))
    if different:
        key, (a, b) = next(iter(different.items()))
        raise ValueError(
            f"{name_of(key)!r} and {len(different) - 1} more differ between ranks {a} and {b}, although each rank "
            "calls it whole: if they are parts of a larger tensor, say so with layout={name: Sharding(...)}; if they "
            "are buffers, pass the module, of whose buffers the first rank's are saved; else they are replicas that "
            "have diverged, or different tensors of one name"
        )


def _owners(files: Sequence[File], size: int) -> list[int]:
    """Deals files out, largest first, to the rank with the fewest bytes."""
    load, owners = [0] * size, [0] * len(files)
    for number in sorted(range(len(files)), key=lambda n: -files[n].size):
        owners[number] = load.index(min(load))
        load[owners[number]] += files[number].size
    return owners
