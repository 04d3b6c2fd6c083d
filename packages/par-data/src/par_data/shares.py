"""The share of one of several ranks in a batch. Imports no torch."""

import numpy as np
from numpy.typing import NDArray


def share(items: NDArray[np.int64], index: int, parts: int) -> NDArray[np.int64]:
    """The contiguous share of one of `parts` ranks; sizes differ by one at most."""
    return items[index * len(items) // parts : (index + 1) * len(items) // parts]
