"""Batches that all ranks of a replica must read alike, compared where a strategy is given them by another's loader."""

import hashlib
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from par_groups import ProcessGroups, agree

from .._torch_private import tree_leaves
from .execute import read_once


class BatchComparison:
    """Compares batches over the tensor and pipeline ranks of a replica: the first one, the second, the fourth, ...

    Stages that read other rows train on inputs and targets that do not belong together, and no rank sees it. So few
    comparisons cost nothing in the long run; every rank counts alike, so none waits for one that does not compare.

    Args:
        groups: The groups of the strategy.
    """

    def __init__(self, groups: ProcessGroups) -> None:
        self._groups = [groups[axis] for axis in ("tensor", "pipeline") if groups.size(axis) > 1]
        self._calls: dict[Hashable, int] = {}

    def begin_anew(self) -> None:
        """Lets the next batch be compared: what is read has changed."""
        self._calls.clear()

    def is_due(self, of: Hashable) -> bool:
        """Whether the next batch is to be compared; counts it.

        Args:
            of: What the batch is for: each has a count of its own.
        """
        calls = self._calls[of] = self._calls.get(of, 0) + 1
        return bool(self._groups) and calls & (calls - 1) == 0

    def compared(self, next_batch: Callable[[], Any], name: str) -> Callable[[], Any]:
        """Takes a batch and compares it. Collective over the tensor and pipeline ranks.

        A rank that cannot read says so later, when it is asked for its batch.

        Args:
            next_batch: Gives the batch, or raises.
            name: What it comes from, for the message, such as "data_iter=DataLoader".

        Returns:
            A function that gives the batch, or raises what `next_batch` has raised.

        Raises:
            ValueError: The batches differ; on every rank.
        """
        batch, again = read_once(next_batch)
        is_pair = isinstance(batch, tuple | list) and len(batch) == 2
        found = agree(None, (_digest(batch[0]), _digest(batch[1])) if is_pair else (_digest(batch), ""), *self._groups)
        _check(found, name)
        return again


def _check(found: dict[int, tuple[str, str]], name: str) -> None:
    """Raises if ranks have read different rows. A rank without inputs or target, or that could not read, has none."""
    for place in range(2):
        have = {rank: each[place] for rank, each in found.items() if each[place]}
        first = next(iter(have), None)
        others = [rank for rank, digest in have.items() if digest != have[first]] if first is not None else []
        if others:
            raise ValueError(
                f"{name}: ranks {others} have read another batch than rank {first}, and all ranks of a replica need "
                "the same; set what the sampler, the dataset and the collate function draw with to one seed on these "
                "ranks, or pass the data loader to Strategy.initialize()"
            )


def _digest(value: Any) -> str:
    """What tells values apart; empty if there is no tensor and no number in one."""
    digest, is_empty = hashlib.blake2b(digest_size=16), True
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            if leaf.layout is torch.strided:
                digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(leaf, int | float | str | bytes):
            digest.update(repr(leaf).encode())
        else:
            continue
        is_empty = False
    return "" if is_empty else digest.hexdigest()
