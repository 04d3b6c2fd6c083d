"""The axes of a training step: those over which samples differ, gradients are averaged, and batches are identical."""

from .topology import Axes, Topology


def data_axes(topology: Topology) -> Axes:
    """Return the axes whose ranks read different samples: "data", and "expert" if experts have ranks of their own.

    Args:
        topology: A topology of `Topology.from_config`, or another one with an axis "data".
    """
    return ("data", "expert") if axis_size(topology, "expert") > 1 else "data"


def averaged_axes(topology: Topology) -> Axes:
    """Return the axes over which gradients are averaged: their ranks see other samples, or other tokens of them.

    Args:
        topology: A topology of `Topology.from_config`, or another one with an axis "data".
    """
    further = [axis for axis in ("sequence", "expert") if axis_size(topology, axis) > 1]
    return ("data", *further) if further else "data"


def replica_axes(topology: Topology) -> tuple[str, ...]:
    """Return the axes over which ranks form one replica of the model, with identical batches: all but the data axes.

    Args:
        topology: A topology of `Topology.from_config`, or another one with an axis "data".
    """
    apart = topology.leaves(data_axes(topology))
    return tuple(axis for axis in topology.axes if axis not in apart)


def splits_sequence(topology: Topology) -> bool:
    """Return whether each sequence is split over several ranks."""
    return axis_size(topology, "sequence") > 1


def axis_size(topology: Topology, axis: str) -> int:
    """Return the number of ranks along an axis or a product of axes; 1 if the topology has none of this name.

    Args:
        topology: Any topology.
        axis: Name, such as "sequence".
    """
    return topology.size(axis) if axis in (*topology.axes, *topology.products) else 1
