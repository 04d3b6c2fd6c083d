"""The axes of a strategy: over which ranks samples differ, gradients are averaged, and batches are the same."""

from par_groups import Axes, Topology

EXPERTS = "experts"
"""The view of a topology that says who has which experts, where they are dealt out over ranks."""


def data_axes(topology: Topology) -> Axes:
    """The axes whose ranks see other samples: "data", and "expert" where experts have ranks of their own.

    Args:
        topology: The axes of a strategy, "data" among them.
    """
    return ("data", "expert") if _has_ranks(topology, "expert") else "data"


def averaged_over(topology: Topology) -> Axes:
    """The axes over which gradients are averaged: their ranks see other samples, or other tokens of the same ones.

    Args:
        topology: The axes of a strategy, "data" among them.
    """
    further = [axis for axis in ("sequence", "expert") if _has_ranks(topology, axis)]
    return ("data", *further) if further else "data"


def replica_axes(topology: Topology) -> tuple[str, ...]:
    """The axes over which ranks are one replica of the model, with the same batches: all but the data axes.

    Args:
        topology: The axes of a strategy, "data" among them.
    """
    apart = topology.leaves(data_axes(topology))
    return tuple(axis for axis in topology.axes if axis not in apart)


def cuts_sequence(topology: Topology) -> bool:
    """Whether each sequence is cut over several ranks."""
    return _has_ranks(topology, "sequence")


def _has_ranks(topology: Topology, axis: str) -> bool:
    return axis in (*topology.axes, *topology.products) and topology.size(axis) > 1
