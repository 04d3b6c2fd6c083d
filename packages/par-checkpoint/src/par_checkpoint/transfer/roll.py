"""Which ranks of a group have come to a call, as the store of torch.distributed knows it without asking them."""

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from .._torch_private import store_of_world

_SHOWN = 8  # ranks in an error
_LONGEST = 0.5  # seconds between two looks into the store


class Roll:
    """The calls that the ranks of a group have joined, which each rank registers in the store.

    A rank that waits for another one cannot ask it, for the other one may be computing, or gone. The store answers.

    Args:
        group: The ranks that save or load together.

    Attributes:
        call: The present call, as errors name it.
        is_lost: Whether the store is gone, as after a torchrun that was killed. Then nobody can be named, but the ranks
            that are left can still save.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.is_lost = False
        self._prefix = f"par_checkpoint/{group.group_name}"
        self._store = store_of_world(self._prefix)
        self._rank, self._world_ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
        self._count = 0
        self.call = "a call of par_checkpoint"

    def come(self, call: str) -> None:
        """Notes that this rank has come to a call.

        Args:
            call: Name of the call in errors, such as "save('runs/step-10')".
        """
        self.call, self._count = call, self._count + 1
        if self.is_lost:
            return
        try:
            self._store.set(f"{self._count}/{self._rank}", "")
            if self._count > 2:  # no rank waits in a call that is two calls back: each call begins with an agreement
                self._store.delete_key(f"{self._count - 2}/{self._rank}")
        except dist.DistError:
            self.is_lost = True

    def absent(self) -> list[int]:
        """The ranks of the group, numbered as in the world, that have not come to the present call."""
        if not self._count or self.is_lost:
            return []
        try:
            return [self._world_ranks[rank] for rank in self._absent(range(len(self._world_ranks)))]
        except dist.DistError:
            self.is_lost = True
            return []

    def is_first_of_others(self, absent: Sequence[int]) -> bool:
        """Whether this rank is the first of the group that is not absent."""
        return self._world_ranks[self._rank] == next(rank for rank in self._world_ranks if rank not in absent)

    def _absent(self, ranks: Sequence[int]) -> list[int]:
        """Those of some ranks that have not come. One look tells whether all have, so halves are looked at."""
        if self._store.check([f"{self._count}/{rank}" for rank in ranks]):
            return []
        if len(ranks) == 1:
            return list(ranks)
        middle = len(ranks) // 2
        return self._absent(ranks[:middle]) + self._absent(ranks[middle:])

    def next_name(self) -> str:
        """A name for a communicator that this group makes now, the same on all ranks that make it."""
        return f"{self._prefix}/{self._count_of(1)}"

    def give_back(self) -> None:
        """Frees the last name again, as its communicator was not made: ranks that come to it later need the same."""
        self._count_of(-1)

    def _count_of(self, step: int) -> int:
        number: int = self._store.add(f"made/{self._rank}", step)
        return number

    def publish(self, name: str) -> None:
        """Notes that this rank has made its side of a communicator, so that others can connect with it."""
        self._store.set(f"{name}/{self._rank}", "")

    def wait_for(self, rank: int, name: str, timeout: timedelta) -> bool:
        """Waits until a rank of the group has made its side of a communicator; whether it has.

        Looks are repeated, for a store that blocks in one thread answers no other thread of the process.

        Args:
            rank: The rank, by its number in the group.
            name: The communicator's name.
            timeout: How long to wait at most.
        """
        deadline, pause = time.monotonic() + timeout.total_seconds(), 0.001
        while not self._store.check([f"{name}/{rank}"]):
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        return True


def named_ranks(ranks: Sequence[int]) -> str:
    """Some ranks in words."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"ranks {', '.join(map(str, sorted(ranks)[:_SHOWN]))}{more}"
