"""Assignment of tokens to ranks: the split of a batch along its sequence, and the boundaries of its documents."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

Runs = tuple[tuple[int, int], ...]
"""Half-open ranges (start, stop) of tokens of a full sequence, in order."""

Documents = Sequence[int] | Sequence[Sequence[int]]
"""Lengths of documents: one sequence for all rows of a batch, or one for each row."""


@dataclass(frozen=True)
class Tokens:
    """Split of a batch along the sequence. Identical on every rank, hashable, and without tensors.

    Tokens are counted in the full sequence including padding: real tokens are 0 to `length`, and padding follows up to
    `padded`. Padding belongs to no document: it sees nothing, and nothing sees it.

    Args:
        length: Number of tokens of a sequence without padding.
        padded: Number of tokens of a sequence with padding, over all ranks.
        documents: Lengths of the consecutive documents of a sequence: one tuple for all sequences, or one tuple each.
        runs: Ranges (start, stop) of the tokens of each rank, ascending.

    Raises:
        ValueError: Documents do not fill the row, or the ranks do not hold each token once, equally many each.
    """

    length: int
    padded: int
    documents: tuple[tuple[int, ...], ...]
    runs: tuple[Runs, ...]

    def __post_init__(self) -> None:
        for row in self.documents:
            check_documents(row, self.length)
        if not self.documents:
            raise ValueError("documents=() has no row; give the lengths of one row's documents at least")
        # A gap or an overlap would silently drop tokens or count them twice.
        held = sorted(run for runs in self.runs for run in runs)
        covered = held and held[0][0] == 0 and held[-1][1] == self.padded >= self.length
        if not covered or any(a[1] != b[0] for a, b in pairwise(held)) or any(start >= stop for start, stop in held):
            raise ValueError(f"runs must hold each token from 0 to {self.padded} on one rank; they are {self.runs}")
        if any(a[1] >= b[0] for runs in self.runs for a, b in pairwise(runs)):
            raise ValueError(f"a rank's runs must ascend and not touch; they are {self.runs}")
        numbers = {sum(stop - start for start, stop in runs) for runs in self.runs}
        if len(numbers) > 1:
            raise ValueError(f"each rank must hold equally many tokens; they hold {sorted(numbers)}")

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @cached_property
    def _hash(self) -> int:  # plans are looked up by tokens at every attention
        return hash((self.length, self.padded, self.documents, self.runs))

    @property
    def ranks(self) -> int:
        """Number of ranks that the sequence is cut over."""
        return len(self.runs)

    @property
    def local(self) -> int:
        """Number of tokens that each rank holds of a row, padding included."""
        return self.padded // len(self.runs)

    def to(self, *_: object, **__: object) -> "Tokens":
        """Return itself, as batches of tensors are moved by `to(device)`: tokens are counted on the CPU."""
        return self

    def rows(self, start: int, stop: int) -> "Tokens":
        """Return the tokens of the batch's rows from `start` to `stop`, such as those of a microbatch."""
        if len(self.documents) == 1:
            return self
        if not 0 <= start < stop <= len(self.documents):
            raise ValueError(f"rows {start} to {stop} are not rows of a batch of {len(self.documents)}")
        return Tokens(self.length, self.padded, shared(self.documents[start:stop]), self.runs)

    def index(self, rank: int) -> Ints:
        """Return the position in the full row of each token that a rank holds, int64 [s].

        Padding starts at `length`.
        """
        return np.concatenate([np.arange(start, stop) for start, stop in self.runs[rank]])

    def home(self) -> Ints:
        """Return the index of each token of the full row in the concatenation of all ranks' tokens, int64 [length]."""
        places = np.empty(self.padded, np.int64)
        # This inverts the order in which ranks hold the tokens.
        places[np.concatenate([self.index(rank) for rank in range(self.ranks)])] = np.arange(self.padded)
        return places[: self.length]

    def bounds(self) -> tuple[Ints, Ints]:
        """Return the begin and the end of each token's document, each int64 [rows, padded].

        There is 1 row if all rows of the batch have the same documents. Padding is in empty documents.
        """
        padding = np.arange(self.length, self.padded)
        starts, stops = [], []
        for row in self.documents:
            lengths = np.array(row, np.int64)
            ends = np.cumsum(lengths)
            # Padding tokens get documents of length zero, so they see nothing and no token sees them.
            starts.append(np.concatenate([np.repeat(ends - lengths, lengths), padding]))
            stops.append(np.concatenate([np.repeat(ends, lengths), padding]))
        return np.stack(starts), np.stack(stops)

    def positions(self, rank: int) -> Ints:
        """Return the position inside its document of each token that a rank holds, int64 [rows, s]; 0 for padding."""
        index = self.index(rank)
        return index - self.bounds()[0][:, index]

    def following(self, rank: int) -> Ints:
        """Return the position in the full row of the next token of the same document, int64 [rows, s]; -1 without one.

        It is -1 at the end of a document, and for padding: there is no next token to learn.
        """
        index = self.index(rank)
        return np.where(index + 1 < self.bounds()[1][:, index], index + 1, -1)

    def merged(self, ranks: int) -> "Tokens":
        """Return the coarser split in which each group of `ranks` neighbouring ranks counts as a single rank.

        Attention uses it after the ranks of a group have exchanged tokens for heads, as in Ulysses: each of these ranks
        then has all tokens of its group.

        Raises:
            ValueError: The ranks do not divide into such groups.
        """
        if ranks < 1 or self.ranks % ranks:
            raise ValueError(f"{self.ranks} ranks do not divide into groups of {ranks}")
        groups = [
            [run for runs in self.runs[rank : rank + ranks] for run in runs] for rank in range(0, self.ranks, ranks)
        ]
        # After the exchange of tokens for heads, a rank concatenates its neighbours' tokens, which kernels need in
        # order.
        if any(groups_runs != sorted(groups_runs) for groups_runs in groups):
            raise ValueError(
                f"groups of {ranks} ranks do not hold their tokens in ascending order; cut with inner={ranks}"
            )
        return Tokens(self.length, self.padded, self.documents, tuple(joined(runs) for runs in groups))


