"""Check, before the first sum over ranks, that every element is counted exactly once."""

import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence, Set
from typing import NamedTuple

import torch
import torch.distributed as dist

from .sharding import Sharding


class _Entry(NamedTuple):
    """Tensor on one rank.

    Args:
        name: Name of the tensor on that rank.
        shape: Global shape.
        owned: Number of elements that the rank counts.
        boxes: Digest of the rank's boxes and their copies.
    """

    name: str
    shape: tuple[int, ...]
    owned: int
    boxes: int


def check_owned(named: Iterable[tuple[str, Sharding]], group: dist.ProcessGroup | None = None) -> None:
    """Check that the ranks of a group own every element of every tensor once. Collective; meant for the first use.

    Sharding metadata with wrong `copies`, or a group that does not cover a tensor, silently makes a norm wrong. This
    check raises an error on every rank instead.

    If all ranks have the same names and the metadata is right, the check takes one all-reduce of two numbers. Ranks
    with different names, such as pipeline stages, also gather four numbers per name. The ranks exchange the names
    themselves only after a difference.

    Args:
        named: Name and sharding of each tensor of this rank. Ranks may have different tensors, as pipeline stages do.
            They may also use different names for one tensor, if its copies list these ranks.
        group: Ranks that will sum; None is the world.

    Raises:
        ValueError: No rank, or several ranks, own an element; or the ranks have different shapes for a tensor.
    """
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    members, rank = frozenset(ranks), dist.get_rank()
    mine = []
    for name, record in named:
        # Python's hash of numbers is the same in every process, unlike that of texts.
        boxes = hash(tuple((box.start, box.size, box.copies) for box in record.boxes))
        mine.append(_Entry(name, record.shape, record.owned(rank, members), boxes))
    # Cheapest first. Both answers are the same on all ranks, so that all go on to the same collective.
    if _are_sums_right(mine, group) or _are_digests_right(mine, group):
        return
    by_rank: list[list[_Entry]] = [mine] * len(ranks)
    dist.all_gather_object(by_rank, mine, group=group)  # small objects of every rank of the group
    by_name: dict[str, list[_Entry]] = {}
    for entry in itertools.chain.from_iterable(by_rank):
        by_name.setdefault(entry.name, []).append(entry)
    for name, entries in by_name.items():
        shapes = {entry.shape for entry in entries}
        # Shapes first: a count of elements means nothing where ranks differ in what the tensor is.
        if len(shapes) > 1:
            raise ValueError(f"{name!r} has different global shapes on the ranks: {sorted(shapes)}; fix its Sharding")
        owned, numel = sum(entry.owned for entry in entries), math.prod(entries[0].shape)
        if owned != numel and not _is_owned_under_several_names(by_rank, {entry.boxes for entry in entries}, numel):
            raise ValueError(
                f"the {len(ranks)} ranks of the group own {owned} elements of {name!r}, which has {numel}: "
                "its boxes' copies are wrong, or the group does not hold all of it"
            )


def _are_sums_right(mine: Sequence[_Entry], group: dist.ProcessGroup | None) -> bool:
    """Return whether all ranks have the same names and together own all elements. One all-reduce of two numbers.

    Each name has a hash as its random weight. The weighted number of owned elements, summed over the ranks, must equal
    the weighted number of elements of this rank's names. The latter, summed over the ranks, must be `size` times this
    rank's number. All ranks receive the same two sums, so that the result is identical on all ranks.
    """
    size = dist.get_world_size(group)
    modulus = 2**63 // size  # so that the sum over the ranks is a number of 64 bits
    # Without weights, an element too many of one tensor would make up for one too few of another.
    weights = {(entry.name, entry.shape): _hashed(entry.name, entry.shape) for entry in mine}
    owned = sum(entry.owned * weights[entry.name, entry.shape] for entry in mine)
    expected = sum(math.prod(shape) * weight for (_, shape), weight in weights.items()) % modulus
    if len({name for name, _ in weights}) < len(weights):  # a name that has two shapes already here
        owned = expected + 1
    sums = torch.tensor([owned % modulus, expected], dtype=torch.int64, device=_device_of(group))
    dist.all_reduce(sums, group=group)
    all_owned, all_expected = sums.tolist()
    return bool(all_owned % modulus == expected and all_expected % modulus == size * expected % modulus)


def _are_digests_right(mine: Sequence[_Entry], group: dist.ProcessGroup | None) -> bool:
    """Return whether every name is owned once over all ranks. Two all-gathers: one number, and four for each name."""
    size, device = dist.get_world_size(group), _device_of(group)
    counts = torch.empty(size, dtype=torch.int64, device=device)
    dist.all_gather(list(counts.split(1)), torch.tensor([len(mine)], device=device), group=group)
    most = max(counts.tolist())
    rows = [(_hashed(each.name), _hashed(each.shape), math.prod(each.shape), each.owned) for each in mine]
    # An all-gather needs the same shape on all ranks; the counts say which rows are real.
    rows += [(0, 0, 0, 0)] * (most - len(mine))
    padded = torch.tensor(rows, dtype=torch.int64).view(most, 4)
    every = torch.empty(size, most, 4, dtype=torch.int64, device=device)
    dist.all_gather(list(every.unbind()), padded.to(device), group=group)
    every = every.cpu()[torch.arange(most) < counts.cpu().unsqueeze(1)]
    # Without a loop over names: a pipeline of a large model has tens of thousands.
    names, which = every[:, 0].unique(return_inverse=True)
    alike = torch.zeros(len(names), 2, dtype=torch.int64).index_copy_(0, which, every[:, 1:3])  # of any of its ranks
    owned = torch.zeros(len(names), dtype=torch.int64).index_add_(0, which, every[:, 3])
    return torch.equal(alike[which], every[:, 1:3]) and torch.equal(owned, alike[:, 1])


def _device_of(group: dist.ProcessGroup | None) -> str:
    """Return a kind of device that the group supports; the CPU if possible, to avoid a wait for an accelerator."""
    kinds = [pair.partition(":")[0] for pair in str(dist.get_backend_config(group)).split(",")]
    return "cpu" if "cpu" in kinds else kinds[0]


def _hashed(*parts: object) -> int:
    """Return a hash of 63 bits that is identical in every process."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


def _is_owned_under_several_names(by_rank: Sequence[Sequence[_Entry]], boxes: Set[int], numel: int) -> bool:
    """Return whether a tensor is owned once, if tensors with the same boxes and copies count as the same tensor.

    Pipeline stages that share a tensor may use different names for it. Several tensors may also have equal boxes. Every
    rank that has any of them must then have the same number n, and together the ranks must own n times all elements.
    An error in one tensor cannot hide an error in another, because tensors with equal boxes have equal owners.
    """
    numbers, owned = set(), 0
    for entries in by_rank:
        alike = [entry.owned for entry in entries if {entry.boxes} == boxes]
        if alike:
            numbers.add(len(alike))
            owned += sum(alike)
    return len(numbers) == 1 and owned == numbers.pop() * numel
