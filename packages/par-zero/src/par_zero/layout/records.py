"""Sharding metadata: it describes which part of which parameter each tensor holds after `shard`."""

import hashlib
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist
from torch import nn

from par_groups import (
    Segment,
    Segments,
    Sharding,
    agree,
    attributes,
    cut,
    default_store,
    set_gradient_elsewhere,
    set_segments,
    set_sharding,
    whole,
)

from .chunk import Chunk
from .sharers import Groups


def own_record(parameter: nn.Parameter) -> Sharding | None:
    """Return the sharding metadata that a parameter had before `shard` sharded it; None if it had none."""
    return attributes.SHARDING.of(parameter)


def record_of(parameter: nn.Parameter, ranks: tuple[int, ...]) -> Sharding:
    """Return a parameter's sharding metadata before `shard`: its own, or metadata of a full replica on all `ranks`."""
    return own_record(parameter) or whole(tuple(parameter.shape), ranks)


def part_of_a_whole(parameter: nn.Parameter) -> Sharding | None:
    """Return a parameter's own sharding metadata if this rank holds only a part of it; else None."""
    record = own_record(parameter)
    return None if record is None or record.local_numel == record.numel else record


def is_assembled(parameter: nn.Parameter, tensor: Sequence[int]) -> bool:
    """Return whether a parameter must be assembled for an optimizer that needs full tensors.

    A parameter is assembled if a rank holds only a part of it. It is also assembled if its metadata has several boxes,
    such as one each for q, k and v: each box is a matrix then.

    Args:
        parameter: Parameter.
        tensor: Ranks that may hold other parts of it, this rank included.
    """
    record = own_record(parameter)
    return record is not None and (
        len(record.boxes) != 1
        or record.local_numel < record.numel
        or (len(tensor) > 1 and not set(tensor) <= set(record.boxes[0].copies))
    )


class SameShare:
    """Lookup of the ranks that keep the same shard of a parameter as this rank.

    These ranks are the replicas, and ranks that hold a replica for another reason: all ranks of a tensor-parallel group
    may have the same bias, for example. If `share_of` is given, it returns the shard of every rank. Otherwise the ranks
    of both groups exchange their indices by one all-gather over each group. There is no process group to ranks outside
    of these groups. Each rank therefore writes the index of its shard to the store of torch.distributed's rendezvous,
    and reads the indices of all other ranks at once. All of them shard the parameter too, so all of them make the same
    exchange.

    Args:
        group: Ranks with different shards.
        replicas: Ranks with the same shard, or None.
        share_of: Function of a global rank that returns its index in its own `group`, which is the index of its shard.
        None: the ranks exchange the indices.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        replicas: dist.ProcessGroup | None,
        share_of: Callable[[int], int] | None = None,
    ) -> None:
        self._share = dist.get_rank(group)
        self._given = share_of
        self._share_of = {rank: share for share, rank in enumerate(dist.get_process_group_ranks(group))}
        if replicas is not None and share_of is None:
            self._share_of = agree(None, self._share, group, replicas)
        self._known: dict[frozenset[int], frozenset[int]] = {}

    def of(self, record: Sharding) -> frozenset[int]:
        """Return the ranks that keep this rank's shard of the parameter with that metadata."""
        copies = frozenset(rank for box in record.boxes for rank in box.copies) | {dist.get_rank()}
        # A lookup may exchange data, and most parameters of a model have the same holders.
        if copies not in self._known:
            shares = self._shares(copies)
            self._known[copies] = frozenset(rank for rank in copies if shares[rank] == self._share)
        return self._known[copies]

    def _shares(self, copies: frozenset[int]) -> Mapping[int, int]:
        """Return the index of the shard that each of some ranks keeps."""
        if self._given is not None:
            return {rank: self._given(rank) for rank in copies}
        return self._share_of if copies <= self._share_of.keys() else self._exchanged(copies)

    def _exchanged(self, copies: frozenset[int]) -> dict[int, int]:
        """Return the index of the shard that each of some ranks keeps, exchanged through the store."""
        store, rank, ranks = default_store(), dist.get_rank(), sorted(copies)
        key = "par_zero/" + hashlib.sha256(repr(ranks).encode()).hexdigest()
        # Each rank counts its own calls, so that the n-th calls of all ranks use the same keys and read nothing of an
        # earlier `shard`.
        call = store.add(f"{key}/calls/{rank}", 1)
        store.set(f"{key}/{call}/{rank}", str(self._share))
        keys = [f"{key}/{call}/{other}" for other in ranks]
        # One request for all keys takes one round trip. Not every store supports it.
        found = store.multi_get(keys) if store.has_extended_api() else [store.get(each) for each in keys]
        return {other: int(share) for other, share in zip(ranks, found, strict=True)}


def record_(
    chunks: Sequence[Chunk], records: Mapping[nn.Parameter, Sharding], of_groups: Mapping[Groups, SameShare]
) -> None:
    """Attach sharding metadata to the module's parameters and to the optimizer's tensors.

    Args:
        chunks: All chunks, with their slices.
        records: Sharding metadata of the parameters before `shard` sharded them.
        of_groups: Lookup of the ranks that keep the same shard, for the communicators of each data-parallel group.
    """
    for chunk in chunks:
        same = of_groups[chunk.groups]
        low, high = chunk.share
        # A rank looks up parameters of which it has no part, too: other ranks wait for its index in the exchange.
        if chunk.stage.shards_state:
            for member in chunk.members:
                same.of(records[member.parameter])
        for member, (start, stop) in zip(chunk.members, chunk.layout.slots, strict=True):
            record = records[member.parameter]
            if chunk.stage.shards_parameters:
                first = min(max(start, low), high)
                last = max(first, min(stop, high))
                part = cut(record, max(first - start, 0), max(last - start, 0), holders=same.of(record))
                set_sharding(member.parameter, part)
            elif record.boxes:
                set_sharding(member.parameter, record)
            if member.group >= 0:
                set_gradient_elsewhere(member.parameter, "its optimizer's flat tensors")
        for piece in chunk.slices:
            segments = []
            for member, (start, stop) in zip(chunk.members, chunk.layout.slots, strict=True):
                first, last = max(start, piece.start), min(stop, piece.stop)
                if first < last:
                    record = records[member.parameter]
                    holders = same.of(record) if chunk.stage.shards_state else None
                    part = cut(record, first - start, last - start, offset=first - piece.start, holders=holders)
                    segments.append(Segment(member.names[0], part))
            set_segments(piece.tensor, Segments(segments, apart=not chunk.layout.atomic))
