"""Rows of several corpora in one order, each as often as its weight says.

    weights 2 : 1        web 0   web 1   chat 0   web 2   web 3   chat 1   ...

The j-th row of a source comes at the time (j + 1/2) / weight, and rows stand in the order of their times. So in any
stretch of rows each source has its part of them, to within a row or two, and which row comes n-th is arithmetic: a
run goes on at any row without reading those before. A source that is through begins its next epoch, in an order of its
own.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch.utils.data import Dataset

from .packing import Ints
from .rows import PackedRows, Row, RowSampler


class _Place(NamedTuple):
    """Which sources the rows of an epoch are of, the epoch of each in its source, and its number there."""

    source: Ints
    epoch: Ints
    row: Ints


class MixedRows(Dataset[Row]):
    """Rows of several corpora, mixed.

    It is used as one `PackedRows` is: with `sampler=rows.sampler` and `drop_last=True`. An epoch has as many rows as
    all sources have in their first; with weights some sources are through before it ends and begin anew, and others go
    on where they were in the next one.

    Args:
        sources: Rows by the name of their source; all of one length.
        weights: Of each source, what part of the rows it has, to those of the others; None: each row of each source
            comes once an epoch.

    Raises:
        ValueError: There is no source, a weight is missing, left over or not above 0, or rows differ in length.
    """

    def __init__(self, sources: Mapping[str, PackedRows], weights: Mapping[str, float] | None = None) -> None:
        if not sources:
            raise ValueError(f"sources is {sources!r}; give rows of one source at least, by the name of their source")
        lengths = {name: rows.context for name, rows in sources.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"rows have {lengths} tokens; give all sources the same context")
        for name, weight in {} if weights is None else weights.items():
            if name not in sources:
                raise ValueError(f"there is a weight of {name!r}, which is no source; sources are {', '.join(sources)}")
            if not 0 < weight < math.inf:
                raise ValueError(f"the weight of {name!r} is {weight}; give a number above 0, or leave the source out")
        missing = [name for name in sources if weights is not None and name not in weights]
        if missing:
            raise ValueError(f"the source {missing[0]!r} has no weight; give one, or none to all")
        self._rows = list(sources.values())
        self._weights = None if weights is None else [float(weights[name]) for name in sources]
        self._ends = [[0] for _ in self._rows]  # of each source, its rows before each of its epochs
        self._places: tuple[int, _Place] | None = None
        self.context = next(iter(lengths.values()))

    @property
    def digest(self) -> str:
        """Another one for other rows, of any source, or other weights."""
        return hashlib.sha256(repr((self._weights, [rows.digest for rows in self._rows])).encode()).hexdigest()[:32]

    @property
    def sampler(self) -> RowSampler:
        """The rows of an epoch, one after the other."""
        return RowSampler(self)

    def count(self, epoch: int) -> int:
        """The number of rows in an epoch."""
        return sum(rows.count(0 if self._weights else epoch) for rows in self._rows)

    def counts(self, epoch: int) -> list[int]:
        """The number of rows of each source in an epoch."""
        found: list[int] = np.bincount(self._of_epoch(epoch).source, minlength=len(self._rows)).tolist()
        return found

    def __getitem__(self, index: tuple[int, int]) -> Row:
        """One row, by epoch and number."""
        epoch, number = index
        place = self._of_epoch(epoch)
        rows = self._rows[int(place.source[number])]
        return rows[int(place.epoch[number]), int(place.row[number])]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_places": None}  # which a worker makes itself

    def _of_epoch(self, epoch: int) -> _Place:
        if self._places is None or self._places[0] != epoch:
            self._places = epoch, self._made(epoch)
        return self._places[1]

    def _made(self, epoch: int) -> _Place:
        number = self.count(epoch)
        if self._weights is None:
            source, nth = mix([rows.count(epoch) for rows in self._rows], 0, number)
            return _Place(source, np.full(number, epoch), nth)
        source, nth = mix(self._weights, epoch * number, number)
        epochs, found = np.empty(number, np.int64), np.empty(number, np.int64)
        for index in range(len(self._rows)):
            mine = source == index
            if mine.any():
                ends = self._ends_of(index, int(nth[mine][-1]))
                epochs[mine] = np.searchsorted(ends, nth[mine], side="right") - 1
                found[mine] = nth[mine] - ends[epochs[mine]]
        return _Place(source, epochs, found)

    def _ends_of(self, index: int, last: int) -> Ints:
        """The rows of a source before each of its epochs, as far as to the one in which its `last` row is."""
        ends = self._ends[index]
        while ends[-1] <= last:
            ends.append(ends[-1] + self._rows[index].count(len(ends) - 1))
        return np.array(ends)


def mix(weights: Sequence[float], begin: int, number: int) -> tuple[Ints, Ints]:
    """Which row of which source comes at some places of a mixture. Pure.

    Args:
        weights: The weight of each source, above 0.
        begin: The first place.
        number: The number of places.

    Returns:
        For each place the source, int64 [number], and how many rows of that source came before, int64 [number].
    """
    part = np.asarray(weights, np.float64) / np.sum(weights)
    # The first n places have n x part rows of a source, give or take half a row and what that shifts the end by.
    slack = len(part) + 1
    low = np.maximum(np.floor(begin * part).astype(np.int64) - slack, 0)
    high = np.ceil((begin + number) * part).astype(np.int64) + slack
    source = np.repeat(np.arange(len(part)), high - low)
    nth = np.concatenate([np.arange(a, b) for a, b in zip(low, high, strict=True)])
    order = np.lexsort((source, (nth + 0.5) / part[source]))
    order = order[begin - int(low.sum()) :][:number]
    return source[order], nth[order]
