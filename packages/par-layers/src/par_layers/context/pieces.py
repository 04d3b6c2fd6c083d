"""Decomposition of the visible pairs of queries and keys into few pieces that kernels can compute."""

from collections.abc import Collection, Iterator
from typing import Literal, NamedTuple

import numpy as np

from .tokens import Ints, Runs

Kind = Literal["full", "causal", "anti", "band", "window"]

CALL = 4096
"""Number of pairs that a kernel with a mask computes in the time of one more call."""

NARROW = 512
"""Windows of at most so many keys are computed with a mask, in one piece a block: three without would be slower.

On a CPU one core takes 37 us a query of eight heads for a window of 512 in blocks of 64 with a mask, and 42 us in
squares and rectangles of 128 queries, whose outputs must then be added up. From 1,024 keys on both are equal.
"""

SHORT = 32
"""Queries fewer than these are not worth a piece of their own: they share a mask with their neighbours."""

Lengths = tuple[tuple[int, int], ...]
"""Number of queries and of keys of each document."""


class AttentionPiece(NamedTuple):
    """A rectangle of queries and keys, in which every query sees one key at least.

    Pieces of different keys add up by the log-sum-exp of each query.

    Args:
        q0: First row of the local queries.
        q1: Last row of the local queries, plus one.
        k0: First row of the buffer of keys.
        k1: Last row of the buffer of keys, plus one.
        kind: "full": each query sees each key. "causal": query i sees keys j with j - i <= keys - queries (aligned at
            the bottom right; a square, unless the kernel joins them). "anti": query i sees keys j >= i (a square,
            unless the kernel joins windows). "band": query i sees what `seen` says. "window" (for kernels that join
            it): as "causal", but the last `left` + 1 of these keys alone.
        left: Number of keys that a query sees before its last visible key, for a window.
        lengths: Numbers of queries and keys of consecutive documents that the piece joins, each with a mask of this
            kind; empty for a piece of one document. Only for kernels that join documents.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    kind: Kind
    left: int | None = None
    lengths: Lengths = ()

    @property
    def pairs(self) -> int:
        """Approximate number of computed pairs of a query and a key."""
        if self.kind == "window" and self.left is not None:
            return (self.q1 - self.q0) * (self.left + 1)
        lengths = self.lengths or ((self.q1 - self.q0, self.k1 - self.k0),)
        areas = (
            queries * (2 * keys - queries) // 2 if self.kind in {"causal", "anti"} else queries * keys
            for queries, keys in lengths
        )
        return sum(areas)


def seen(first: Ints, last: Ints, queries: Runs, keys: Runs) -> tuple[Ints, Ints]:
    """Return the rows of a buffer of keys that each local query sees: low[i] to high[i] (exclusive).

    Args:
        first: First token that each token of the full sequence sees, int64 [padded].
        last: One more than the last token that each token sees, int64 [padded].
        queries: Token ranges of the local queries, in their order.
        keys: Token ranges of the buffer's keys, ascending.

    Returns:
        low and high, int64 [local queries] each; equal if a query sees no key of the buffer.
    """
    starts, stops = np.array(keys, np.int64).reshape(-1, 2).T
    before = np.concatenate([[0], np.cumsum(stops - starts)])  # keys in the buffer before each range, and all of them
    tokens = np.concatenate([np.arange(start, stop) for start, stop in queries])

    def rows(places: Ints) -> Ints:
        """Return the number of the buffer's keys before each of these tokens."""
        run = np.searchsorted(starts, places, side="right") - 1
        inside = np.minimum(places, stops[run]) - starts[run]
        return np.where(run < 0, 0, before[run] + inside)

    if not len(starts):
        return np.zeros(len(tokens), np.int64), np.zeros(len(tokens), np.int64)
    return rows(first[tokens]), rows(last[tokens])


