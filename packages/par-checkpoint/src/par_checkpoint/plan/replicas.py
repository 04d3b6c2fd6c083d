"""The replicas of one box: which replica sends it on a save, and how a load brings it to all replicas.

This is pure arithmetic. A rank receives a box from a replica on its own host if the host has one, which saves network
traffic. On a load each host receives the box once, and the receiving rank sends it to the other ranks of its host.

- With few hosts, the first host sends the box to all other hosts.
- With many hosts, a binary tree on a ring is used. The first host sends the box half the ring away, then both hosts
  send it a quarter of the ring away, and so on until every host has it.

In the tree, a rank connects only with ranks of its own host and with hosts at distances 1, 2, 4, ... So the number of
connections grows with the logarithm of the number of hosts. If the replicas read blocks round-robin, every rank sends
as many bytes as it receives.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

_FEW = 8  # number of hosts up to which one rank may connect with every host
_GIVERS = 4  # number of remote replicas that divide the blocks for a rank whose host has no replica


class Hop(NamedTuple):
    """One transfer of a box on its way from its reader to its holders.

    Args:
        source: The rank that sends the box.
        to: The rank that receives the box, and holds it.
        wave: Number of the wave. A rank sends a box only in a later wave than the one in which it receives the box.
    """

    source: int
    to: int
    wave: int


class Replicas:
    """The ranks that hold a box.

    Args:
        holders: The ranks, ascending.
        hosts: Number of each rank's host; None: all ranks share one host.
    """

    def __init__(self, holders: Sequence[int], hosts: Sequence[int] | None) -> None:
        self._holders, self._hosts = holders, hosts
        self._on: dict[int, list[int]] = {}
        for rank in holders:
            self._on.setdefault(self._host(rank), []).append(rank)
        self._ring = list(self._on.values())
        self._place = {host: place for place, host in enumerate(self._on)}

    def givers(self, taker: int) -> Sequence[int]:
        """Return the ranks that send the box, round-robin, to a rank without it: those on its host, if any."""
        near = self._on.get(self._host(taker))
        if near is not None:
            return near
        # Each taker starts at another holder. If all started at the first one, that rank would send to the whole world.
        first, count = taker % len(self._holders), min(_GIVERS, len(self._holders))
        return [self._holders[(first + i) % len(self._holders)] for i in range(count)]

    def hops(self, reader: int, rank: int) -> Iterator[Hop]:
        """Yield the hops of one rank after some rank has read the box.

        Args:
            reader: The rank that has read the box. It need not hold the box.
            rank: The rank whose hops are listed. It is the reader or a holder.
        """
        near = self._on.get(self._host(reader), [])
        if reader not in near:
            # A reader that does not hold the box passes it to one holder, which then begins the tree. If all holders
            # are on the reader's host, that extra hop would gain nothing.
            if len(near) == len(self._holders):
                yield from (Hop(reader, to, 0) for to in near if rank in (reader, to))
                return
            among = self.givers(reader)
            first = among[reader % len(among)]
            if rank in (reader, first):
                yield Hop(reader, first, 0)
            if rank == reader:
                return
        else:
            first = reader
        yield from self._hops_from(first, rank)

    def _hops_from(self, first: int, rank: int) -> Iterator[Hop]:
        """Yield the hops of one holder after the first holder has the box."""
        begin, here = self._place[self._host(first)], self._place[self._host(rank)]
        seat = self._ring[begin].index(first)

        def head(place: int) -> int:
            """Return the holder that receives the box first on a host."""
            # The first holder's seat on its host selects the seat on every host. Blocks that start at different ranks
            # of a host then travel through different ranks of all other hosts.
            mates = self._ring[place % len(self._ring)]
            return mates[seat % len(mates)]

        # Ranks of the same host receive the box in a wave after all waves between hosts.
        last = len(self._ring).bit_length() + 1
        if rank != head(here):
            yield Hop(head(here), rank, last)
            return
        distance, hosts = (here - begin) % len(self._ring), len(self._ring)
        if hosts > _FEW:
            before, after = _tree(distance, hosts)
        elif distance:
            before, after = [(distance, 1)], []
        else:
            before, after = [], [(on, 1) for on in range(1, hosts)]
        yield from (Hop(head(here - back), rank, wave) for back, wave in before)
        yield from (Hop(rank, head(here + on), wave) for on, wave in after)
        yield from (Hop(rank, mate, last) for mate in self._ring[here] if mate != rank)

    def _host(self, rank: int) -> int:
        """Return the host of a rank."""
        return 0 if self._hosts is None else self._hosts[rank]


Steps = Sequence[tuple[int, int]]
"""Distances in hosts over which a box is sent, each with its wave."""


def _tree(distance: int, hosts: int) -> tuple[Steps, Steps]:
    """Return the steps by which a host receives a box, and the steps by which it sends the box on.

    Args:
        distance: Distance in hosts from the first host that has the box.
        hosts: Number of hosts.
    """
    waves = (hosts - 1).bit_length()
    # The lowest bit of the distance is the length of the last jump that reached this host. Later waves have shorter
    # jumps, so this host serves only the hosts that are nearer than that.
    reach = distance & -distance or 1 << waves
    wave_of = {1 << (waves - wave): wave for wave in range(waves + 1)}
    after = [(stride, wave) for stride, wave in wave_of.items() if stride < reach and distance + stride < hosts]
    return [(reach, wave_of[reach])] if distance else [], after
