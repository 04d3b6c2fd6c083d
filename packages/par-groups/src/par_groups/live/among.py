"""Communicators that only their own ranks make, at any time."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .._torch_private import group_called

# It is kept here because a process group takes no attributes, and because all callers of this process must count in one
# place: two counters would give two groups one name. It ends with its world.
_MADE: WeakKeyDictionary[dist.ProcessGroup, Counter[str]] = WeakKeyDictionary()
"""For each world, how many communicators of the same ranks were made here."""


def group_among(
    ranks: Sequence[int], timeout: timedelta | None = None, backend: str | None = None, description: str | None = None
) -> dist.ProcessGroup:
    """Make a communicator of some ranks. Collective over these ranks; no other rank takes part.

    The name of the group is unique. It does not depend on groups that were made or destroyed in the meantime, or on the
    number of other groups that each rank has made.

    Args:
        ranks: Global ranks, including this rank. An order other than ascending needs torch 2.13.
        timeout: Timeout of a collective. Default: torch's default.
        backend: Backend of the group. Default: the backend of the running world.
        description: Purpose of the group; torch shows it in logs and traces.
    """
    ranks = list(ranks)
    unsorted: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}  # an option since torch 2.13
    with group_called(_name_of(ranks)):
        made = dist.new_group(
            ranks, timeout, backend, use_local_synchronization=True, group_desc=description, **unsorted
        )
    return cast("dist.ProcessGroup", made)  # this rank is one of them


def _name_of(ranks: Sequence[int]) -> str:
    """Return the name of the next communicator of these ranks; it is identical on all of them."""
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError(f"there is no world of which the ranks {list(ranks)} could be; call launch() first")
    # The digest keeps names short for groups of thousands of ranks.
    numbers = hashlib.blake2b(" ".join(map(str, ranks)).encode(), digest_size=12).hexdigest()
    made = _MADE.setdefault(world, Counter())
    # Making a group is collective over its ranks, so all of them have counted the same calls and agree without a
    # message.
    made[numbers] += 1
    return f"par_groups/{numbers}/{made[numbers]}"
