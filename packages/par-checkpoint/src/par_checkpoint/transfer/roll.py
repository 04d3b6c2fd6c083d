"""The roll of a call: the store of torch.distributed records which ranks of a group have joined it."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from .._torch_private import store_of_world

_SHOWN = 8  # ranks in an error
_LONGEST = 0.5  # seconds between two checks of the store


class Roll:
    """The calls that the ranks of a group have joined, which each rank registers in the store.

    A rank that waits for another one cannot ask it, for the other one may be computing, or gone. The store answers.

    Args:
        store: Store whose keys only these ranks use.
        rank: Number of this rank in its group.
        world_ranks: Numbers of all ranks of the group in the world, for messages.

    Attributes:
        call: The present call, as errors name it.
        is_lost: Whether the store is gone, as after a torchrun that was killed. Errors then cannot name ranks, but the
            remaining ranks can still save.
    """

    def __init__(self, store: Any, rank: int, world_ranks: Sequence[int]) -> None:
        self.is_lost = False
        self._store = store
        self._rank, self._world_ranks = rank, world_ranks
        self._count = 0
        self.call = "a call of par_checkpoint"

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "Roll":
        """Return the roll of a group, in the store of the world."""
        store = store_of_world(f"par_checkpoint/{group.group_name}")
        return cls(store, dist.get_rank(group), dist.get_process_group_ranks(group))

    def come(self, call: str) -> None:
        """Record that this rank has joined a call.

        Args:
            call: Name of the call in errors, such as "save('runs/step-10')".
        """
        self.call, self._count = call, self._count + 1
        if self.is_lost:
            return
        try:
            self._store.set(f"{self._count}/{self._rank}", "")
            # Each call begins with an agreement, so all ranks have left the call before the previous one. Its keys
            # would otherwise accumulate in the store for the whole run.
            if self._count > 2:
                self._store.delete_key(f"{self._count - 2}/{self._rank}")
        except dist.DistError:
            self.is_lost = True

    def absent(self) -> list[int]:
        """Return the ranks, numbered as in the world, that have not joined the present call."""
        if not self._count or self.is_lost:
            return []
        try:
            return [self._world_ranks[rank] for rank in self._absent(range(len(self._world_ranks)))]
        except dist.DistError:
            self.is_lost = True
            return []

    def is_first_of_others(self, absent: Sequence[int]) -> bool:
        """Return whether this rank is the first rank of the group that is not absent."""
        return self._world_ranks[self._rank] == next(rank for rank in self._world_ranks if rank not in absent)

    def _absent(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks among `ranks` that have not joined."""
        # One request answers whether all of some keys exist. Usually few ranks are absent, so halving finds them with
        # few requests, however many ranks there are.
        if self._store.check([f"{self._count}/{rank}" for rank in ranks]):
            return []
        if len(ranks) == 1:
            return list(ranks)
        middle = len(ranks) // 2
        return self._absent(ranks[:middle]) + self._absent(ranks[middle:])

    def next_name(self) -> str:
        """Return a name for a new communicator of this group, the same on all ranks that create it."""
        return f"communicator {self._count_of(1)}"

    def store_for(self, name: str) -> Any:
        """Return the store in which the ranks of a communicator meet."""
        return PrefixStore(name, self._store)

    def give_back(self) -> None:
        """Free the last name after a communicator failed, because ranks that join it later need the same name."""
        self._count_of(-1)

    def _count_of(self, step: int) -> int:
        number: int = self._store.add(f"made/{self._rank}", step)
        return number

    def publish(self, name: str) -> None:
        """Record that this rank has created its side of a communicator, so that other ranks can connect with it."""
        self._store.set(f"{name}/{self._rank}", "")

    def wait_for(self, rank: int, name: str, timeout: timedelta) -> bool:
        """Wait until a rank of the group has created its side of a communicator, and return whether it has.

        Args:
            rank: Number of the rank in the group.
            name: Name of the communicator.
            timeout: Maximum time to wait.
        """
        # The store's own `wait` would hold its client's lock, and every other thread of the process that uses the store
        # would wait, too. So this thread polls.
        deadline, pause = time.monotonic() + timeout.total_seconds(), 0.001
        while not self._store.check([f"{name}/{rank}"]):
            if time.monotonic() > deadline:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        return True


def named_ranks(ranks: Sequence[int]) -> str:
    """Return a text that names some ranks."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"ranks {', '.join(map(str, sorted(ranks)[:_SHOWN]))}{more}"
