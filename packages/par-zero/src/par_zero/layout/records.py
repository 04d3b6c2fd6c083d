"""Records: which part of which parameter each tensor holds once the parameters are cut."""

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
    set_gradient_elsewhere,
    set_segments,
    set_sharding,
    whole,
)

from .._torch_private import default_store
from .chunk import Chunk
from .sharers import Groups


def own_record(parameter: nn.Parameter) -> Sharding | None:
    """The record that a parameter has before it is cut here; None without."""
    return attributes.SHARDING.of(parameter)


def record_of(parameter: nn.Parameter, ranks: tuple[int, ...]) -> Sharding:
    """A parameter's record before it is cut here: its own, or one that says that all `ranks` have all of it."""
    return own_record(parameter) or whole(tuple(parameter.shape), ranks)


def part_of_a_whole(parameter: nn.Parameter) -> Sharding | None:
    """A parameter's own record, where it says that this rank has a part of it; None where it has all, or no record."""
    record = own_record(parameter)
    return None if record is None or record.local_numel == record.numel else record


def is_assembled(parameter: nn.Parameter, tensor: Sequence[int]) -> bool:
    """Whether an optimizer that must see whole tensors cannot have a parameter as it is.

    So it is where a rank has a part, and where its record has several boxes, such as one for each of q, k and v: then
    each is a matrix.

    Args:
        parameter: The parameter.
        tensor: The ranks that may have other parts of it, this one among them.
    """
    record = own_record(parameter)
    return record is not None and (
        len(record.boxes) != 1
        or record.local_numel < record.numel
        or (len(tensor) > 1 and not set(tensor) <= set(record.boxes[0].copies))
    )


class SameShare:
    """Which ranks keep the same share of a parameter as this one.

    The ranks with the same share are the replicas, and, where a parameter has a record that says so, ranks that have
    copies of it for another reason, such as those of a tensor group that all have the same bias. `share_of` knows them
    all. Without it the ranks of both groups tell each other, by one all-gather over each; for ranks outside, to which
    there is no process group here, each rank leaves the number of its share in the store through which all have met.
    They shard the parameter too and come by the same question, so there it reads all of theirs at once.

    Args:
        group: The ranks with different shares.
        replicas: The ranks with the same share, or None.
        share_of: The number of the share that a rank of the world keeps, its position in its own `group`. None: ranks
            are asked.
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
        """The ranks that keep this rank's share of the parameter with that record."""
        copies = frozenset(rank for box in record.boxes for rank in box.copies) | {dist.get_rank()}
        if copies not in self._known:
            shares = self._shares(copies)
            self._known[copies] = frozenset(rank for rank in copies if shares[rank] == self._share)
        return self._known[copies]

    def _shares(self, copies: frozenset[int]) -> Mapping[int, int]:
        """The number of the share that each of some ranks keeps."""
        if self._given is not None:
            return {rank: self._given(rank) for rank in copies}
        return self._share_of if copies <= self._share_of.keys() else self._exchanged(copies)

    def _exchanged(self, copies: frozenset[int]) -> dict[int, int]:
        """The number of the share that each of some ranks keeps, exchanged through the store."""
        store, rank, ranks = default_store(), dist.get_rank(), sorted(copies)
        key = "par_zero/" + hashlib.sha256(repr(ranks).encode()).hexdigest()
        call = store.add(f"{key}/calls/{rank}", 1)  # the n-th calls of the ranks belong together
        store.set(f"{key}/{call}/{rank}", str(self._share))
        keys = [f"{key}/{call}/{other}" for other in ranks]
        found = store.multi_get(keys) if store.has_extended_api() else [store.get(each) for each in keys]
        return {other: int(share) for other, share in zip(ranks, found, strict=True)}


def record_(
    chunks: Sequence[Chunk], records: Mapping[nn.Parameter, Sharding], of_groups: Mapping[Groups, SameShare]
) -> None:
    """Attaches records to the module's parameters and to the optimizer's tensors.

    Args:
        chunks: All chunks, with their slices.
        records: The parameters' records before they were cut.
        of_groups: Which ranks keep the same share, for each of those who share chunks.
    """
    for chunk in chunks:
        same = of_groups[chunk.groups]
        low, high = chunk.share
        if chunk.stage.shards_state:  # also of parameters that this rank has no part of: others wait for its word
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
