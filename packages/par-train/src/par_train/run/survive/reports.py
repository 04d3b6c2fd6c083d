"""Reports of ranks at the beginning of an epoch, and whether the ranks that are left hold the whole state."""

from collections.abc import Sequence
from typing import NamedTuple


class RingPlace(NamedTuple):
    """A sharding of the state, of which a rank holds its shard and a copy of the previous rank's.

    Args:
        epoch: The epoch that it was made in.
        place: The place of the rank in the ring.
        ranks: The number of ranks in the ring.
    """

    epoch: int
    place: int
    ranks: int


class RankReport(NamedTuple):
    """Report of a rank at the beginning of an epoch.

    Args:
        steps: The steps that its weights have; -1 for a rank without weights.
        passed: The last step whose `ready` it has seen end; -1 before the first one.
        loss: The sum of the losses of all samples of that step.
        samples: The number of these samples.
        cuts: The shardings that it holds a part of. Empty under ZeRO 0, where each rank holds all.
    """

    steps: int
    passed: int
    loss: float
    samples: float
    cuts: tuple[RingPlace, ...] = ()


def is_whole(holders: Sequence[Sequence[RingPlace]]) -> bool:
    """Return whether some ranks hold all shards of one sharding, as their own or as a copy. Pure.

    Args:
        holders: The shardings that each rank holds a part of.
    """
    places: dict[tuple[int, int], set[int]] = {}
    for cut in (cut for cuts in holders for cut in cuts):
        places.setdefault((cut.epoch, cut.ranks), set()).add(cut.place)
    return any(
        all(place in held or (place + 1) % ranks in held for place in range(ranks))
        for (_, ranks), held in places.items()
    )
