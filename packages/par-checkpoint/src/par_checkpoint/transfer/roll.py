"""The roll of a call: the store of torch.distributed records which ranks of a group have joined it."""

import logging
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from .._errors import UnansweredError
from .._torch_private import store_of_world

_logger = logging.getLogger(__name__)

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

    def unanswered(self, cause: Exception | str, timeout: timedelta, *, in_background: bool) -> UnansweredError:
        """Return the error for a rank that does not answer. It names the ranks that have not joined.

        Args:
            cause: Error of torch, or its cause as a text.
            timeout: Time that this rank has waited at most.
            in_background: Whether the work is one that ranks do not join by a call.
        """
        seconds, size = f"{timeout.total_seconds():g}", len(self._world_ranks)
        absent = [] if in_background else self.absent()
        if absent:
            has = "has" if len(absent) == 1 else "have"
            return UnansweredError(
                f"timeout={seconds}: {self.call} waits for all {size} ranks of its group, and "
                f"{named_ranks(absent)} {has} not called it; remove the `if rank == 0` around it, or what keeps a rank "
                "from it, or pass a group of the ranks that call it"
            )
        where = "a save in the background" if in_background else f"{self.call}, to which all ranks came"
        return UnansweredError(
            f"timeout={seconds}: in {where}, a rank of {size} does not answer ({cause!s:.200}); look at the "
            "logs of the other ranks and restart the run, or pass a larger timeout"
        )

    def warn(self, waited: timedelta) -> None:
        """Log a warning that names the ranks that have not joined the call, on the first rank that has joined."""
        absent = self.absent()
        if absent and self._world_ranks[self._rank] == next(rank for rank in self._world_ranks if rank not in absent):
            # `warnings.warn` may be configured to raise, and the other ranks would then wait for this one.
            _logger.warning(
                "%s has waited %g s for %s, which %s not called it; call it on every rank of its group",
                self.call,
                waited.total_seconds(),
                named_ranks(absent),
                "has" if len(absent) == 1 else "have",
            )

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
