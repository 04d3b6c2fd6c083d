"""Checking, before the first sum, that every element is counted exactly once."""

from collections.abc import Iterable

import torch.distributed as dist

from ._sharding import Sharding


def check_owned(named: Iterable[tuple[str, Sharding]], group: dist.ProcessGroup | None = None) -> None:
    """Checks that the ranks of a group own every element of every tensor once. Collective; meant for the first use.

    A record whose `copies` are wrong, or a group that does not cover a tensor, gives a norm that is silently wrong.
    Here it is an error on every rank.

    Args:
        named: Name and sharding of this rank's tensors; ranks may have different names (pipeline stages).
        group: The ranks that will sum; default: the world.

    Raises:
        ValueError: Elements of a tensor that nobody owns, or that several ranks do; or shapes that differ.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    members, rank = frozenset(ranks), dist.get_rank()
    mine = [(name, sharding.shape, sharding.owned(rank, members)) for name, sharding in named]
    every: list[list[tuple[str, tuple[int, ...], int]] | None] = [None] * len(ranks)
    dist.all_gather_object(every, mine, group=group)  # names, shapes and counts of every rank of the group
    counted: dict[str, int] = {}
    shapes: dict[str, set[tuple[int, ...]]] = {}
    for name, shape, owned in (entry for entries in every for entry in entries or ()):
        counted[name] = counted.get(name, 0) + owned
        shapes.setdefault(name, set()).add(shape)
    for name, found in shapes.items():
        if len(found) > 1:
            raise ValueError(f"{name!r} has different global shapes on the ranks: {sorted(found)}; fix its Sharding")
        numel = Sharding(next(iter(found)), ()).numel
        if counted[name] != numel:
            raise ValueError(
                f"the {len(ranks)} ranks of the group own {counted[name]} elements of {name!r}, which has {numel}: "
                "its boxes' copies are wrong, or the group does not hold all of it"
            )