def joined(runs: Sequence[tuple[int, int]]) -> Runs:
    """Merge ascending ranges that touch."""
    result: list[tuple[int, int]] = []
    for start, stop in runs:
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return tuple(result)


def as_documents(documents: Documents | None, length: int) -> tuple[tuple[int, ...], ...]:
    """Return documents in the form of `Tokens`: tuples of int, one tuple if all rows have the same documents.

    Raises:
        ValueError: A length is no positive integer, or documents do not fill a row.
    """
    if documents is None:
        return ((length,),)
    if not len(documents):
        raise ValueError("documents=[] is empty; leave it out for rows of one document")
    of_rows: Any = documents if isinstance(documents[0], Sequence | np.ndarray) else [documents]
    rows = tuple(tuple(_number(each) for each in row) for row in of_rows)
    for row in rows:
        check_documents(row, length)
    return shared(rows)


def _number(length: Any) -> int:
    try:
        return operator.index(length)
    except TypeError:
        raise ValueError(f"documents must have whole numbers of tokens; there is {length!r}") from None


def check_documents(row: tuple[int, ...], length: int) -> None:
    """Raise ValueError unless a row's documents have positive lengths and fill it."""
    if length < 1:
        raise ValueError(f"a row must have 1 token at least; its length is {length}")
    if not row or min(row) < 1:
        raise ValueError(f"documents must have 1 token at least each; their lengths are {shortened(row)}")
    if sum(row) != length:
        raise ValueError(
            f"documents {shortened(row)} have {sum(row)} tokens together, but the row has {length}; "
            "they must fill it (make what is left a document of its own)"
        )


def shared(rows: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    """Return one tuple for all rows if all rows have the same documents."""
    return rows[:1] if all(row == rows[0] for row in rows[1:]) else rows


def shortened(values: Sequence[int]) -> str:
    """Return a list of numbers as text for an error, with at most eight numbers."""
    return str(list(values)) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"
