"""Communicators that only their own ranks make, at any time."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .._torch_private import group_called

_MADE: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()
"""For each world, how many communicators of the same ranks were made here."""


def group_among(
    ranks: Sequence[int], timeout: timedelta | None = None, backend: str | None = None, description: str | None = None
) -> dist.ProcessGroup:
    """A new communicator of some ranks, which alone take part. Collective over them.

    It has a name that no other group has, whatever groups come and go in the meantime, and however many of other ranks
    each of these ranks has made.

    Args:
        ranks: Global ranks, this one among them; in another order than ascending from torch 2.13 on.
        timeout: How long a collective may take; default: torch's own.
        backend: What it runs on; default: the backend of the running world.
        description: What it is for, which torch shows in logs and records.
    """
    ranks = list(ranks)
    unsorted: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}  # an option since torch 2.13
    with group_called(_name_of(ranks)):
        made = dist.new_group(
            ranks, timeout, backend, use_local_synchronization=True, group_desc=description, **unsorted
        )
    return cast("dist.ProcessGroup", made)  # this rank is one of them


def _name_of(ranks: Sequence[int]) -> str:
    """A name for another communicator of these ranks, the same on all of them, which have made as many."""
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError(f"there is no world of which the ranks {list(ranks)} could be; call launch() first")
    numbers = hashlib.blake2b(" ".join(map(str, ranks)).encode(), digest_size=12).hexdigest()
    made = _MADE.setdefault(world, Counter())
    made[numbers] += 1
    return f"par_groups/{numbers}/{made[numbers]}"
