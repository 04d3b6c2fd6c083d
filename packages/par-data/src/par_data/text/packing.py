"""Layout of documents in sequences of one length. Pure arithmetic, without torch.

A sequence is `context` tokens. Its documents must not attend to each other: positions restart at each document, and the
first token of each document is not a target. The layout is a function of the documents' lengths, the seed and the
epoch. It does not depend on the number of ranks, or on how batches are sharded.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Packing = Literal["whole", "stream"]

IGNORE_INDEX = -100
"""The label of a token that is not a target: the default `ignore_index` of torch's cross-entropy."""

_WINDOW = 1000
"""Parts that are packed together. It bounds how far a part moves from its place in the shuffled order."""

_WINDOWS = 256
"""Windows that are packed at the same time. It bounds the memory: one cell for each part and sequence in them."""


@dataclass(frozen=True, kw_only=True)
class PackedLayout:
    """Parts of documents, in the order in which they fill sequences.

    Args:
        document: Index of each part's document, int64 [parts].
        begin: Offset of each part's first token in its document, int64 [parts].
        length: Number of tokens in each part, int64 [parts].
        first: Index of each sequence's first part, then the number of parts, int64 [sequences + 1].
    """

    document: Ints
    begin: Ints
    length: Ints
    first: Ints

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.first) - 1

    def sequence(self, number: int) -> "PackedLayout":
        """Return the layout of one sequence."""
        low, high = self.first[number : number + 2]
        return PackedLayout(
            document=self.document[low:high],
            begin=self.begin[low:high],
            length=self.length[low:high],
            first=np.array([0, high - low]),
        )


def pack(lengths: Ints, *, context: int, packing: Packing, seed: int, epoch: int) -> PackedLayout:
    """Pack the documents of an epoch into sequences of one length.

    Args:
        lengths: Number of tokens in each document, int64 [documents].
        context: Number of tokens in a sequence.
        packing: "whole" keeps a document in one sequence if it fits. A longer document is split into full sequences
            and a rest. Parts are packed first-fit, a thousand at a time, and the rest of a sequence is padding.
            "stream" concatenates the documents and splits them where a sequence ends. It drops the tokens at the end
            that do not fill a sequence.
        seed: Seed of the order of the documents.
        epoch: The epoch; each epoch has another order.
    """
    # The bit generator is named, because NumPy may give default_rng another one, and a resume would see another order.
    order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(len(lengths))
    order = order[lengths[order] > 0]
    if packing == "stream":
        return _stream(order, lengths[order], context)
    return _whole(order, lengths[order], context)


def _stream(order: Ints, lengths: Ints, context: int) -> PackedLayout:
    """Concatenate the documents, and split where a sequence or a document ends."""
    ends = np.cumsum(lengths)
    rows = int(ends[-1]) // context if len(ends) else 0
    starts = ends - lengths
    cuts = np.unique(np.concatenate([starts[starts < rows * context], np.arange(rows + 1) * context]))
    low, high = cuts[:-1], cuts[1:]
    number = np.searchsorted(ends, low, side="right")
    return PackedLayout(
        document=order[number],
        begin=low - starts[number],
        length=high - low,
        first=np.searchsorted(low, np.arange(rows + 1) * context),
    )


def _whole(order: Ints, lengths: Ints, context: int) -> PackedLayout:
    """Split documents into parts of at most one sequence, and pack the parts first-fit within windows."""
    parts = -(-lengths // context)
    number = np.repeat(np.arange(len(order)), parts)
    # The index of a part within its document, times the length of a full part.
    begin = (np.arange(len(number)) - np.repeat(np.cumsum(parts) - parts, parts)) * context
    length = np.minimum(lengths[number] - begin, context)
    row = np.concatenate([np.zeros(0, np.int64), *_first_fit(length, context)])
    # A stable sort keeps the parts of a sequence in the order in which they were packed.
    in_order = np.argsort(row, kind="stable")
    return PackedLayout(
        document=order[number[in_order]],
        begin=begin[in_order],
        length=length[in_order],
        first=np.searchsorted(row[in_order], np.arange(int(row.max(initial=-1)) + 2)),
    )


def _first_fit(length: Ints, context: int) -> list[Ints]:
    """Return each part's sequence: the first one of its window with enough free tokens, else a new one."""
    found = []
    opened = 0
    many = _WINDOW * _WINDOWS
    # First-fit is sequential within a window, but windows are independent: each step of the loop over places packs
    # one part of every window at once, which makes NumPy fast enough for a million documents.
    for start in range(0, len(length), many):
        group = length[start : start + many]
        windows = -(-len(group) // _WINDOW)
        padded = np.zeros(windows * _WINDOW, np.int64)
        padded[: len(group)] = group
        free = np.full((windows, 1), context)  # tokens left in each sequence of each window
        used = np.zeros(windows, np.int64)
        rows = np.empty((windows, _WINDOW), np.int64)
        every = np.arange(windows)
        for place, sizes in enumerate(padded.reshape(windows, _WINDOW).T):
            if used.max() == free.shape[1]:
                free = np.concatenate([free, np.full_like(free, context)], axis=1)
            chosen = np.argmax(free >= sizes[:, None], axis=1)
            free[every, chosen] -= sizes
            used = np.maximum(used, chosen + (sizes > 0))
            rows[:, place] = chosen
        rows += (opened + np.cumsum(used) - used)[:, None]
        opened += int(used.sum())
        found.append(rows.ravel()[: len(group)])
    return found
