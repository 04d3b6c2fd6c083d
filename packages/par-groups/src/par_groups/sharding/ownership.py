"""Checking, before the first sum, that every element is counted exactly once."""

from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

import torch.distributed as dist

from .sharding import Sharding


class _Entry(NamedTuple):
    """A tensor of one rank: what this rank owns of it, and what stands for its boxes and their copies."""

    name: str
    shape: tuple[int, ...]
    owned: int
    boxes: int


def check_owned(named: Iterable[tuple[str, Sharding]], group: dist.ProcessGroup | None = None) -> None:
    """Checks that the ranks of a group own every element of every tensor once. Collective; meant for the first use.

    A record whose `copies` are wrong, or a group that does not cover a tensor, gives a norm that is silently wrong.
    Here it is an error on every rank.

    Args:
        named: Name and sharding of this rank's tensors; ranks may have different names (pipeline stages), also for one
            tensor that they share, as its copies say.
        group: The ranks that will sum; default: the world.

    Raises:
        ValueError: Elements of a tensor that nobody owns, or that several ranks do; or shapes that differ.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    members, rank = frozenset(ranks), dist.get_rank()
    mine = [_Entry(name, each.shape, each.owned(rank, members), _digest(each)) for name, each in named]
    gathered: list[list[_Entry] | None] = [None] * len(ranks)
    dist.all_gather_object(gathered, mine, group=group)  # of every rank of the group
    every = [entries or [] for entries in gathered]
    counted: dict[str, int] = {}
    shapes: dict[str, set[tuple[int, ...]]] = {}
    boxes: dict[str, set[int]] = {}
    for entry in (entry for entries in every for entry in entries):
        counted[entry.name] = counted.get(entry.name, 0) + entry.owned
        shapes.setdefault(entry.name, set()).add(entry.shape)
        boxes.setdefault(entry.name, set()).add(entry.boxes)
    for name, found in shapes.items():
        if len(found) > 1:
            raise ValueError(f"{name!r} has different global shapes on the ranks: {sorted(found)}; fix its Sharding")
        numel = Sharding(next(iter(found)), ()).numel
        if counted[name] != numel and not _has_other_names(every, boxes[name], numel):
            raise ValueError(
                f"the {len(ranks)} ranks of the group own {counted[name]} elements of {name!r}, which has {numel}: "
                "its boxes' copies are wrong, or the group does not hold all of it"
            )


def _digest(sharding: Sharding) -> int:
    """Of numbers alone, so it is the same in every process."""
    return hash(tuple((box.start, box.size, box.copies) for box in sharding.boxes))


def _has_other_names(every: Sequence[Sequence[_Entry]], boxes: Set[int], numel: int) -> bool:
    """Whether a tensor is owned once if it goes by another name on other ranks: by what has the same boxes and copies.

    Tensors with equal boxes have equal owners, so none of them can make up for what another lacks.
    """
    alike = [[entry.owned for entry in entries if {entry.boxes} == boxes] for entries in every]
    numbers = {len(owned) for owned in alike if owned}
    return len(numbers) == 1 and sum(map(sum, alike)) == numbers.pop() * numel
