"""Which windows of the text, or rows of its documents, a step sees. Pure arithmetic.

A window is `context` bytes and the byte after them; windows do not overlap. A row is `context` bytes of documents that
do not see each other; which document lies in which row is a function of their lengths and the seed. An epoch is a
permutation of all windows, or rows, a function of (seed, epoch) alone, and the position in the data is the number of
them that all ranks have consumed together. So the number of ranks never changes what a step trains on, only who
computes which part of it.
"""

import numpy as np
from numpy.typing import NDArray

from par_data import IGNORED, Packing, pack

from .._errors import UserError
from .options import ModelOptions
from .text import Text

Windows = NDArray[np.int64]

_FEWEST = 4


def window_count(size: int, context: int) -> int:
    """How many windows fit into `size` bytes; the last one needs a byte behind it."""
    return max(0, (size - 1) // context)


def check_size(text: Text, model: ModelOptions) -> None:
    """Raises UserError if the text is too short to train or to validate on."""
    sizes = {"for training": (len(text.train), _FEWEST), "held out": (len(text.held_out), 1)}
    for what, (size, fewest) in sizes.items():
        if window_count(size, model.context) < fewest:
            raise UserError(
                f"{str(text.folder)!r} gives {size} bytes {what}, less than {fewest} windows of model.context "
                f"{model.context} bytes; take a folder with more text, a shorter context or another "
                f"data.validation_fraction"
            )


class TextWindows:
    """The windows of a text, each of one document.

    Args:
        text: The bytes.
        context: Bytes in a window.
    """

    def __init__(self, text: bytes, context: int) -> None:
        self._text = np.frombuffer(text, np.uint8)
        self._context = context

    def __len__(self) -> int:
        return window_count(len(self._text), self._context)

    def documents(self, _: Windows) -> None:
        """None: a window knows of no documents."""

    def counts(self, numbers: Windows) -> Windows:
        """The number of targets in each of some windows: every byte has one."""
        return np.full(len(numbers), self._context)

    def is_text(self, numbers: Windows, places: Windows) -> NDArray[np.bool_]:
        """Where some places of some windows are text, and no padding, bool [windows, places]."""
        return np.broadcast_to(places < self._context, (len(numbers), len(places)))

    def take(self, numbers: Windows, places: Windows) -> tuple[Windows, Windows]:
        """Inputs and targets, twice int64 [windows, places]: the target of a byte is the one behind it.

        Args:
            numbers: Numbers of windows.
            places: Places in a window; those from `context` on are padding, with input 0 and target -100.
        """
        empty = places >= self._context
        found = numbers[:, None] * self._context + np.where(empty, 0, places)
        inputs, targets = (self._text[each].astype(np.int64) for each in (found, found + 1))
        inputs[:, empty], targets[:, empty] = 0, IGNORED
        return inputs, targets


class TextRows:
    """The rows into which the documents of a text are packed.

    Args:
        text: The bytes.
        lengths: The lengths of its documents, in their order.
        context: Bytes in a row.
        packing: How documents are packed into rows; see `pack`.
        seed: Another seed, other documents side by side.
    """

    def __init__(self, text: bytes, lengths: Windows, context: int, packing: Packing, seed: int) -> None:
        self._text = np.frombuffer(text, np.uint8)
        self._context = context
        pieces = pack(lengths, context=context, packing=packing, seed=seed, epoch=0)
        self._first, self._lengths = pieces.first, pieces.length
        self._begin = (np.cumsum(lengths) - lengths)[pieces.document] + pieces.begin

    def __len__(self) -> int:
        return len(self._first) - 1

    def documents(self, numbers: Windows) -> list[list[int]]:
        """The lengths of the documents in each of some rows; the padding behind them is one, too."""
        found = [self._lengths[self._first[row] : self._first[row + 1]].tolist() for row in numbers]
        return [[*row, left] if (left := self._context - sum(row)) else row for row in found]

    def counts(self, numbers: Windows) -> Windows:
        """The number of targets in each of some rows: every byte but the last of its document has one."""
        return np.array([(self._lengths[self._first[row] : self._first[row + 1]] - 1).sum() for row in numbers])

    def is_text(self, numbers: Windows, places: Windows) -> NDArray[np.bool_]:
        """Where some places of some rows are text, and no padding, bool [rows, places]."""
        filled = [self._lengths[self._first[row] : self._first[row + 1]].sum() for row in numbers]
        found: NDArray[np.bool_] = places[None, :] < np.array(filled)[:, None]
        return found

    def take(self, numbers: Windows, places: Windows) -> tuple[Windows, Windows]:
        """Inputs and targets, twice int64 [rows, places]: the target of a byte is the next one of its document.

        Args:
            numbers: Numbers of rows.
            places: Places in a row; from `context` on they are padding, as what documents leave of a row is: with
                input 0 and target -100.
        """
        size = max(self._context, int(places.max(initial=0)) + 1)
        inputs, targets = np.zeros((len(numbers), size), np.int64), np.full((len(numbers), size), IGNORED)
        for row, number in enumerate(numbers):
            of_row = slice(self._first[number], self._first[number + 1])
            begin, lengths = self._begin[of_row], self._lengths[of_row]
            ends = np.cumsum(lengths)
            found = np.arange(ends[-1]) + np.repeat(begin - (ends - lengths), lengths)
            inputs[row, : ends[-1]] = self._text[found]
            targets[row, : ends[-1] - 1] = inputs[row, 1 : ends[-1]]
            targets[row, ends - 1] = IGNORED
        return inputs[:, places], targets[:, places]


Samples = TextWindows | TextRows


class DataOrder:
    """The order of the training windows, or rows.

    Args:
        windows: How many there are.
        seed: Another seed, another order.
    """

    def __init__(self, *, windows: int, seed: int) -> None:
        self.windows = windows
        self.seed = seed
        self._epoch = -1
        self._permutation: Windows = np.empty(0, np.int64)

    def batch(self, position: int, count: int) -> Windows:
        """The windows of the global samples position ... position + count - 1; a batch may straddle epochs."""
        samples = np.arange(position, position + count)
        epochs, places = np.divmod(samples, self.windows)
        parts = [self._epoch_order(int(epoch))[places[epochs == epoch]] for epoch in np.unique(epochs)]
        return np.concatenate(parts)

    def _epoch_order(self, epoch: int) -> Windows:
        if epoch != self._epoch:
            self._epoch = epoch
            self._permutation = np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(self.windows)
        return self._permutation


def spread(windows: int, wanted: int) -> Windows:
    """At most `wanted` of the windows, or rows, evenly spaced: the fixed sample that validation uses."""
    count = min(windows, wanted)
    return np.arange(count) * windows // count
