"""The decision which ranks are in: one set of ranks for each epoch, decided once."""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from .link import RankProgress

OVER = "over"
"""The members of an epoch that no rank forms, because the run has ended."""


_START = RankProgress()


@dataclass(frozen=True)
class RankState:
    """State of one rank, as its keeper reports it.

    Args:
        state: "running"; "dead" after any end but exit code 0; "done" after exit code 0.
        spare: Whether the rank waits to be taken in.
        progress: Latest step, and place in it.
    """

    state: Literal["running", "dead", "done"]
    spare: bool
    progress: RankProgress


@dataclass(frozen=True)
class Verdict:
    """State of the job, which the roster sends to all keepers.

    Args:
        epoch: The latest epoch that was decided; -1 before the first one.
        members: The ranks of this epoch.
        broken: Whether one of them is lost, so that the others have to leave.
        spares: The number of spares that wait and would replace a rank that is lost.
        front: The furthest progress of a living member.
        lost: The hosts whose lease has ended; they never return.
        over: Whether the run has ended.
        failed: Whether it has ended because no rank was left.
    """

    epoch: int = -1
    members: tuple[int, ...] = ()
    broken: bool = False
    spares: int = 0
    front: RankProgress = _START
    lost: tuple[int, ...] = ()
    over: bool = False
    failed: bool = False

    def text(self) -> str:
        """Return the verdict as text."""
        return json.dumps(asdict(self))

    @staticmethod
    def of(text: str | bytes) -> "Verdict":
        """Return the verdict that `text` has written."""
        found = json.loads(text)
        lists = {name: tuple(found[name]) for name in ("members", "lost")}
        return Verdict(**{**found, **lists, "front": RankProgress(*found["front"])})


def write_ranks(ranks: Mapping[int, RankState]) -> str:
    """Return the states of a host's ranks as text."""
    return json.dumps({number: [each.state, each.spare, *each.progress] for number, each in ranks.items()})


def read_ranks(text: str) -> dict[int, RankState]:
    """Return the states that `write_ranks` has written."""
    return {
        int(number): RankState(state, spare, RankProgress(*progress))
        for number, (state, spare, *progress) in json.loads(text).items()
    }


class Roster:
    """The ranks that are in. One keeper has it, and all others read its verdict.

    Args:
        store: The store of all keepers.
        hosts: The number of hosts.
        lease: Seconds after which a host that has not renewed its lease is lost.
    """

    def __init__(self, store: Any, hosts: int, lease: float) -> None:
        self._store, self._hosts, self._lease = store, hosts, lease
        self._renewed: dict[int, tuple[str, float]] = {}  # the last text of each host, and when it was new
        self._verdict, self._full = Verdict(), 0  # and the number of members of an epoch without losses

    @property
    def verdict(self) -> Verdict:
        """The latest verdict."""
        return self._verdict

    @property
    def is_last(self) -> bool:
        """Whether all hosts but the first one have ended or are lost."""
        return all(self._is_lost(host) or self._renewed.get(host, ("",))[0] == OVER for host in range(1, self._hosts))

    def update(self) -> None:
        """Read all leases, decide the next epoch if all that live have arrived at it, and publish the verdict."""
        ranks = dict(self._look())
        before = self._verdict
        members = {each: ranks[each] for each in before.members if each in ranks}
        living = {each: state for each, state in members.items() if state.state == "running"}
        spares = {each for each, state in ranks.items() if state.state == "running" and state.spare}
        # A member that has ended well has completed the run, so the other members need no further epoch.
        over = any(state.state == "done" for state in members.values())
        epoch, now_in = before.epoch, before.members
        if before.epoch < 0:
            # The first epoch waits for all ranks that were started and are no spares.
            living = {each: state for each, state in ranks.items() if state.state == "running" and not state.spare}
            complete = len(self._renewed) == self._hosts
            self._full = len(living)
        else:
            complete = True
        failed = before.failed or (complete and not living and not over and not before.over)
        over = over or before.over or failed
        # The next epoch is decided only when every living member has left the present one, so that no member is missing
        # in it.
        arrived = all(state.progress.epoch > before.epoch for state in living.values())
        if over and not before.over:
            self._decide(before.epoch + 1, OVER)
        elif complete and living and arrived and not over:
            epoch = before.epoch + 1
            # Spares fill the places of lost ranks. The number of members never exceeds that of the first epoch.
            waiting = sorted(each for each in spares if ranks[each].progress.epoch == epoch)
            now_in = tuple(sorted([*living, *waiting[: self._full - len(living)]]))
            self._decide(epoch, ",".join(map(str, now_in)))
            self._store.set("epoch", str(epoch))
        wanted = min(len(spares - set(now_in)), self._full - len(now_in)) if epoch >= 0 else 0
        front = max((state.progress for state in living.values()), default=RankProgress())
        lost = tuple(host for host in range(self._hosts) if self._is_lost(host))
        # An epoch that was decided in this call is not broken yet: its members were alive a moment ago.
        broken = epoch == before.epoch >= 0 and len(living) < len(before.members)
        self._verdict = Verdict(epoch, now_in, broken, wanted, front, lost, over, failed)
        if self._verdict != before:
            self._store.set("verdict", self._verdict.text())

    def _decide(self, epoch: int, members: str) -> None:
        # The store keeps the first value. A rank that reads this key at any time reads the same members.
        self._store.compare_set(f"{epoch}/members", "", members)

    def _look(self) -> Iterator[tuple[int, RankState]]:
        """Iterate over the ranks of all hosts; those of a host that is lost are dead."""
        hosts = [host for host in range(self._hosts) if self._store.check([f"lease/{host}"])]
        keys = [f"lease/{host}" for host in hosts]
        # All leases are read before any is judged: this keeper itself may have been stopped for longer than a lease.
        texts = [text.decode().partition(" ") for text in (self._store.multi_get(keys) if keys else [])]
        now = time.monotonic()
        for host, (count, _, _) in zip(hosts, texts, strict=True):
            if self._renewed.get(host, ("", 0.0))[0] != count and host not in self._verdict.lost:
                self._renewed[host] = (count, now)
        for host, (_, _, ranks) in zip(hosts, texts, strict=True):
            for number, state in read_ranks(ranks).items():
                is_dead = self._is_lost(host) and state.state == "running"
                yield number, RankState("dead", state.spare, state.progress) if is_dead else state

    def _is_lost(self, host: int) -> bool:
        # A host that has ended by itself has said so in its last renewal.
        if host not in self._renewed or host in self._verdict.lost:
            return host in self._verdict.lost
        count, since = self._renewed[host]
        return count != OVER and time.monotonic() - since > self._lease
