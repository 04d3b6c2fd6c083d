"""Records for what is cut here: which part of which parameter a tensor holds."""

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import nn

from par_groups import (
    Segment,
    Segments,
    Sharding,
    cut,
    set_gradient_elsewhere,
    set_segments,
    set_sharding,
    sharding_of,
    whole,
)

from .chunk import Chunk


def record_of(parameter: nn.Parameter, ranks: tuple[int, ...]) -> Sharding:
    """A parameter's record before it is cut here: its own, or whole on all ranks that share the work."""
    return sharding_of(parameter) if hasattr(parameter, "par_sharding") else whole(tuple(parameter.shape), ranks)


class SameShare:
    """Which ranks keep the same share as this one.

    Of ranks that hold a parameter alike for other reasons, such as tensor parallelism, this package knows no groups.
    All of them shard it, so they tell each other through the store by which ranks found each other.

    Args:
        group: The ranks with different shares.
        replicas: Those with the same, or None.
    """

    def __init__(self, group: dist.ProcessGroup, replicas: dist.ProcessGroup | None) -> None:
        self._index = dist.get_rank(group)
        self._near = {rank: index for index, rank in enumerate(dist.get_process_group_ranks(group))}
        if replicas is not None:
            self._near.update(dict.fromkeys(dist.get_process_group_ranks(replicas), self._index))
        self._known: dict[frozenset[int], frozenset[int]] = {}

    def of(self, record: Sharding) -> frozenset[int]:
        """The holders of this rank's share of a parameter."""
        copies = frozenset(rank for box in record.boxes for rank in box.copies) | {dist.get_rank()}
        if copies not in self._known:
            indices = self._near if copies <= set(self._near) else self._asked(copies)
            self._known[copies] = frozenset(rank for rank in copies if indices[rank] == self._index)
        return self._known[copies]

    def _asked(self, copies: frozenset[int]) -> dict[int, int]:
        store = dist.distributed_c10d._get_default_store()
        me, key = dist.get_rank(), "par_zero/" + ",".join(map(str, sorted(copies)))
        call = store.add(f"{key}/calls/{me}", 1)  # the ranks' n-th calls belong together
        store.set(f"{key}/{call}/{me}", str(self._index))
        return {rank: int(store.get(f"{key}/{call}/{rank}")) for rank in sorted(copies)}


def record_(
    chunks: Sequence[Chunk],
    records: Mapping[nn.Parameter, Sharding],
    stage: int,
    same: SameShare,
) -> None:
    """Attaches records to the module's parameters and to the optimizer's tensors.

    Args:
        chunks: All of them.
        records: Of the parameters, before they were cut here.
        stage: From 1 on the optimizer holds a share, at 3 the module too.
        same: Which ranks keep the same share.
    """
    for chunk in chunks:
        low, high = chunk.layout.share(chunk.rank)
        for member, (start, stop) in zip(chunk.members, chunk.layout.slots, strict=True):
            record = records[member.parameter]
            if stage == 3:
                first, last = min(max(start, low), high), max(min(stop, high), low)
                part = cut(record, max(first - start, 0), max(last - start, first - start, 0), holders=same.of(record))
                set_sharding(member.parameter, part)
            elif record.boxes:
                set_sharding(member.parameter, record)
            if member.group >= 0:
                set_gradient_elsewhere(member.parameter, "its optimizer's flat tensors")
        for each in chunk.slices:
            segments = []
            for member, (start, stop) in zip(chunk.members, chunk.layout.slots, strict=True):
                first, last = max(start, each.start), min(stop, each.stop)
                if first < last:
                    part = cut(
                        records[member.parameter],
                        first - start,
                        last - start,
                        offset=first - each.start,
                        holders=same.of(records[member.parameter]) if stage else None,
                    )
                    segments.append(Segment(member.names[0], part))
            set_segments(each.tensor, Segments(segments))
