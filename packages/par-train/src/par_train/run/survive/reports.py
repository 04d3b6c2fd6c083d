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
        is_ready: Whether it has begun the `ready` of the step after those of its weights.
    """

    steps: int
    passed: int
    loss: float
    samples: float
    cuts: tuple[RingPlace, ...] = ()
    is_ready: bool = False


def before_move(every: Sequence[RankReport]) -> list[RankReport]:
    """Return the reports as they are when the state moves. Pure.

    A rank that has not seen the end of a `ready` that another rank has passed finishes this step before it moves.

    Args:
        every: The reports of all ranks.
    """
    passed = max(each.passed for each in every)
    return [each._replace(steps=each.steps + 1) if each.is_ready and each.steps == passed else each for each in every]


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
