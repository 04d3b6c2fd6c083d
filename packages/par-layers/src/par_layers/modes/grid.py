"""This rank's place on the axes of a tensor group, whether there are groups or just one device."""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any, Self

import torch.distributed as dist

from par_groups import ProcessGroups, Topology

Axes = tuple[str, ...]

EXPERTS = "experts"
"""The view of a topology by which experts lie on its ranks."""


class Grid:
    """Sizes, coordinates and groups over the axes of a tensor mode, or of a view of the same ranks.

    Args:
        groups: Live groups; None for one device, where every axis has size 1.
        view: "experts" for the axes `expert_parallel` and `expert_tensor`, which order the ranks differently than dense
            layers do. On a topology that does not spread experts, each expert is full or sharded over "tensor". None:
            the topology's own axes.

    Raises:
        ValueError: The topology has no such view.
    """

    def __init__(self, groups: ProcessGroups | None, view: str | None = None) -> None:
        self.groups = groups
        self.view = view
        self._stands_for = {} if groups is None else stand_ins(groups.topology, view)
        self.copies = lru_cache(maxsize=None)(self._copies)  # of this object, so that it goes when the object goes

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return itself: copies of a model run on the same ranks."""
        return self

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        return type(self), (self.groups, self.view)

    def seen_as(self, view: str | None) -> "Grid":
        """Return the coordinates of this rank on the axes of a view, or of the topology itself."""
        return type(self)(self.groups, view)

    @property
    def topology(self) -> Topology | None:
        """The topology of the groups; None on one device."""
        return None if self.groups is None else self.groups.topology

    def size(self, axes: Axes) -> int:
        """Return the number of ranks over these axes; 1 for no axes."""
        axes = self.known(axes)
        return 1 if self.groups is None or not axes else self.groups.size(axes)

    def index(self, axes: Axes) -> int:
        """Return this rank's row-major position over these axes, in the given order."""
        position = 0
        for axis in self.known(axes):
            position = position * self.size((axis,)) + self.rank_on(axis)
        return position

    def rank_on(self, axis: str) -> int:
        """Return this rank's coordinate on one axis."""
        # One device is a grid with one rank on every axis, so that layers need no special case.
        return 0 if self.groups is None else self.groups.rank(axis)

    def group(self, axes: Axes) -> dist.ProcessGroup:
        """Return the live group over these axes, which have more than one rank.

        Raises:
            RuntimeError: There are no groups, on one device.
        """
        if self.groups is None:
            raise RuntimeError(f"one device has no group over {axes}; a bug of par-layers")
        axes = self.known(axes)
        # A group over one axis is declared by the axis's name, a joint group by the tuple of names.
        return self.groups[axes if len(axes) > 1 else axes[0]]

    def larger(self, axes: Sequence[str]) -> Axes:
        """Return the topology's axes that have more than one rank, in the given order."""
        return tuple(axis for axis in self.known(axes) if self.size((axis,)) > 1)

    def known(self, axes: Sequence[str]) -> Axes:
        """Return the topology's own names of the axes."""
        if not self._stands_for:
            return tuple(axes)
        return tuple(known for axis in axes for known in self._stands_for.get(axis, (axis,)))

    @cached_property
    def tensor_axes(self) -> Axes:
        """The axes of the tensor group, slowest first."""
        return () if self.topology is None else self.topology.leaves("tensor")

    def _copies(self, cut_by: Axes) -> tuple[int, ...]:
        """Return the ranks of the same pipeline stage that hold the same part of a parameter that these axes shard."""
        if self.groups is None or self.topology is None:
            return (dist.get_rank() if dist.is_initialized() else 0,)
        return self.topology.group(self._same(cut_by), self.groups.global_rank)

    def _same(self, cut_by: Axes) -> list[str]:
        """Return the axes over which such a parameter is replicated."""
        if self.topology is None:
            return []
        home = self.topology.views.get(self.view or "", self.topology)
        # Pipeline stages hold different layers, so their ranks never hold the same parameter.
        differ = {*self.known(cut_by), "pipeline"}
        return [axis for axis in home.axes if axis not in differ]


def stand_ins(topology: Topology, view: str | None) -> dict[str, Axes]:
    """Return the topology's own axes for each axis of a view that the topology does not have.

    Raises:
        ValueError: The topology has no such view.
    """
    if view is None or view in topology.views:
        return {}
    if view != EXPERTS:
        raise ValueError(f"the topology has no view {view!r}; views are {sorted(topology.views)}")
    # Without the view, no axis distributes experts: each rank holds all of them, each sharded over "tensor".
    tensor = topology.leaves("tensor") if "tensor" in (*topology.axes, *topology.products) else ()
    return {"expert_parallel": (), "expert_tensor": tensor}
