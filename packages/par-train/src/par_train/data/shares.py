"""How ranks share samples, and what is in a row. Imports no torch."""

import numpy as np
from numpy.typing import NDArray

from par_groups import Topology


def share(items: NDArray[np.int64], index: int, parts: int) -> NDArray[np.int64]:
    """The contiguous share of one of `parts` ranks; sizes differ by one at most."""
    return items[index * len(items) // parts : (index + 1) * len(items) // parts]


def averaged_over(topology: Topology) -> str | tuple[str, ...]:
    """The axes over which gradients are averaged: their ranks see other samples, or other tokens of the same ones.

    Args:
        topology: The axes of a strategy, "data" among them.
    """
    has_sequence = "sequence" in (*topology.axes, *topology.products)
    return ("data", "sequence") if has_sequence and topology.size("sequence") > 1 else "data"


def replica_axes(topology: Topology) -> tuple[str, ...]:
    """The axes over which ranks are one replica of the model, with the same batches: all but "data".

    Args:
        topology: The axes of a strategy, "data" among them.
    """
    apart = topology.leaves("data")
    return tuple(axis for axis in topology.axes if axis not in apart)
