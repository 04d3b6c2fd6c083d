"""Documents in rows of one length: which part of which document lies where. Pure arithmetic, without torch.

A row is `context` tokens. Its documents do not see each other: positions restart at each, and the first token of each
is nobody's target. Which rows there are, and in which order, is a function of the documents' lengths, the seed and the
epoch; the position in the data is the number of rows that all ranks have consumed together. So the number of ranks, and
how batches are cut, never change what a step trains on.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Packing = Literal["whole", "stream"]

IGNORED = -100
"""The label of a token that is nobody's target, as torch's cross-entropy has it."""

_WINDOW = 1000
"""Parts that are packed together: as far as one may move from its place in the shuffled order."""

_WINDOWS = 256
"""Windows that are packed side by side, which bounds the memory: a cell for each of their parts and rows."""


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Parts of documents in the order in which they lie in rows.

    Args:
        document: The number of each part's document.
        begin: Its first token, counted from the beginning of its document.
        length: The number of its tokens.
        first: For each row, its first part, and behind the last row the number of parts.
    """

    document: Ints
    begin: Ints
    length: Ints
    first: Ints

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.first) - 1

    def of(self, row: int) -> "Pieces":
        """The parts of one row alone."""
        low, high = self.first[row : row + 2]
        return Pieces(
            document=self.document[low:high],
            begin=self.begin[low:high],
            length=self.length[low:high],
            first=np.array([0, high - low]),
        )


def pack(lengths: Ints, *, context: int, packing: Packing, seed: int, epoch: int) -> Pieces:
    """The rows of an epoch.

    Args:
        lengths: The number of tokens of each document.
        context: The number of tokens in a row.
        packing: "whole": a document lies in one row, if it fits into one at all; a longer one is cut into rows and a
            rest. Parts go into rows first-fit, a thousand at a time, and what is left of a row is padding. "stream":
            documents follow one another and are cut wherever a row ends; tokens that fill no row at the end are left
            out.
        seed: Seed of the order of the documents.
        epoch: The epoch; each has an order of its own.
    """
    order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(len(lengths))
    order = order[lengths[order] > 0]
    if packing == "stream":
        return _stream(order, lengths[order], context)
    return _whole(order, lengths[order], context)


def _stream(order: Ints, lengths: Ints, context: int) -> Pieces:
    """Documents in a row, cut where a row ends and where a document does."""
    ends = np.cumsum(lengths)
    rows = int(ends[-1]) // context if len(ends) else 0
    starts = ends - lengths
    cuts = np.unique(np.concatenate([starts[starts < rows * context], np.arange(rows + 1) * context]))
    low, high = cuts[:-1], cuts[1:]
    number = np.searchsorted(ends, low, side="right")
    return Pieces(
        document=order[number],
        begin=low - starts[number],
        length=high - low,
        first=np.searchsorted(low, np.arange(rows + 1) * context),
    )


def _whole(order: Ints, lengths: Ints, context: int) -> Pieces:
    """Parts of at most a row each, first-fit within a window of them; windows are packed side by side."""
    parts = -(-lengths // context)
    number = np.repeat(np.arange(len(order)), parts)
    begin = (np.arange(len(number)) - np.repeat(np.cumsum(parts) - parts, parts)) * context
    length = np.minimum(lengths[number] - begin, context)
    row = np.concatenate([np.zeros(0, np.int64), *_first_fit(length, context)])
    lie = np.argsort(row, kind="stable")  # within a row in the order in which they came
    return Pieces(
        document=order[number[lie]],
        begin=begin[lie],
        length=length[lie],
        first=np.searchsorted(row[lie], np.arange(int(row.max(initial=-1)) + 2)),
    )


def _first_fit(length: Ints, context: int) -> list[Ints]:
    """The row of each part: the first of its window's rows that has room, else a new one."""
    found = []
    opened = 0
    many = _WINDOW * _WINDOWS
    for start in range(0, len(length), many):
        group = length[start : start + many]
        windows = -(-len(group) // _WINDOW)
        padded = np.zeros(windows * _WINDOW, np.int64)
        padded[: len(group)] = group
        room = np.full((windows, 1), context)
        used = np.zeros(windows, np.int64)
        rows = np.empty((windows, _WINDOW), np.int64)
        every = np.arange(windows)
        for place, sizes in enumerate(padded.reshape(windows, _WINDOW).T):
            if used.max() == room.shape[1]:
                room = np.concatenate([room, np.full_like(room, context)], axis=1)
            chosen = np.argmax(room >= sizes[:, None], axis=1)
            room[every, chosen] -= sizes
            used = np.maximum(used, chosen + (sizes > 0))
            rows[:, place] = chosen
        rows += (opened + np.cumsum(used) - used)[:, None]
        opened += int(used.sum())
        found.append(rows.ravel()[: len(group)])
    return found
