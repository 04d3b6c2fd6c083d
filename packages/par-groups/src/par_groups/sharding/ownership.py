"""Checking, before the first sum, that every element is counted exactly once."""

import itertools
import math
from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

import torch.distributed as dist

from .sharding import Sharding


class _Entry(NamedTuple):
    """One tensor on one rank.

    Args:
        name: The tensor's name on that rank.
        shape: Its global shape.
        owned: The number of its elements that the rank counts.
        boxes: A digest of the rank's boxes and their copies.
    """

    name: str
    shape: tuple[int, ...]
    owned: int
    boxes: int


def check_owned(named: Iterable[tuple[str, Sharding]], group: dist.ProcessGroup | None = None) -> None:
    """Checks that the ranks of a group own every element of every tensor once. Collective; meant for the first use.

    A record whose `copies` are wrong, or a group that does not cover a tensor, gives a norm that is silently wrong.
    Here it is an error on every rank.

    Args:
        named: The name and the sharding of each tensor of this rank. Ranks may have different tensors, as pipeline
            stages do, and different names for one that they share, as its copies say.
        group: The ranks that will sum; None stands for the world.

    Raises:
        ValueError: Elements of a tensor that nobody owns, or that several ranks do; or shapes that differ.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    members, rank = frozenset(ranks), dist.get_rank()
    mine = [_Entry(name, record.shape, record.owned(rank, members), _digest(record)) for name, record in named]
    by_rank: list[list[_Entry]] = [mine] * len(ranks)
    dist.all_gather_object(by_rank, mine, group=group)  # small objects of every rank of the group
    by_name: dict[str, list[_Entry]] = {}
    for entry in itertools.chain.from_iterable(by_rank):
        by_name.setdefault(entry.name, []).append(entry)
    for name, entries in by_name.items():
        shapes = {entry.shape for entry in entries}
        if len(shapes) > 1:
            raise ValueError(f"{name!r} has different global shapes on the ranks: {sorted(shapes)}; fix its Sharding")
        owned, numel = sum(entry.owned for entry in entries), math.prod(entries[0].shape)
        if owned != numel and not _is_owned_under_several_names(by_rank, {entry.boxes for entry in entries}, numel):
            raise ValueError(
                f"the {len(ranks)} ranks of the group own {owned} elements of {name!r}, which has {numel}: "
                "its boxes' copies are wrong, or the group does not hold all of it"
            )


def _digest(sharding: Sharding) -> int:
    """A hash of the boxes and their copies; of numbers alone, so that it is the same in every process."""
    return hash(tuple((box.start, box.size, box.copies) for box in sharding.boxes))


def _is_owned_under_several_names(by_rank: Sequence[Sequence[_Entry]], boxes: Set[int], numel: int) -> bool:
    """Whether a tensor is owned once when what has the same boxes and copies counts as the same, whatever its name.

    Pipeline stages that share a tensor may each have a name of their own for it. Several tensors may have those boxes;
    then every rank that has any must have the same number n of them, and together they must be owned n times. They
    cannot make up for each other: tensors with equal boxes have equal owners.
    """
    numbers, owned = set(), 0
    for entries in by_rank:
        alike = [entry.owned for entry in entries if {entry.boxes} == boxes]
        if alike:
            numbers.add(len(alike))
            owned += sum(alike)
    return len(numbers) == 1 and owned == numbers.pop() * numel
