"""The store in which trainers and generators find each other, and one attempt to move a version between them."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from .._errors import CheckpointError

Value = TypeVar("Value")

COMMIT, ABORT = "commit", "abort"

_LAST_PORT = (1 << 16) - 1
_PAUSE = 0.01  # seconds between two looks at the store
_CONNECT = timedelta(seconds=60)


@dataclass(frozen=True)
class Rendezvous:
    """A store outside of the ranks, in which the trainer and its generators meet.

    Any process that outlives them can host it: `torch.distributed.TCPStore(host, port, is_master=True,
    wait_for_workers=False)`.

    Args:
        address: Host and port of the store, such as "10.0.0.1:29600".
        name: Name of the exchange; several exchanges may share a store.
    """

    address: str
    name: str = "weights"

    def __post_init__(self) -> None:
        host, _, port = str(self.address).rpartition(":")
        if not host or not port.isdigit() or int(port) > _LAST_PORT:
            raise ValueError(f"address={self.address!r}: not a host and a port; pass a text such as '10.0.0.1:29600'")

    def open(self) -> Any:
        """Return a new client of the store.

        Raises:
            CheckpointError: The store does not answer.
        """
        host, _, port = self.address.rpartition(":")
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]  # torch exports it late
                host, int(port), is_master=False, wait_for_workers=False, timeout=_CONNECT
            )
        except dist.DistError as error:
            raise CheckpointError(
                f"no store answers at {self.address}; start one there first ({error!s:.200})"
            ) from error
        return PrefixStore(f"par_checkpoint/{self.name}", store)


class Transaction:
    """One attempt to move a version to one generator. It commits or aborts, once and for all of its processes.

    Args:
        store: Store of the exchange.
        publisher: Number of the publisher.
        number: Number of the attempt.
    """

    def __init__(self, store: Any, publisher: int, number: int) -> None:
        self._exchange, self._publisher = store, publisher
        self.publisher, self.number = publisher, number
        self.store = PrefixStore(f"{publisher}/{number}", store)

    def read(self, key: str) -> int | None:
        """Return an integer that a process has announced, or None."""
        return int(self.store.get(key)) if self.store.check([key]) else None

    def announce(self, key: str, value: int) -> None:
        """Announce an integer to the other processes."""
        self.store.set(key, str(value))

    def decide(self, wanted: str) -> str:
        """Return the decision, which is `wanted` if no process has decided before."""
        # The store decides, so nobody waits for a process that has died, and all find the same answer.
        found: bytes = self.store.compare_set("decision", "", wanted)
        return found.decode()

    def leave(self, size: int) -> None:
        """Remove the keys of the attempt once all of its processes have left. A process calls it last, and once.

        The keys of an attempt in which a process was killed stay in the store.

        Args:
            size: Number of processes.
        """
        # A process that still needs the decision must find the one that the other processes have found.
        if self.store.add("left", 1) < size:
            return
        if self.store.check(["origin"]):
            self._exchange.delete_key(self.store.get("origin").decode())
        for key in self.store.list_keys():
            self.store.delete_key(key)

    def is_aborted(self) -> bool:
        """Return whether a process has given up, a rank has closed the publisher, or another one has taken over."""
        # A process that was killed cannot give up. The publisher that replaces it ends the wait for it.
        if self._exchange.add("publishers", 0) != self._publisher:
            return True
        # The ranks of a trainer close it at different moments, and a closed one takes part in no further attempt.
        if self._exchange.check([f"{self._publisher}/closed"]):
            return True
        return bool(self.store.check(["decision"])) and self.store.get("decision") == ABORT.encode()

    def wait_for(self, look: Callable[[], Value | None], timeout: float, what: str) -> Value:
        """Look again and again until a value is found.

        Args:
            look: Function that returns the value, or None.
            timeout: Maximum seconds.
            what: Name of the awaited event, for errors.

        Raises:
            TransactionAborted: A process has given up, or the time is over.
        """
        deadline = time.monotonic() + timeout
        while (found := look()) is None:
            if self.is_aborted():
                raise TransactionAborted("a process has given up, or the publisher is closed or replaced")
            if time.monotonic() > deadline:
                raise TransactionAborted(f"waited {timeout:g} s for {what}")
            time.sleep(_PAUSE)
        return found

    def gather(self, size: int, timeout: float) -> None:
        """Wait until all processes have come.

        Without this, the others would wait inside gloo for a process that never connects, and gloo cannot be stopped.

        Args:
            size: Number of processes.
            timeout: Maximum seconds.

        Raises:
            TransactionAborted: A process has given up, or the time is over.
        """
        # One key decides whether all have come, as a process that gives up must not be waited for: a late process would
        # wait for its connections until the timeout, would be late for the next attempt, too, and so on.
        if self.store.add("here", 1) == size:
            self.store.compare_set("gathered", "", "yes")
        try:
            self.wait_for(lambda: self.store.check(["gathered"]) or None, timeout, f"{size} processes")
        except TransactionAborted:
            if self.store.compare_set("gathered", "", "no") != b"yes":
                raise
        if self.store.get("gathered") != b"yes":
            raise TransactionAborted("a process has given up before all had come")


class TransactionAborted(Exception):  # noqa: N818 - no error of the caller
    """An attempt has ended before any value has moved."""