def pieces(
    first: Ints,
    last: Ints,
    queries: Runs,
    keys: Runs,
    *,
    block: int = 512,
    joins: Collection[str] = (),
) -> list[AttentionPiece]:
    """Split the visible pairs of local queries and a buffer of keys into pieces that cover each pair exactly once.

    Args:
        first: First token that each token of the full sequence sees, int64 [padded].
        last: One more than the last token that each token sees, int64 [padded].
        queries: Token ranges of the local queries, in their order.
        keys: Token ranges of the buffer's keys, ascending.
        block: Maximum number of queries of a piece that needs a mask.
        joins: Shapes of masks that the kernel computes in one call. "causal": a causal piece with more keys than
            queries. "window": a piece whose first visible key moves with the query. "documents" (needs "causal"):
            consecutive pieces of the same kind. "narrow": a block of a narrow window, with a mask.

    Returns:
        Pieces, sorted by their queries.
    """
    low, high = seen(first, last, queries, keys)
    found = _stretches(low, high)
    result = _documents(found, low, high, windows="window" in joins) if "documents" in joins else []
    for start, stop, slope in _worth_a_piece(found, result):
        # Slopes are the changes of both ends of the interval from query to query. Each combination has a shape that
        # kernels compute without a mask, except for the general case at the end.
        if slope == (0, 0):
            result.append(AttentionPiece(start, stop, int(low[start]), int(high[start]), "full"))
        elif slope == (0, 1):
            result.extend(_causal(start, stop, int(low[start]), int(high[start]), joined="causal" in joins))
        elif slope == (1, 1) and "window" in joins:
            begin, end = int(low[start]), int(high[stop - 1])
            result.append(AttentionPiece(start, stop, begin, end, "window", end - begin - (stop - start)))
        elif slope == (1, 0) and "window" in joins:
            result.append(AttentionPiece(start, stop, int(low[start]), int(high[start]), "anti"))
        elif slope == (1, 1) and "narrow" in joins and high[start] - low[start] <= NARROW:
            # A block of about the window's width keeps the hidden share of the masked rectangle near a half.
            step = min(max(block // 2, 1), max(int(high[start] - low[start]), 64))
            for q in range(start, stop, step):
                end = min(q + step, stop)
                result.append(AttentionPiece(q, end, int(low[q]), int(high[end - 1]), "band"))
        elif slope is not None:
            width = int(high[start] - low[start])
            # Larger steps need fewer pieces, but the queries of a piece must share keys, which limits a piece to the
            # window's width.
            step = min(block, max(width, 64)) if slope == (1, 1) else block
            for q in range(start, stop, step):
                result.extend(_moving(q, min(q + step, stop), low, high))
        else:
            for q0, q1 in _blocks(low[start:stop], high[start:stop], block):
                result.extend(_irregular(start + q0, start + q1, low, high))
    # Joined documents were found first; sorting restores the order of the queries.
    return sorted(result) if "documents" in joins else result


class Stretches(NamedTuple):
    """Ranges of queries in which each end of the visible interval stays, or moves by one from query to query.

    Args:
        starts: First query of each range, int64 [n], ascending.
        stops: One more than the last query of each range.
        slopes: 2 if the first visible key moves, plus 1 if the last visible key moves; 0 for a single query.
    """

    starts: Ints
    stops: Ints
    slopes: Ints


def _stretches(low: Ints, high: Ints) -> Stretches:
    """Return the longest ranges of regular queries, without queries that see nothing."""
    visible = high > low
    if not visible.any():
        return Stretches(*(np.zeros(0, np.int64),) * 3)
    # The intervals move by 0 or 1 in nearly all masks, and runs of equal steps are the regular shapes.
    by_low, by_high = np.diff(low), np.diff(high)
    regular = visible[1:] & visible[:-1] & (by_low >= 0) & (by_low <= 1) & (by_high >= 0) & (by_high <= 1)
    step = np.where(regular, 2 * by_low + by_high, -1)  # from each query to the next
    # A range of equal steps has one query more than steps; the query at a corner belongs to the range before it.
    edges = np.flatnonzero(step[1:] != step[:-1]) + 1  # steps before which another range begins
    first_step = np.concatenate([[0], edges]) if len(step) else np.zeros(0, np.int64)
    last_step = np.concatenate([edges, [len(step)]])[: len(first_step)]
    kind = step[first_step]
    # Ranges of regular steps, as queries [first_step, last_step + 1); the corner goes to the earlier regular range.
    chosen = kind >= 0
    starts, stops, kinds = first_step[chosen], last_step[chosen] + 1, kind[chosen]
    if len(starts):
        starts[1:] = np.maximum(starts[1:], stops[:-1])
    # One query sees one range, whatever its neighbours do.
    kinds = np.where(stops - starts == 1, 0, kinds)
    covered = np.zeros(len(low) + 1, np.int64)
    np.add.at(covered, starts, 1)
    np.add.at(covered, stops, -1)
    alone = np.flatnonzero(visible & (np.cumsum(covered)[:-1] == 0))  # queries whose neighbours see quite another range
    starts = np.concatenate([starts, alone])
    stops = np.concatenate([stops, alone + 1])
    kinds = np.concatenate([kinds, np.zeros(len(alone), np.int64)])
    order = np.argsort(starts, kind="stable")
    return Stretches(starts[order], stops[order], kinds[order])


def _worth_a_piece(found: Stretches, joined: list[AttentionPiece]) -> Iterator[tuple[int, int, tuple[int, int] | None]]:
    """Yield ranges of queries with the slope of their visible interval: (start, stop, (0 or 1, 0 or 1)).

    Adjacent short ranges become one irregular range with the slope None. Queries in `joined` are skipped.
    """
    starts, stops, kinds = found
    if joined:
        taken = np.searchsorted([piece.q0 for piece in joined], starts, side="right") - 1
        ends = np.array([piece.q1 for piece in joined])
        left = (taken < 0) | (starts >= ends[taken])
        starts, stops, kinds = starts[left], stops[left], kinds[left]
    if not len(starts):
        return
    # Many short documents, as in packed sequences, would otherwise cost a kernel call each.
    short = stops - starts < SHORT
    # Short ranges that touch are one.
    begins = np.ones(len(starts), bool)
    begins[1:] = ~(short[1:] & short[:-1] & (starts[1:] == stops[:-1]))
    groups = np.flatnonzero(begins)
    ends = np.concatenate([groups[1:], [len(starts)]])
    for group, end in zip(groups.tolist(), ends.tolist(), strict=True):
        slope = divmod(int(kinds[group]), 2) if end - group == 1 else None
        yield int(starts[group]), int(stops[end - 1]), slope


def _documents(found: Stretches, low: Ints, high: Ints, *, windows: bool) -> list[AttentionPiece]:
    """Return pieces that join several documents, and documents whose first tokens see less than a full window.

    Args:
        found: Regular ranges of queries.
        low: First key that each query sees.
        high: One more than the last key that each query sees.
        windows: Whether the kernel computes windows.
    """
    starts, stops, slopes = found
    first, last = low[starts], high[stops - 1]  # the keys of each stretch
    touches = stops[:-1] == starts[1:]
    after = touches & (last[:-1] == first[1:])
    # A window begins where the first key begins to move, too.
    grown = touches & windows & (first[1:] == first[:-1] + 1) & (high[starts[1:]] == last[:-1] + 1)
    grown &= ((slopes[:-1] == 1) | (stops - starts == 1)[:-1]) & ((slopes[1:] == 3) | (stops - starts == 1)[1:])
    result: list[AttentionPiece] = []
    index = 0
    for place in np.flatnonzero(after | grown).tolist():
        if place < index:
            continue
        index, touching, group = place, True, _PieceGroup()
        while touching:
            k0, queries, slope = int(first[index]), int(stops[index] - starts[index]), int(slopes[index])
            begin, one = int(starts[index]), None
            if index < len(grown) and grown[index]:
                index += 1
                left = int(high[starts[index]] - low[starts[index]]) - 1
                one = AttentionPiece(begin, int(stops[index]), k0, int(last[index]), "window", left)
            elif slope == 3 and windows:
                k1 = int(last[index])
                one = AttentionPiece(begin, begin + queries, k0, k1, "window", k1 - k0 - queries)
            elif slope <= 1:
                one = AttentionPiece(begin, begin + queries, k0, int(last[index]), "causal" if slope else "full")
            index += 1
            if one is None or not group.add(one):
                result += group.joined()
                group = _PieceGroup() if one is None else _PieceGroup(one)
            touching = index < len(starts) and bool(after[index - 1] or grown[index - 1])
        result += group.joined()
    return result


class _PieceGroup:
    """Consecutive documents that become one piece.

    Args:
        documents: The first document, or none.
    """

    def __init__(self, *documents: AttentionPiece) -> None:
        self._documents: list[AttentionPiece] = []
        self._full: bool | None = None  # unknown as long as all have a single query, which sees all of its keys
        self._left: int | None = None
        self._longest = 0  # keys of a document whose queries are hidden none by a window
        for each in documents:
            self.add(each)

    def add(self, one: AttentionPiece) -> bool:
        """Add a document, and return True; False if it is not adjacent or has another kind or window."""
        lefts = {left for left in (self._left, one.left) if left is not None}
        longest = max(self._longest, one.k1 - one.k0 if one.left is None else 0)
        full = {self._full, None if one.q1 - one.q0 == 1 else one.kind == "full"} - {None}
        if self._documents and (one.q0, one.k0) != (self._documents[-1].q1, self._documents[-1].k1):
            return False
        # One kernel call has one kind and one window, so only documents that fit both can be joined. A document shorter
        # than the window fits any.
        if len(lefts) > 1 or len(full) > 1 or (lefts and (longest > min(lefts) + 1 or full == {True})):
            return False
        self._documents.append(one)
        self._full, self._left, self._longest = next(iter(full), None), next(iter(lefts), None), longest
        return True

    def joined(self) -> list[AttentionPiece]:
        """Return the piece of all documents; an empty list for one document without a window, which needs no join."""
        if not self._documents or (len(self._documents) == 1 and self._left is None):
            return []
        start, end = self._documents[0], self._documents[-1]
        kind: Kind = "window" if self._left is not None else "causal" if self._full is False else "full"
        lengths = tuple((each.q1 - each.q0, each.k1 - each.k0) for each in self._documents)
        return [
            AttentionPiece(start.q0, end.q1, start.k0, end.k1, kind, self._left, lengths if len(lengths) > 1 else ())
        ]


def _causal(start: int, stop: int, low: int, high: int, *, joined: bool) -> Iterator[AttentionPiece]:
    """Yield pieces for a last visible key that moves: a full rectangle and a causal square, or both joined."""
    queries = stop - start
    if joined:
        yield AttentionPiece(start, stop, low, high - 1 + queries, "causal")
        return
    if high - 1 > low:
        # The key at `high - 1` belongs to the square, whose diagonal it begins.
        yield AttentionPiece(start, stop, low, high - 1, "full")
    yield AttentionPiece(start, stop, high - 1, high - 1 + queries, "causal")


def _moving(start: int, stop: int, low: Ints, high: Ints) -> Iterator[AttentionPiece]:
    """Yield pieces for a first visible key that moves, with a last visible key that moves or stays."""
    queries, begin, end = stop - start, int(low[start]), int(high[start])
    last = int(high[stop - 1])
    # The square at the moving first key needs as many keys as queries.
    if queries > end - begin or queries < SHORT:
        yield from _irregular(start, stop, low, high)
        return
    # Query i stops seeing the first i keys: an upper triangle.
    yield AttentionPiece(start, stop, begin, begin + queries, "anti")
    if last == end:
        if begin + queries < end:
            yield AttentionPiece(start, stop, begin + queries, end, "full")
        return
    if queries == end - begin:  # the last key that the first query sees is in the square already
        yield AttentionPiece(start + 1, stop, end, last, "causal")
        return
    if begin + queries < end - 1:
        yield AttentionPiece(start, stop, begin + queries, end - 1, "full")
    yield AttentionPiece(start, stop, end - 1, last, "causal")


def _irregular(start: int, stop: int, low: Ints, high: Ints) -> Iterator[AttentionPiece]:
    """Yield pieces for any intervals: keys that all queries see need no mask, and keys on both sides of them do."""
    lows, highs = low[start:stop], high[start:stop]
    begin, inner, outer, end = int(lows.min()), int(lows.max()), int(highs.min()), int(highs.max())
    left = inner + 1 if inner > begin else inner  # one key that all see, so that each query sees something
    right = outer - 1 if outer < end else outer
    # Splitting off the unmasked middle saves less than the call that it costs.
    if (stop - start) * (right - left) < CALL and (begin < inner or outer < end):
        yield AttentionPiece(start, stop, begin, end, "band")
        return
    if begin < left:
        yield AttentionPiece(start, stop, begin, left, "band")
    if left < right:
        yield AttentionPiece(start, stop, left, right, "full")
    if right < end:
        yield AttentionPiece(start, stop, right, end, "band")


def _blocks(low: Ints, high: Ints, block: int) -> list[tuple[int, int]]:
    """Cut queries with irregular intervals into blocks, so that few masked pairs are computed in few calls.

    Blocks of two neighbours become one where that is less work, then blocks of these, up to `block` queries.
    """
    size, number = 1, len(low)
    begin, end = low, high
    cost = high - low + CALL
    taken = [np.ones(number, bool)]  # for each size, whether a block stays whole
    while size < min(block, number) and 2 * size <= block:
        size *= 2
        blocks = -(-number // size)
        padding = 2 * blocks - len(cost)
        begin = np.concatenate([begin, begin[len(begin) - padding :]]).reshape(blocks, 2).min(1)
        end = np.concatenate([end, end[len(end) - padding :]]).reshape(blocks, 2).max(1)
        apart = np.concatenate([cost, np.zeros(padding, np.int64)]).reshape(blocks, 2).sum(1)
        rows = np.minimum(np.arange(1, blocks + 1) * size, number) - np.arange(blocks) * size
        # A merged block computes the hull of its queries' intervals; separate blocks compute less, but cost a call
        # each.
        together = rows * (end - begin) + CALL
        taken.append(together <= apart)
        # Sizes double, so the best choice for each block of this size is known from the blocks of the size before
        # (dynamic programming).
        cost = np.minimum(together, apart)
    result: list[tuple[int, int]] = []
    stack = [(len(taken) - 1, index) for index in range(len(taken[-1]))][::-1]
    while stack:
        level, index = stack.pop()
        if taken[level][index]:
            result.append((index << level, min((index + 1) << level, number)))
        else:
            stack.extend((level - 1, child) for child in (2 * index + 1, 2 * index) if child < len(taken[level - 1]))
    return result
