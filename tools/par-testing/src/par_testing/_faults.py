"""Faults that a test declares: which rank fails, at which step, and how."""

import os
import signal
import time
from dataclasses import dataclass
from typing import Literal, get_args

How = Literal["raise", "kill", "hang"]


class InjectedFault(Exception):  # noqa: N818  # named for what it is: a fault, no error of ours
    """Raised by a fault with how="raise"."""


def fail_at(rank: int, step: int, how: How = "raise") -> "Fault":
    """Declares a fault; the code under test, or its test, calls `check` at every step.

    Args:
        rank: The rank that fails.
        step: The step at which it fails.
        how: "raise" raises `InjectedFault`, "kill" ends the process with SIGKILL, "hang" sleeps for ever.

    Raises:
        ValueError: An unknown `how`, or a negative rank or step.
    """
    if how not in get_args(How):
        raise ValueError(f"how={how!r}: a rank can {', '.join(get_args(How))}")
    if rank < 0 or step < 0:
        raise ValueError(f"fail_at(rank={rank}, step={step}): both are counted from 0")
    return Fault(rank=rank, step=step, how=how)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A declared fault. See `fail_at`."""

    rank: int
    step: int
    how: How

    def check(self, rank: int, step: int) -> None:
        """Fails if rank and step are those of this fault; else does nothing.

        Raises:
            InjectedFault: For how="raise".
        """
        if (rank, step) != (self.rank, self.step):
            return
        if self.how == "raise":
            raise InjectedFault(f"rank {rank} fails at step {step}, as the test declares")
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            time.sleep(3600)
