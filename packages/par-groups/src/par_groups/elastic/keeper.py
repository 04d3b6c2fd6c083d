"""The keeper of a host: it starts the host's ranks, sees their deaths, and fences ranks that hang."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import torch.distributed as dist

from ..live.environment import Launch, read_environment
from ..live.launch import meeting_point
from ..live.logging import get_logger
from .link import LINE, KeeperLink, RankProgress
from .members import NUMBER, PREFIX, SPARE, STORE
from .roster import OVER, RankState, Roster, Verdict, write_ranks

_TICK = 0.05
"""Seconds between two looks at the ranks, and between two renewals of the lease."""

_SAFE = 0.6
"""Part of the lease after which a keeper that cannot renew it kills its ranks. The rest is for the kill itself."""

_log = get_logger(__name__)


def keep(
    command: Sequence[str],
    *,
    ranks: int = 1,
    spares: int = 0,
    restarts: int = 0,
    lease: float = 20.0,
    patience: float = 60.0,
) -> int:
    """Start ranks of a job as children of this process and watch them until the job has ended.

    Start one keeper on each host, by torchrun or any other launcher that `launch` reads. The keeper of the first host,
    or the launcher there, has the store of the job. If that host is lost, all keepers kill their ranks and return 1:
    start the job again from its checkpoint.

    Args:
        command: The command of a rank, which makes `Members`.
        ranks: Number of ranks on this host, the same on all hosts.
        spares: Number of further ranks on this host, which wait until a rank is lost.
        restarts: Number of times that a dead rank of this host is started again, as a spare.
        lease: Seconds without a message from a host, after which the others go on without it. A keeper that cannot
            renew its lease kills its ranks earlier, so two parts of a job never go on. torch's store looks up the name
            of each new client, and answers nobody meanwhile. A slow name server needs a lease of more than 10 seconds.
        patience: Seconds without progress after which a rank is killed, while other ranks wait for it. It must be
            longer than the longest step, save and compilation.

    Returns:
        The exit code: 0 if the job has ended well, also without ranks of this host.

    Raises:
        ValueError: An argument is not positive, or the command is empty.
    """
    if not command:
        raise ValueError("command is empty; pass the command of a rank, such as python train.py")
    for name, given in (("ranks", ranks), ("lease", lease), ("patience", patience)):
        if not given > 0:
            raise ValueError(f"{name}={given}: it must be positive; pass a larger number")
    place = read_environment(os.environ)
    keeper = Keeper(command, place, ranks=ranks, spares=spares, restarts=restarts, lease=lease, patience=patience)
    return keeper.run()


State = Literal["running", "dead", "done"]


class _Rank:
    """A child process, and how far it has come."""

    def __init__(self, process: "subprocess.Popen[bytes]", line: KeeperLink, *, spare: bool) -> None:
        self.process, self.line, self.spare = process, line, spare
        self.state: State = "running"
        self.progress = RankProgress()
        self.heard = time.monotonic()
        self.has_beaten = self.is_killed = False
        self.behind: float | None = None  # since when other ranks are further and this one has not moved
        self.told: tuple[int, int] = (-1, 0)  # the epoch that it was told to leave, and the spares that it knows

    def read(self) -> None:
        """Read what the rank has reported."""
        while text := self.line.receive(0):
            self.heard, self.has_beaten = time.monotonic(), True
            word, *numbers = text.split()
            # "alive" proves only that the process runs. The other words report progress, which ends a time behind the
            # others.
            if word != "alive":
                self.spare, self.progress, self.behind = word == "waiting", RankProgress(*map(int, numbers)), None

    def is_hung(self, front: RankProgress, patience: float) -> bool:
        """Return whether the rank is stopped, or has not moved for too long while others are further."""
        now = time.monotonic()
        if self.spare or self.progress >= front:
            self.behind = None
        elif self.behind is None:
            self.behind = now
        # A rank that has not made its `Members` yet sends nothing, so its silence proves nothing.
        is_silent = self.has_beaten and now - self.heard > patience
        return is_silent or (self.behind is not None and now - self.behind > patience)


class Keeper:
    """The ranks of one host, and the lease of the host.

    Args:
        command: The command of a rank.
        place: The position of this host among the hosts.
        ranks: See `keep`, also for the arguments below.
        spares: Number of spares.
        restarts: Number of restarts.
        lease: Seconds.
        patience: Seconds.
    """

    def __init__(
        self,
        command: Sequence[str],
        place: Launch,
        *,
        ranks: int,
        spares: int,
        restarts: int,
        lease: float,
        patience: float,
    ) -> None:
        self._command, self._place, self._count, self._spares = list(command), place, ranks, spares
        self._restarts, self._lease, self._patience = restarts, lease, patience
        self._ranks: dict[int, _Rank] = {}
        self._verdict, self._is_last = Verdict(), False
        self._renewed = time.monotonic()  # when the last renewal began that the store has answered
        self._wake, self._ending = threading.Event(), threading.Event()
        self._next_number = 0

    def run(self) -> int:
        """Start the ranks, watch them to the end, and return the exit code."""
        store, address, prefix = self._open_store()
        total = self._count + self._spares
        # Numbers of a host are apart from those of the other hosts, also after restarts.
        self._next_number = self._place.rank * (total + self._restarts)
        for local in range(total):
            self._begin(local, address, prefix, spare=local >= self._count)
        # The lease counts from here: the store may have taken longer than a lease to open.
        renewal = threading.Thread(target=self._renew, args=(store,), daemon=True, name="lease")
        self._renewed = time.monotonic()
        renewal.start()

        # Each rank has a session of its own, so a signal to the keeper does not reach it by itself.
        def forward(number: int, _: object) -> None:
            for rank in self._ranks.values():
                if rank.process.poll() is None:
                    rank.process.send_signal(number)

        handlers = {each: signal.signal(each, forward) for each in (signal.SIGTERM, signal.SIGINT)}
        try:
            return self._watch(address, prefix)
        finally:
            for rank in self._ranks.values():
                _kill(rank)
                rank.process.wait()
                rank.line.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            # The last renewal reports to the roster that this host has ended, so it is awaited. A store that does not
            # answer must not delay the exit by more than a lease.
            self._ending.set()
            self._wake.set()
            renewal.join(self._lease)

    def _open_store(self) -> tuple[Any, str, str]:
        """Return the store of the keepers, its address, and the prefix of this job's keys in it."""
        place, timeout = self._place, timedelta(seconds=max(60.0, self._lease))
        if place.world_size == 1:
            # With one host, no other host has to find the port, so the kernel may choose any.
            own = dist.TCPStore(  # type: ignore[attr-defined]  # torch exports it late
                "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout
            )
            return dist.PrefixStore("keepers", own), f"127.0.0.1:{own.port}", "keepers"  # type: ignore[attr-defined]
        met = meeting_point(place, timeout)
        # The prefix of a start is random, and a rank that makes a client of its own needs its text.
        if place.rank == 0:
            met.set("keepers", uuid.uuid4().hex)
        prefix = met.get("keepers").decode()
        store = dist.PrefixStore(prefix, met.underlying_store)  # type: ignore[attr-defined]
        return store, f"{place.address}:{place.port}", prefix

    def _begin(self, local: int, address: str, prefix: str, *, spare: bool) -> None:
        own, other = KeeperLink.pair()
        number, self._next_number = self._next_number, self._next_number + 1
        variables = {
            **os.environ,
            LINE: str(other.fileno()),
            STORE: address,
            PREFIX: prefix,
            NUMBER: str(number),
            SPARE: str(int(spare)),
            "LOCAL_RANK": str(local),
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "par_groups.elastic.child", str(os.getpid()), *self._command],
            env=variables,
            pass_fds=(other.fileno(),),
            start_new_session=True,  # the rank is killed with the processes that it has started
        )
        # While this process has a copy of the child's end, `select` does not see the end of the connection when the
        # child dies.
        other.close()
        self._ranks[number] = _Rank(process, own, spare=spare)

    def _watch(self, address: str, prefix: str) -> int:
        while True:
            # A report or a death wakes this loop at once. The tick is for the verdict, which another thread reads.
            select.select([each.line for each in self._ranks.values() if each.state == "running"], [], [], _TICK)
            # The thread of the lease replaces the verdict at any time, so each look at the ranks uses one verdict
            # throughout.
            verdict = self._verdict
            for number, rank in list(self._ranks.items()):
                if rank.state != "running":
                    continue
                if self._look_at(number, rank, verdict) == "dead" and self._restarts > 0 and not verdict.over:
                    self._restarts -= 1
                    self._begin(list(self._ranks).index(number) % self._count, address, prefix, spare=True)
            self._wake.set()
            # The other hosts have continued without this one, so its ranks must not write any more.
            if self._place.rank in verdict.lost:
                _log.error("host %d was taken for lost, and its ranks end", self._place.rank)
                return 1
            if time.monotonic() - self._renewed > _SAFE * self._lease:
                _log.error("the store at %s does not answer; the other hosts go on without this one", address)
                return 1
            # The keeper of the first host stays until all others have ended, because they need its store and roster.
            may_end = self._is_last and verdict.over if self._place.rank == 0 else True
            if may_end and all(each.state != "running" for each in self._ranks.values()):
                codes = {number: each.process.returncode for number, each in self._ranks.items()}
                # If the ranks that went on have ended well, a rank that was lost on the way fails nothing: it was no
                # member of the last epoch. A spare that was never needed ends well in any case.
                raised = [number for number, code in codes.items() if code > 0 and number in verdict.members]
                is_well = not verdict.failed and not raised and (0 in codes.values() or verdict.over)
                if verdict.failed:
                    _log.error("no rank with the state is left; start the job again from its checkpoint")
                return 0 if is_well else next((code for code in codes.values() if code > 0), 1)

    def _look_at(self, number: int, rank: _Rank, verdict: Verdict) -> State:
        """Read what a rank has reported, tell it what it must know, fence it if it hangs, and return its state."""
        rank.read()
        code = rank.process.poll()
        if code is not None:
            # The rank may have reported between the first read and its end.
            rank.read()
            rank.state = "done" if code == 0 else "dead"
            _kill(rank)  # processes that it has started may have survived it
            if code:
                _log.warning("rank %d has ended with exit code %d", number, code)
        elif not rank.is_killed and rank.is_hung(verdict.front, self._patience):
            # The rank must be dead before the others go on without it: it might move again, and write.
            _log.warning("rank %d has not moved for %.3g s and is killed", number, self._patience)
            rank.is_killed = True
            _kill(rank)
        # A request to leave comes before the number of spares: ranks wait for each other until all have left.
        elif verdict.broken and number in verdict.members and rank.told[0] < verdict.epoch:
            rank.told = verdict.epoch, rank.told[1]
            rank.line.send(f"leave {verdict.epoch}")
        elif rank.told[1] != verdict.spares:
            rank.told = rank.told[0], verdict.spares
            rank.line.send(f"spares {verdict.spares}")
        return rank.state

    def _renew(self, store: Any) -> None:
        """Renew the lease, in a thread of its own because a store behind a broken network answers late or never."""
        host, hosts, count = self._place.rank, self._place.world_size, 0
        roster = Roster(store, hosts, self._lease) if host == 0 else None
        try:
            while not self._ending.is_set():
                # The lease counts from before the call: the roster may see the renewal long before the answer arrives
                # here.
                began, count = time.monotonic(), count + 1
                store.set(f"lease/{host}", f"{count} {self._states()}")
                if roster is not None:
                    roster.update()
                    self._verdict, self._is_last = roster.verdict, roster.is_last
                elif store.check(["verdict"]):
                    # A store may answer `set` after its host has died; what it returns proves that it lives.
                    self._verdict = Verdict.of(store.get("verdict"))
                else:
                    store.get(f"lease/{host}")
                self._renewed = began
                self._wake.clear()
                self._wake.wait(_TICK)
            store.set(f"lease/{host}", f"{OVER} {self._states()}")
        except RuntimeError as error:  # `_watch` sees that the lease is not renewed
            _log.warning("the store of the keepers is lost: %s", str(error).splitlines()[0])

    def _states(self) -> str:
        return write_ranks({n: RankState(each.state, each.spare, each.progress) for n, each in self._ranks.items()})


def _kill(rank: _Rank) -> None:
    """Kill a rank and the processes that it has started; SIGKILL also ends a process that is stopped."""
    try:
        os.killpg(rank.process.pid, signal.SIGKILL)
    except ProcessLookupError:  # all of them have ended
        return
