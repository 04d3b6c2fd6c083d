"""Assignment of blocks to ranks in rotation, over all runs of a plan.

`BlockPlanner` decides which ranks may take a run of blocks; a `RoundRobin` chooses among them and counts.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from .deal import Rotation, Together, Windows
from .tasks import AssignedRun


class RoundRobin:
    """Rotation of blocks over ranks that continues from one run of blocks to the next.

    Args:
        size: Number of ranks.
        window: Number of blocks that one request reads; 1 or more.

    Attributes:
        turns: Number of blocks of each rank so far in which other ranks take part.
    """

    def __init__(self, size: int, window: int) -> None:
        self.turns = [0] * size
        self._window = window
        # The rotation continues for the same tuple of ranks: if it began anew with each run, the first rank of every
        # small run would get all of its blocks.
        self._dealt: Counter[tuple[int, ...]] = Counter()
        self._last = (-1, -1, -1)  # reader of the last block that was read in a window, its file and its window

    def rotated(self, first: int, stop: int, ranks: tuple[int, ...], *, sends: bool) -> AssignedRun:
        """Assign blocks round-robin, continuing after the rank of the last such block."""
        start = self._dealt[ranks] % len(ranks)
        self._dealt[ranks] += stop - first
        deal = Rotation(first, stop, ranks, start, tuple(self.turns[rank] for rank in ranks))
        if sends:
            for place, rank in enumerate(ranks):
                self.turns[rank] += len(range(first + (place - start) % len(ranks), stop, len(ranks)))
        return AssignedRun(deal, sends)

    def in_windows(
        self, first: int, stop: int, ranks: tuple[int, ...], *, file: int, before: int, sends: bool
    ) -> Iterator[AssignedRun]:
        """Assign windows of blocks round-robin. A window of an earlier run stays with its reader if possible.

        Args:
            first: Number of the first block in its area.
            stop: Number of the last block, plus one.
            ranks: Ranks that may read the blocks.
            file: Number of the file.
            before: Number of the file's blocks before the area.
            sends: Whether the reader sends pieces of the blocks to other ranks.
        """
        # One request reads a window, so its blocks must belong to one round. Its first turn is therefore a multiple of
        # the window's length.
        window, inside = divmod(before + first, self._window)
        reader, *known = self._last
        continues = known == [file, window]
        if inside or continues:
            turn = self.turns[reader]
            if not continues or reader not in ranks:
                reader = ranks[self._dealt[ranks] % len(ranks)]
                self._dealt[ranks] += 1
                (turn,) = self.next_turns((reader,))
            end = min(first + self._window - inside, stop)
            yield AssignedRun(Rotation(first, end, (reader,), 0, (turn,)), sends)
            if sends:
                self.turns[reader] = turn + end - first
            self._last = reader, file, window
            first = end
        if first == stop:
            return
        start = self._dealt[ranks] % len(ranks)
        deal = Windows(first, stop, ranks, start, self.next_turns(ranks), self._window)
        yield AssignedRun(deal, sends)
        self._dealt[ranks] += deal.count
        if sends:
            for place, rank in enumerate(ranks):
                # The next turn follows the rank's last window, which may be shorter than the others.
                for last in deal.numbers(place)[-1:]:
                    done = min((last + 1) * self._window, stop - first) - last * self._window
                    self.turns[rank] = deal.turns[place] + last // len(ranks) * self._window + done
        self._last = ranks[(start + deal.count - 1) % len(ranks)], file, (before + stop - 1) // self._window

    def next_turns(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the next turn of each rank with which a window may begin."""
        return tuple(-(-self.turns[rank] // self._window) * self._window for rank in ranks)

    def together(self, first: int, stop: int, ranks: tuple[int, ...], *, sends: bool) -> AssignedRun:
        """Assign blocks that all of the ranks read."""
        deal = Together(first, stop, ranks, tuple(self.turns[rank] for rank in ranks))
        if sends:
            for rank in ranks:
                self.turns[rank] += stop - first
        return AssignedRun(deal, sends)
