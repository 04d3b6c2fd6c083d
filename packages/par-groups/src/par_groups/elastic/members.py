"""A rank's view of the ranks that are in: it forms the process group of each epoch and leaves it at once."""

import atexit
import os
import queue
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .._torch_private import (
    end_gloo_connects,
    gloo_sockets,
    groups_by_name,
    is_connection_error,
    reset_group_names,
    shut_down_sockets,
    tcp_sockets,
)
from ..live.launch import Environment, as_timedelta
from .link import LINE, KeeperLink
from .roster import OVER
from .waits import free_groups, let_waits_end

STORE, PREFIX, NUMBER, SPARE = "PAR_KEEPER_STORE", "PAR_KEEPER_PREFIX", "PAR_KEEPER_NUMBER", "PAR_KEEPER_SPARE"
"""The environment variables with the address of the store, the prefix of its keys, the rank's number, and "1" for a
rank that waits to be taken in."""

_CONNECT = timedelta(seconds=60)

_NONE = -2
"""No epoch, before the one without a group."""

_BEAT = 0.5
"""Seconds between two signs of life."""


class Members:
    """The ranks that are in. An epoch is one set of them, decided once, with a process group of its own.

    A rank has a number that it keeps, and in each epoch a place among the members, which is its rank in
    torch.distributed. Collectives run over gloo on Linux. `torch.distributed.Work.wait` is replaced in this process, so
    that a wait for a lost rank ends.

    Args:
        variables: The environment variables that the keeper of this rank has set.

    Attributes:
        number: The number of this rank, the same in all epochs.
        epoch: The latest epoch that this rank has formed, from 0; -1 before the first one.
        ranks: The numbers of its members, ascending.
        spares: The number of spares that wait to be taken in, as last reported.

    Raises:
        RuntimeError: No keeper has started this process.

    Example:
        members = Members()
        while (environment := members.form()) is not None:
            try:
                train(environment)  # raises an error within moments after a rank is lost
                break
            except RuntimeError:
                continue
    """

    def __init__(self, variables: Mapping[str, str] = os.environ) -> None:
        if any(name not in variables for name in (LINE, STORE, PREFIX, NUMBER)):
            raise RuntimeError(
                "no keeper has started this process, so nobody would see it die; start it with python -m "
                "par_groups.elastic --ranks 4 -- python train.py"
            )
        host, _, port = variables[STORE].rpartition(":")
        self._address, self._prefix = (host, int(port)), variables[PREFIX]
        self.number, self._is_spare = int(variables[NUMBER]), variables.get(SPARE) == "1"
        self.epoch, self.spares = -1, 0
        self.ranks: tuple[int, ...] = ()
        self._count, self._left = 0, _NONE  # the latest epoch that this rank has left, or must leave
        self._broken = threading.Event()  # set once a member of the current epoch is lost
        self._lock = threading.Lock()  # guards the sockets and the epoch against the thread that leaves
        self._of_store: dict[int, int] = {}  # the socket of the current epoch's client of the store
        self._environment: Environment | None = None
        self._store = dist.PrefixStore(self._prefix, self._connect())  # type: ignore[attr-defined]
        self._line = KeeperLink.inherited(int(variables[LINE]))
        let_waits_end(lambda: None if self._left >= self.epoch else self.epoch)
        self._ended: queue.SimpleQueue[list[dist.ProcessGroup]] = queue.SimpleQueue()
        threading.Thread(target=free_groups, args=(self._ended,), daemon=True, name="members-groups").start()
        threading.Thread(target=self._listen, daemon=True, name="members").start()
        atexit.register(self.close)  # ends torch.distributed in the epoch of that time

    @property
    def place(self) -> int:
        """The position of this rank among the members: its rank in torch.distributed."""
        return self.ranks.index(self.number)

    @property
    def is_spare(self) -> bool:
        """Whether this rank waits outside of the current epoch."""
        return self._is_spare

    def form(self, timeout: timedelta | float | None = None) -> Environment | None:
        """Leave the current epoch, wait until the next one is decided, and start torch.distributed in it. Collective.

        It returns only when all members have connected. If one of them dies on the way, the others form the epoch after
        this one. A spare waits here until it is taken in.

        Args:
            timeout: Timeout of a collective, in seconds or as a timedelta. Default: torch's.

        Returns:
            The environment of this rank in the new epoch; None if the run has ended.
        """
        span = as_timedelta(timeout)
        while True:
            self.abandon()
            self.close()
            # A start that failed has used a name, and a spare, which has had no such start, would use another one.
            reset_group_names()
            members = self._next_members()
            if members is None:
                self._left = _NONE  # what this process does from now on is no part of the run
                return None
            try:
                return self._start(members, span)
            except RuntimeError as error:  # torch's own, also for a connection that was lost
                # A member that dies on the way is the reason, and the keeper reports it within moments. Any other
                # error would come again in the next epoch.
                if not self.is_broken(error):
                    raise

    def abandon(self) -> None:
        """End every collective of this process with an error, now, and those of its peers that wait for it.

        All sockets of gloo in this process are shut down, whoever made the groups, and so is the store of the groups.
        The groups cannot be used any more.
        """
        with self._lock:
            self._left = max(self._left, self.epoch)
            self._end_collectives()

    def is_broken(self, error: BaseException | None = None) -> bool:
        """Return whether a member of this epoch is lost.

        Args:
            error: An error that a loss would explain. The keeper reports a loss some moments after the connections have
                ended, on a busy machine many seconds after, so this waits for the report: up to a minute if the error
                is one of a connection, and 5 seconds after any other one.
        """
        if error is None:
            return self._broken.is_set()
        return self._broken.wait(60 if is_connection_error(error) else 5)

    def close(self) -> None:
        """Leave the current epoch for good and end torch.distributed. A second call does nothing."""
        if self._environment is not None:
            self._ended.put(list(groups_by_name().values()))
            self._environment.close()
            self._environment = None

    def report(self) -> None:
        """Report progress. The keeper kills a rank that reports none for long while others are further."""
        self._count += 1
        self._line.send(f"at {self.epoch} {self._count}")

    def _end_collectives(self) -> None:
        """See `abandon`. The lock is held, so that no other epoch begins in between."""
        # The store first: a group that does not listen yet finds no peer without it.
        shut_down_sockets(self._of_store | gloo_sockets())
        end_gloo_connects(len(self.ranks))

    def _next_members(self) -> tuple[int, ...] | None:
        """Return the members of the next epoch that this rank is in, after all that live have arrived."""
        wanted = self.epoch + 1
        while True:
            if self._is_spare and self._store.check(["epoch"]):
                wanted = int(self._store.get("epoch")) + 1
            # A spare is taken into no other epoch than the one that it waits for, so the two must agree on it.
            self._line.send(f"{'waiting' if self._is_spare else 'at'} {wanted} 0")
            text = self._decided(f"{wanted}/members")
            if text == OVER:
                return None
            members = tuple(map(int, text.split(",")))
            if self.number in members:
                with self._lock:
                    self.epoch, self.ranks, self._count, self._is_spare = wanted, members, 0, False
                    self._broken.clear()
                    if self._left >= self.epoch:  # the epoch broke before this rank had read who is in
                        self._broken.set()
                return members
            # The other ranks have gone on without this one. It may be taken in later, with no state of its own.
            self._is_spare, wanted = True, wanted + 1

    def _decided(self, key: str) -> str:
        pause = 0.002
        # A wait of the store itself would write a warning to stderr every time that it times out.
        while not self._store.check([key]):
            time.sleep(pause)
            pause = min(pause * 1.5, 0.1)
        return str(self._store.get(key).decode())

    def _start(self, members: tuple[int, ...], timeout: timedelta | None) -> Environment:
        before = tcp_sockets()
        client = self._connect()
        with self._lock:
            # A member may die before it has connected, and the others wait for its address in the store. Other code
            # waits there as well, such as par-checkpoint. Leaving has to end these waits, so an epoch has a client of
            # its own.
            self._of_store = {each: inode for each, inode in tcp_sockets().items() if before.get(each) != inode}
        if self._broken.is_set():
            raise RuntimeError(f"a member of epoch {self.epoch} is lost; call form() again")
        store = dist.PrefixStore(f"{self._prefix}/{self.epoch}", client)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=self.place, world_size=len(members), timeout=timeout)
        self._environment = Environment(
            rank=self.place,
            world_size=len(members),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            device=torch.device("cpu"),
            backend="gloo",
            launcher="keeper",
            started=True,
        )
        # No member continues before all have connected. If one dies on the way, all of them notice it here, and `close`
        # ends the group that this one has made.
        dist.barrier()
        return self._environment

    def _connect(self) -> Any:
        return dist.TCPStore(  # type: ignore[attr-defined]  # torch exports it late
            *self._address, is_master=False, wait_for_workers=False, timeout=_CONNECT
        )

    def _listen(self) -> None:
        """Give signs of life, and leave an epoch when the keeper reports that a member of it is lost."""
        while True:
            text = self._line.receive(_BEAT)
            if text is None:
                self._line.send("alive")
                with self._lock:
                    if self._broken.is_set():  # a group that was being made may have connected since the report
                        self._end_collectives()
                continue
            word, _, value = text.partition(" ")
            if word == "spares":
                self.spares = int(value)
            elif word == "leave":
                # A rank whose peer is silent, such as one behind a broken network, would wait until its timeout.
                with self._lock:
                    self._left = max(self._left, int(value))
                    if self._left >= self.epoch:
                        self._broken.set()
                        self._end_collectives()
            else:  # the keeper has ended, and the kernel ends this process
                return
