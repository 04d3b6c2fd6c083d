"""Which windows of the text a step sees. Pure arithmetic.

A window is `context` bytes and the byte after them; windows do not overlap. An epoch is a permutation of all of them,
a function of (seed, epoch) alone, and the position in the data is the number of windows that all ranks have consumed
together. So the number of ranks never changes what a step trains on, only who computes which part of it.
"""

import numpy as np
from numpy.typing import NDArray

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


class DataOrder:
    """The order of the training windows.

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
    """At most `wanted` of the windows, evenly spaced: the fixed sample that validation uses."""
    count = min(windows, wanted)
    return np.arange(count) * windows // count
