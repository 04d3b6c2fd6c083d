"""Keys that ranks send to each other: exactly the keys of other ranks that a rank's queries see, each once."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .tokens import Ints, Runs, Tokens, joined


@dataclass(frozen=True, eq=False)
class KeyTransfers:
    """Table of the key ranges that ranks need from each other, for one mask and one split: five columns, int64 [n].

    The table is sorted by asker, row and start.

    Args:
        tokens: The split.
        asker: Rank whose queries see the keys.
        owner: Rank that holds the keys.
        row: Sequence of the batch; 0 if all sequences have the same documents.
        start: First token of the range, counted in the full sequence.
        stop: One more than the last token.
    """

    tokens: Tokens
    asker: Ints
    owner: Ints
    row: Ints
    start: Ints
    stop: Ints

    def received(self) -> Ints:
        """Return the number of keys that each rank fetches, int64 [ranks], summed over the rows of documents."""
        return _sums(self.asker, self.stop - self.start, self.tokens.ranks)

    def sent(self) -> Ints:
        """Return the number of keys that each rank sends, int64 [ranks], summed over the rows of documents."""
        return _sums(self.owner, self.stop - self.start, self.tokens.ranks)

    def ordered(self, several: bool) -> NDArray[np.bool_]:
        """Return whether each rank's fetched keys arrive rank by rank in the order of rows and tokens, bool [ranks].

        Args:
            several: Whether there are several rows of the same documents.
        """
        result = np.ones(self.tokens.ranks, bool)
        if several:
            # The message is ordered by owner first. With several rows from several owners, the buffers' order by row
            # differs from it.
            result[self.needs().sum(1) > 1] = False
        back = (np.diff(self.asker) == 0) & (np.diff(self.owner) < 0)
        result[self.asker[1:][back]] = False
        return result

    def needs(self) -> NDArray[np.bool_]:
        """Return whether each rank sees any key of each other rank in any row, bool [askers, owners]."""
        result = np.zeros((self.tokens.ranks, self.tokens.ranks), bool)
        result[self.asker, self.owner] = True
        return result


def transfers(first: Ints, last: Ints, tokens: Tokens) -> KeyTransfers:
    """Find what every rank needs of every other.

    Args:
        first: First token that each token sees, int64 [rows, padded], as `Mask.intervals` gives it.
        last: One more than the last token that each token sees, int64 [rows, padded].
        tokens: The cut.
    """
    segments = np.array(
        sorted((start, stop, rank) for rank, runs in enumerate(tokens.runs) for start, stop in runs), np.int64
    )
    starts, stops, owners = segments.T
    columns: list[tuple[Ints, ...]] = []
    gaps = [_gaps(first[row], last[row]) for row in range(len(first))]
    for asker, runs in enumerate(tokens.runs):
        for row in range(len(first)):
            begins, ends = _parts(runs, gaps[row])
            begin, end = union(first[row, begins], last[row, ends - 1])
            # Ranges are cut where another rank's tokens begin.
            # All ranges are cut in one numpy operation, because a sequence of a million tokens may have many thousands
            # of them.
            lowest = np.searchsorted(stops, begin, side="right")
            number = np.searchsorted(starts, end, side="left") - lowest
            of_range = np.repeat(np.arange(len(begin)), number)
            segment = np.arange(len(of_range)) - np.repeat(np.cumsum(number) - number, number) + lowest[of_range]
            begin, end = np.maximum(begin[of_range], starts[segment]), np.minimum(end[of_range], stops[segment])
            foreign = owners[segment] != asker
            if foreign.any():
                ours = np.full(int(foreign.sum()), asker)
                columns.append((ours, owners[segment][foreign], np.full_like(ours, row), begin[foreign], end[foreign]))
    if not columns:
        return KeyTransfers(tokens, *(np.zeros(0, np.int64),) * 5)
    return KeyTransfers(tokens, *(np.concatenate(column) for column in zip(*columns, strict=True)))


def _gaps(first: Ints, last: Ints) -> Ints | None:
    """Return the tokens whose interval does not touch the interval of the token before.

    Returns:
        Indices of the tokens; None if the intervals do not ascend, so that each interval needs a separate look.
    """
    # The shortcut holds only if intervals move forward from token to token, as in all usual masks.
    if np.any(first[1:] < first[:-1]) or np.any(last[1:] < last[:-1]):
        return None
    # Between two gaps the intervals of neighbouring tokens touch, so the union of their intervals is one range.
    return np.flatnonzero(first[1:] > last[:-1]) + 1


def _parts(runs: Runs, gaps: Ints | None) -> tuple[Ints, Ints]:
    """Split runs of tokens into parts whose tokens together see one interval."""
    starts, stops = np.array(runs, np.int64).T
    if gaps is None:
        index = np.concatenate([np.arange(start, stop) for start, stop in runs])
        return index, index + 1
    inside = gaps[np.searchsorted(starts, gaps, side="left") > np.searchsorted(stops, gaps, side="right")]
    return np.sort(np.concatenate([starts, inside])), np.sort(np.concatenate([inside, stops]))


def union(first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """Return the starts and stops of the union of intervals, as ascending ranges that do not touch."""
    some = last > first
    first, last = first[some], last[some]
    if np.any(first[1:] < first[:-1]):
        order = np.argsort(first, kind="stable")
        first, last = first[order], last[order]
    # An interval may end behind the ones that start after it, so a range continues until the largest end so far.
    reached = np.maximum.accumulate(last)
    new = np.ones(len(first), bool)
    new[1:] = first[1:] > reached[:-1]
    starts = np.flatnonzero(new)
    return first[starts], reached[np.append(starts[1:], len(first)) - 1] if len(starts) else last


@dataclass(frozen=True, eq=False)
class Fetch:
    """Exchange of keys from one rank's view: its messages, and the buffer of fetched keys.

    A message holds one row (of k, of v, or of both) for each sequence and token, sorted by rank, sequence and token.
    Ranks without visible keys of each other exchange no rows. Sequences with the same documents fetch the same tokens
    (`tokens.documents` then has one tuple).

    Args:
        transfers: Key ranges that ranks need from each other.
        rank: This rank.
    """

    transfers: KeyTransfers
    rank: int

    @cached_property
    def keys(self) -> tuple[Runs, ...]:
        """Ranges of fetched tokens of each sequence, ascending: the keys of the buffer for `pieces`."""
        table = self.transfers
        result = []
        for row in range(self._rows):
            mine = (table.asker == self.rank) & (table.row == row)
            result.append(joined(list(zip(table.start[mine].tolist(), table.stop[mine].tolist(), strict=True))))
        return tuple(result)

    def buffered(self, batch: int) -> list[int]:
        """Return the number of fetched tokens of each sequence of the batch."""
        numbers = [sum(stop - start for start, stop in runs) for runs in self.keys]
        return numbers * self._copies(batch)

    def receive_splits(self, batch: int) -> list[int]:
        """Return the number of rows that this rank receives from each rank, for a batch of `batch` sequences."""
        table = self.transfers
        mine = table.asker == self.rank
        counts = _sums(table.owner[mine], (table.stop - table.start)[mine], table.tokens.ranks)
        return (counts * self._copies(batch)).tolist()  # type: ignore[no-any-return]

    def send_splits(self, batch: int) -> list[int]:
        """Return the number of rows that this rank sends to each rank, for a batch of `batch` rows."""
        table = self.transfers
        mine = table.owner == self.rank
        counts = _sums(table.asker[mine], (table.stop - table.start)[mine], table.tokens.ranks)
        return (counts * self._copies(batch)).tolist()  # type: ignore[no-any-return]

    def send_index(self, batch: int) -> Ints:
        """Return the local rows that this rank sends, int64 [sum of `send_splits`], counted over [batch, s].

        The rows for one rank are all different, so their gradients can be added in one operation.
        """
        tokens, table = self.transfers.tokens, self.transfers
        place = np.full(tokens.padded, -1, np.int64)
        place[tokens.index(self.rank)] = np.arange(tokens.local)
        parts = []
        for asker in range(tokens.ranks):
            mine = (table.owner == self.rank) & (table.asker == asker)
            for row in range(batch):
                # Rows of the batch with the same documents share one row of the table.
                some = mine & (table.row == (row if self._rows > 1 else 0))
                parts.append(place[_expanded(table.start[some], table.stop[some])] + row * tokens.local)
        return np.concatenate(parts)

    def order(self, batch: int) -> Ints | None:
        """Return the row of the received message for each row of the buffers, int64 [sum of `buffered`].

        The buffers of the batch's rows are concatenated, each sorted by token. None if the message has this order.
        """
        table = self.transfers
        owners, rows, places = [], [], []
        for row in range(batch):
            some = (table.asker == self.rank) & (table.row == (row if self._rows > 1 else 0))
            lengths = (table.stop - table.start)[some]
            owners.append(np.repeat(table.owner[some], lengths))
            places.append(_expanded(table.start[some], table.stop[some]))
            rows.append(np.full(len(places[-1]), row))
        arrival = np.lexsort((np.concatenate(places), np.concatenate(rows), np.concatenate(owners)))
        # A message that arrives in order is used in place; this saves a copy of all fetched keys.
        if np.array_equal(arrival, np.arange(len(arrival))):
            return None
        order = np.empty_like(arrival)
        order[arrival] = np.arange(len(arrival))
        return order

    @property
    def _rows(self) -> int:
        return len(self.transfers.tokens.documents)

    def _copies(self, batch: int) -> int:
        """Return the number of rows of the batch that share one row of documents."""
        if self._rows not in {1, batch}:
            raise ValueError(f"tokens have documents for {self._rows} rows, but the batch has {batch}")
        return batch if self._rows == 1 else 1


@dataclass(frozen=True)
class Hops:
    """Distance that the keys of each rank travel along the ring, from each rank to the next.

    Args:
        near: Smallest number of hops after which some rank needs an owner's keys, by owner; 0 if no rank needs them.
        far: Largest number of such hops, by owner; 0 if no rank needs the keys.
        needed: Owners whose keys a rank's queries see, by rank, without the rank itself.
    """

    near: tuple[int, ...]
    far: tuple[int, ...]
    needed: tuple[tuple[int, ...], ...]

    @property
    def steps(self) -> int:
        """Number of hops after which nothing travels any more."""
        return max(self.far)

    def travels(self, owner: int, hop: int) -> bool:
        """Return whether an owner's keys make a hop; hop 1 brings them to the owner's next rank."""
        return hop <= self.far[owner]


def hops(table: KeyTransfers) -> Hops:
    """Return the used hops of a ring: keys travel to the last rank that sees any of them, in any row."""
    needs, ranks = table.needs(), table.tokens.ranks
    distances = [[hop for hop in range(1, ranks) if needs[(owner + hop) % ranks, owner]] for owner in range(ranks)]
    return Hops(
        near=tuple(min(each, default=0) for each in distances),
        far=tuple(max(each, default=0) for each in distances),
        needed=tuple(tuple(np.flatnonzero(row).tolist()) for row in needs),
    )


def _expanded(starts: Ints, stops: Ints) -> Ints:
    """Return all token indices of some ranges, one range after the other."""
    lengths = stops - starts
    before = np.cumsum(lengths) - lengths
    result: Ints = np.arange(lengths.sum()) + np.repeat(starts - before, lengths)
    return result


def _sums(groups: Ints, values: Ints, number: int) -> Ints:
    result = np.zeros(number, np.int64)
    np.add.at(result, groups, values)
    return result
