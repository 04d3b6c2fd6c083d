"""How parameters lie in a flat buffer, and how the buffer is dealt out to ranks. Pure arithmetic.

Parameters of one param group lie together, so that a rank's share holds at most one slice of each group, which one
fused optimizer call updates. Groups and shares begin at multiples of 16 elements: vector kernels then fall into the
same steps however the buffer is cut.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ALIGNMENT = 16
"""Number of elements of which the beginning of every group and share is a multiple."""


@dataclass(frozen=True, kw_only=True)
class PackedItem:
    """A parameter to be packed.

    Args:
        numel: Number of its elements on this rank.
        group: Number of its param group.
        weight: Number of the elements by which parameters that stay whole are dealt out; 0: as many as it has. Ranks
            that have different parts of a parameter deal it out by its whole size, to ranks of the same place.
    """

    numel: int
    group: int
    weight: int = 0


@dataclass(frozen=True, kw_only=True)
class SliceRange:
    """Elements start to stop - 1 of a buffer, all of one param group, or padding behind it.

    Args:
        group: Number of the param group.
        start: The first element.
        stop: One past the last.
        tier: Where the optimizer's state of them lies: "device", "host" or "disk".
        in_pieces: Whether they are stepped through buffers, as something of them lies on a disk.
    """

    group: int
    start: int
    stop: int
    tier: str = "device"
    in_pieces: bool = False


@dataclass(frozen=True, kw_only=True)
class ChunkLayout:
    """Where parameters lie in a buffer.

    Args:
        slots: The first element of each parameter, and one past its last.
        regions: Where the parameters of each param group lie.
        shard: Number of elements of one rank's share.
        ranks: Number of shares.
        atomic: Whether no parameter is cut; then `regions` has one range for each parameter.
        owners: Where no parameter is cut: in which share each lies, also one without elements.
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
        """Where no parameter is cut: by how many elements each rank has parameters, counted by their weights.

        Args:
            items: The parameters that were packed.
        """
        loads = [0] * self.ranks
        for item, owner in zip(items, self.owners, strict=True):
            loads[owner] += item.weight or item.numel
        return loads

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Where the padding lies: first elements, and ones past the last."""
        ends = [0, *(stop for _, stop in sorted(self.slots))]
        starts = [*(start for start, _ in sorted(self.slots)), self.size]
        return [(end, start) for end, start in zip(ends, starts, strict=True) if end < start]

    def share(self, rank: int) -> tuple[int, int]:
        """The first element of a rank's share, and one past its last."""
        return rank * self.shard, (rank + 1) * self.shard

    def slices(self, low: int, high: int) -> Iterator[SliceRange]:
        """What the elements low to high - 1 have of each region."""
        for region in self.regions:
            start, stop = max(low, region.start), min(high, region.stop)
            if start < stop:
                yield SliceRange(group=region.group, start=start, stop=stop)


def pack(items: Sequence[PackedItem], ranks: int) -> ChunkLayout:
    """Packs parameters one behind the other, group by group, and cuts the buffer evenly.

    Padding is below 16 elements for each group and each rank.
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
        # The region ends on a multiple too, in padding, so that no kernel has a scalar tail that another cut lacks.
        end = _aligned(end)
        regions.append(SliceRange(group=group, start=start, stop=end))
    return ChunkLayout(slots=tuple(slots), regions=tuple(regions), shard=_aligned(-(-end // ranks)), ranks=ranks)


def pack_atomic(items: Sequence[PackedItem], ranks: int, dealt: Sequence[int] = ()) -> ChunkLayout:
    """Gives every parameter to one rank as a whole: the largest first, to the rank that has the least so far.

    Args:
        items: The parameters.
        ranks: Number of ranks.
        dealt: Number of elements that each rank has of other buffers, none by default: of several ranks that have as
            much of this one, that is chosen which has the least of those.
    """
    loads, ends = [0] * ranks, [0] * ranks
    places: list[tuple[int, int]] = [(0, 0)] * len(items)
    for number in sorted(range(len(items)), key=lambda n: -(items[n].weight or items[n].numel)):
        rank = min(range(ranks), key=lambda r: (loads[r], dealt[r] if dealt else 0, r))
        places[number] = rank, ends[rank]
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
