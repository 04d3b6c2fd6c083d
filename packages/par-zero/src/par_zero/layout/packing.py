"""Positions of parameters in a flat buffer, and its shards. Pure arithmetic.

The parameters of a param group are stored next to each other, so that a rank's shard holds at most one slice of each
group, which one fused optimizer call updates. Groups and shards begin at multiples of 16 elements.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

ALIGNMENT = 16
"""Every group and every shard begins at a multiple of this number of elements.

Vectorized kernels compute the last few elements of a tensor in another way. With aligned beginnings the same elements
are the last ones for every number of ranks, so the results have the same bits.
"""


@dataclass(frozen=True, kw_only=True)
class PackedItem:
    """Parameter to be packed.

    Args:
        numel: Number of its elements on this rank.
        group: Number of its param group.
        weight: Number of elements that counts when atomic parameters are assigned to ranks; 0: `numel`. Tensor-parallel
            ranks hold different shards of a parameter and must assign it to the same data rank, so they pass its full
            size.
    """

    numel: int
    group: int
    weight: int = 0


@dataclass(frozen=True, kw_only=True)
class SliceRange:
    """Consecutive elements of a buffer that belong to one param group, with the padding behind them.

    Args:
        group: Number of the param group.
        start: First element.
        stop: Last element plus one.
        tier: Tier of the optimizer's state of these elements: "device", "host" or "disk".
        in_pieces: Whether the elements are stepped through buffers, because some of their data is on a disk.
    """

    group: int
    start: int
    stop: int
    tier: str = "device"
    in_pieces: bool = False


@dataclass(frozen=True, kw_only=True)
class ChunkLayout:
    """Positions of parameters in a buffer.

    Args:
        slots: First element, and last element plus one, of each parameter.
        regions: Range of each param group.
        shard: Number of elements of one rank's shard.
        ranks: Number of shards.
        atomic: Whether each parameter is in one shard; `regions` then has one range for each parameter.
        owners: Shard of each parameter, also of one without elements, if `atomic`.
    """

    slots: tuple[tuple[int, int], ...]
    regions: tuple[SliceRange, ...]
    shard: int
    ranks: int
    atomic: bool = False
    owners: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Number of elements of the buffer."""
        return self.shard * self.ranks

    @property
    def padding(self) -> int:
        """Number of elements that belong to no parameter."""
        return self.size - sum(stop - start for start, stop in self.slots)

    def loads(self, items: Sequence[PackedItem]) -> list[int]:
        """Return the number of elements that each rank owns of atomic parameters, counted by their weights.

        Args:
            items: Parameters that were packed.
        """
        loads = [0] * self.ranks
        for item, owner in zip(items, self.owners, strict=True):
            loads[owner] += item.weight or item.numel
        return loads

    @cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """Ranges of the padding: first element, and last element plus one."""
        ends = [0, *(stop for _, stop in sorted(self.slots))]
        starts = [*(start for start, _ in sorted(self.slots)), self.size]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

    def share(self, rank: int) -> tuple[int, int]:
        """Return the first element of a rank's shard, and the last plus one."""
        return rank * self.shard, (rank + 1) * self.shard

    def slices(self, low: int, high: int) -> Iterator[SliceRange]:
        """Yield the parts of each region that are in the elements from `low` up to `high`."""
        for region in self.regions:
            start, stop = max(low, region.start), min(high, region.stop)
            if start < stop:
                yield SliceRange(group=region.group, start=start, stop=stop)


def pack(items: Sequence[PackedItem], ranks: int) -> ChunkLayout:
    """Pack parameters group by group, and shard the buffer evenly.

    The padding is less than 16 elements for each group and each rank.
    """
    slots: list[tuple[int, int]] = [(0, 0)] * len(items)
    regions = []
    end = 0
    for group in sorted({item.group for item in items}):
        start = end = _aligned(end)
        for number, item in enumerate(items):
            if item.group == group:
                slots[number] = end, end + item.numel
                end += item.numel
        # The padding belongs to the region, so that it also ends at a multiple: a kernel would compute a tail of fewer
        # elements in another way, and only on the rank whose shard ends there.
        end = _aligned(end)
        regions.append(SliceRange(group=group, start=start, stop=end))
    return ChunkLayout(slots=tuple(slots), regions=tuple(regions), shard=_aligned(-(-end // ranks)), ranks=ranks)


def pack_atomic(items: Sequence[PackedItem], ranks: int, dealt: Sequence[int] = ()) -> ChunkLayout:
    """Assign each parameter to one rank: the largest first, to the rank with the fewest elements so far.

    Args:
        items: Parameters.
        ranks: Number of ranks.
        dealt: Number of elements of each rank in other buffers, which decides between ranks with equal numbers in this
            buffer. Default: 0 for each rank.
    """
    loads, ends = [0] * ranks, [0] * ranks
    places: list[tuple[int, int]] = [(0, 0)] * len(items)
    for number in sorted(range(len(items)), key=lambda n: -(items[n].weight or items[n].numel)):
        # The rank number breaks ties, so that all ranks choose the same owner.
        rank = min(range(ranks), key=lambda r: (loads[r], dealt[r] if dealt else 0, r))
        places[number] = rank, ends[rank]
        # Loads count full sizes, on which tensor-parallel ranks agree. Positions count the elements of this rank.
        loads[rank] += _aligned(items[number].weight or items[number].numel)
        ends[rank] += _aligned(items[number].numel)
    shard = max(ends)
    slots = tuple(
        (rank * shard + first, rank * shard + first + item.numel)
        for (rank, first), item in zip(places, items, strict=True)
    )
    owners = tuple(rank for rank, _ in places)
    regions = tuple(
        SliceRange(group=item.group, start=start, stop=stop) for item, (start, stop) in zip(items, slots, strict=True)
    )
    return ChunkLayout(slots=slots, regions=regions, shard=shard, ranks=ranks, atomic=True, owners=owners)


def _aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT
