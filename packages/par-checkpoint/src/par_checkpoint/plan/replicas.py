"""The ranks that hold one box: which of them gives it to a save, and how a load brings it to all. Pure arithmetic.

A replica on the host of whoever needs the box gives it, so nothing crosses the network that need not. On a load each
host gets the box once, and the rank that got it there gives it to the others. The first of a few hosts gives it to all.
More of them stand in a ring: the one that has it first gives it to the host half the ring away, the two to those a
quarter away, and so on, down to the neighbours. Wherever that begins, a rank only ever meets ranks 1, 2, 4, ... hosts
away and those of its own host: its connections grow with the logarithm of the hosts, not with the replicas, for a copy
more each time that the box is handed on. Where blocks are read by all replicas in turn, every rank sends as much as it
receives.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

_FEW = 8  # hosts, with which a rank may well be connected each
_GIVERS = 4  # of a box to a rank on whose host nobody holds it: enough for them to share the work


class Hop(NamedTuple):
    """One step of a box on its way from its reader to its holders.

    Args:
        source: The rank that gives it.
        to: The rank that takes it, and holds it.
        wave: What a rank gives in one wave, it has got in an earlier one.
    """

    source: int
    to: int
    wave: int


class Replicas:
    """The ranks that hold a box.

    Args:
        holders: The ranks, ascending.
        hosts: By rank of the world: the number of its machine; None: all share one.
    """

    def __init__(self, holders: Sequence[int], hosts: Sequence[int] | None) -> None:
        self._holders, self._hosts = holders, hosts
        self._on: dict[int, list[int]] = {}
        for rank in holders:
            self._on.setdefault(self._host(rank), []).append(rank)
        self._ring = list(self._on.values())
        self._place = {host: place for place, host in enumerate(self._on)}

    def givers(self, taker: int) -> Sequence[int]:
        """Those who give the box to a rank that does not hold it, in turn: on its own host, where there are any."""
        near = self._on.get(self._host(taker))
        if near is not None:
            return near
        first, count = taker % len(self._holders), min(_GIVERS, len(self._holders))
        return [self._holders[(first + i) % len(self._holders)] for i in range(count)]

    def hops(self, reader: int, rank: int) -> Iterator[Hop]:
        """The hops in which a rank takes part, after another one has read the box or the rank itself has.

        Args:
            reader: The rank that has read it; it need not hold it.
            rank: The rank, which has read it or holds it.
        """
        near = self._on.get(self._host(reader), [])
        if reader not in near:
            if len(near) == len(self._holders):  # all on its host
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
        """The hops of a holder, after the first of them has the box."""
        begin, here = self._place[self._host(first)], self._place[self._host(rank)]
        seat = self._ring[begin].index(first)

        def head(place: int) -> int:
            """The holder that gets the box first on a host."""
            mates = self._ring[place % len(self._ring)]
            return mates[seat % len(mates)]

        last = len(self._ring).bit_length() + 1
        if rank != head(here):
            yield Hop(head(here), rank, last)
            return
        before, after = (_star if len(self._ring) <= _FEW else _tree)((here - begin) % len(self._ring), len(self._ring))
        yield from (Hop(head(here - back), rank, wave) for back, wave in before)
        yield from (Hop(rank, head(here + on), wave) for on, wave in after)
        yield from (Hop(rank, mate, last) for mate in self._ring[here] if mate != rank)

    def _host(self, rank: int) -> int:
        """The machine of a rank."""
        return 0 if self._hosts is None else self._hosts[rank]


Steps = Sequence[tuple[int, int]]
"""How many hosts further a box is given, and in which wave."""


def _star(distance: int, hosts: int) -> tuple[Steps, Steps]:
    """How a host gets a box whose first host is so far behind it, and gives it on: from that host, to all others."""
    return ([(distance, 1)], []) if distance else ([], [(on, 1) for on in range(1, hosts)])


def _tree(distance: int, hosts: int) -> tuple[Steps, Steps]:
    """How a host gets a box whose first host is so far behind it, and gives it on: by halves of the ring."""
    waves = (hosts - 1).bit_length()
    reach = distance & -distance or 1 << waves  # nearer hosts get it from here
    wave_of = {1 << (waves - wave): wave for wave in range(waves + 1)}
    after = [(stride, wave) for stride, wave in wave_of.items() if stride < reach and distance + stride < hosts]
    return [(reach, wave_of[reach])] if distance else [], after
