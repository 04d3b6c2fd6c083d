"""A topology: named axes and their sizes, and the arithmetic of ranks on them.

Pure: it imports no torch, so that 100,000 ranks are planned in one small process. The axes are a mixed-radix number
system: the last axis varies fastest, a rank is the number, its coordinates are the digits.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from .._registry import suggest
from .channels import Channels
from .config import check_size, parse
from .experts import EXPERTS

if TYPE_CHECKING:
    from pathlib import Path

Axes = str | Sequence[str]
"""One axis by name, or several: their product."""

Mode = tuple[str, Mapping[str, Any]]
"""A mode's name and its options, as the config gave them."""

_MEGATRON = {"tp": "tensor", "cp": "sequence", "ep": "expert", "dp": "data", "pp": "pipeline"}
"""Our names for the axes of an order string."""


class Axis(NamedTuple):
    """One axis: how many coordinates it has, and how many ranks apart two neighbours are."""

    size: int
    stride: int


class Topology:
    """Named axes over the ranks 0 .. world_size - 1, the slowest axis first.

    A topology is immutable: `split`, `alias`, `declare` and `view` return new ones. An axis that was split, and an
    alias, stay usable as names for the product of their parts.

    Args:
        axes: Names and sizes, slowest first. One size may be -1: it is inferred from `world_size`.
        world_size: Number of ranks; needed for a size of -1, otherwise a check.

    Raises:
        ValueError: A size that is not positive, two -1, a name given twice, or a product that is not the world size.

    Example:
        >>> topology = Topology({"data": 2, "tensor": 4}).split("tensor", [("row", 2), ("col", 2)])
        >>> topology.group("data", rank=1)
        (1, 5)
        >>> topology.group(("data", "col"), rank=0)
        (0, 1, 4, 5)
    """

    __slots__ = ("_axes", "_channels", "_declared", "_modes", "_parts", "_views")

    def __init__(self, axes: Mapping[str, int] | Iterable[tuple[str, int]], world_size: int | None = None) -> None:
        self._axes: dict[str, Axis] = {}
        pairs = _checked_pairs(axes, world_size)
        # Neighbours on an axis are as many ranks apart as all faster axes have together.
        stride = math.prod(size for _, size in pairs)
        for name, size in pairs:
            stride //= size
            self._axes[name] = Axis(size, stride)
        self._parts: dict[str, tuple[str, ...]] = {}
        self._views: dict[str, Topology] = {}
        self._modes: dict[str, Mode] = {}
        self._declared: tuple[tuple[str, ...], ...] = ()
        self._channels: tuple[Channels, ...] = ()

    @classmethod
    def from_config(cls, parallel: Mapping[str, Any] | None, world_size: int) -> "Topology":
        """Return the topology of a config: data, pipeline, sequence, expert, tensor, and the parts of a mode.

        Every axis exists, with size 1 if the config does not name it; "model" is pipeline x tensor. With expert
        parallelism, a view "experts" of the same ranks has the axes data, pipeline, expert_data, expert_parallel and
        expert_tensor. Dense layers are replicated over ("data", "sequence", "expert"), an expert over ("data",
        "expert_data"). Experts exchange tokens over a private communicator of "expert_parallel".

        Args:
            parallel: Config, such as `dict(pipeline=2, tensor=dict(size=4, mode="2d"))`; {} or None for data
                parallelism only.
            world_size: Number of ranks. The size of the data axis is inferred from it.

        Raises:
            ValueError: The config is invalid; the message names the value, the rule and a fix.
        """
        layout = parse(parallel, world_size)
        topology = cls(layout.sizes, world_size)
        for axis, split in layout.splits.items():
            topology = topology.split(axis, split.axes) if split.axes else topology
            topology = topology.declare(*split.declare)
        if layout.experts:
            topology = topology.view(EXPERTS, layout.experts)
            topology = topology.declare(("data", "expert_data"), ("data", "sequence", "expert"))
            if layout.experts["expert_parallel"] > 1:
                topology = topology.declare(Channels("expert_parallel", 1))
        topology._modes = dict(layout.modes)
        return topology.alias("model", ("pipeline", "tensor"))

    @classmethod
    def from_order(
        cls,
        order: str,
        *,
        world_size: int | None = None,
        tp: int = 1,
        cp: int = 1,
        ep: int = 1,
        dp: int | None = None,
        pp: int = 1,
    ) -> "Topology":
        """Return the topology of an order string in Megatron's words, the leftmost axis fastest.

        Args:
            order: Axes of the topology, such as "tp-cp-ep-dp-pp".
            world_size: Number of ranks; it is checked.
            tp: Size of the tensor axis.
            cp: Size of the sequence axis, which Megatron calls context parallel.
            ep: Size of the expert axis.
            dp: Size of the data axis. Default: inferred from `world_size`, or 1 without `world_size`.
            pp: Size of the pipeline axis.

        Raises:
            ValueError: An axis is unknown or repeated, or the order omits an axis with a size above 1.

        Source: Megatron-LM, `RankGenerator`, one factorisation. Its second one, for experts, is a `view` here.
        """
        names = order.split("-")
        for name in names:
            if name not in _MEGATRON:
                raise ValueError(f"order {order!r}: no axis {name!r}; {suggest(name, _MEGATRON)}")
        inferred = -1 if world_size is not None and "dp" in names else 1
        sizes = {"tp": tp, "cp": cp, "ep": ep, "dp": inferred if dp is None else dp, "pp": pp}
        for name, size in sizes.items():
            if name not in names and size != 1:
                raise ValueError(f"order {order!r} leaves out {name}, whose size is {size}; add it to the order")
        return cls([(_MEGATRON[name], sizes[name]) for name in reversed(names)], world_size)

    # What there is

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod([axis.size for axis in self._axes.values()])

    @property
    def axes(self) -> dict[str, int]:
        """The axes that are not split further, with their sizes, slowest first."""
        return {name: axis.size for name, axis in self._axes.items()}

    @property
    def products(self) -> dict[str, tuple[str, ...]]:
        """Names of products of axes: axes that were split, and aliases."""
        return dict(self._parts)

    @property
    def views(self) -> Mapping[str, "Topology"]:
        """Further factorisations of the same ranks, by name."""
        return MappingProxyType(self._views)

    @property
    def modes(self) -> Mapping[str, Mode]:
        """The mode of each axis that has one, with its options."""
        return MappingProxyType(self._modes)

    @property
    def declared(self) -> tuple[tuple[str, ...], ...]:
        """Products of axes that need a live group, in addition to the named products."""
        return self._declared

    @property
    def channels(self) -> tuple[Channels, ...]:
        """Private communicators that its modes need, which `ProcessGroups` makes with the groups."""
        return self._channels

    def leaves(self, axes: Axes) -> tuple[str, ...]:
        """Return the unsplit axes of `axes`, in layout order.

        Raises:
            ValueError: A name is unknown, or an axis is named twice.
        """
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        home = self._home(names)
        leaves = [leaf for name in names for leaf in home._parts.get(name, (name,))]
        for leaf in leaves:
            if leaves.count(leaf) > 1:
                raise ValueError(f"axes {names} name {leaf!r} twice; name each axis once")
        return tuple(leaf for leaf in home._axes if leaf in leaves)

    def blocks(self, axes: Axes) -> tuple[Axis, ...]:
        """Return the canonical form of `axes`: neighbours merged, size 1 dropped, slowest first.

        Two products of axes have the same groups exactly if their blocks are equal, even if one is from a view.
        """
        merged: list[Axis] = []
        for axis in self._located(axes):
            if merged and merged[-1].stride == axis.size * axis.stride:
                axis = Axis(merged.pop().size * axis.size, axis.stride)  # noqa: PLW2901 - it absorbs its neighbour
            if axis.size > 1:
                merged.append(axis)
        return tuple(merged)

    # Ranks and groups

    def size(self, axes: Axes) -> int:
        """Return the number of ranks in each group over `axes`."""
        if isinstance(axes, str) and axes in self._axes:
            return self._axes[axes].size
        # A list, since torch.compile does not trace a generator into math.prod.
        return math.prod([axis.size for axis in self._located(axes)])

    def coords(self, rank: int, view: str | None = None) -> dict[str, int]:
        """Return the coordinates of a rank on every axis, slowest first.

        Args:
            rank: Global rank.
            view: Name of the view whose axes are used. Default: this topology's own axes.
        """
        if view is not None and view not in self._views:
            raise ValueError(f"there is no view {view!r}; {suggest(view, self._views or ['none'])}")
        home = self if view is None else self._views[view]
        self._check_rank(rank)
        return {name: rank // axis.stride % axis.size for name, axis in home._axes.items()}

    def rank(self, **coords: int) -> int:
        """Return the rank at these coordinates. Axes of size 1 are optional, and a product may replace its parts.

        Raises:
            ValueError: An axis is unknown, missing or given twice, or a coordinate is out of range.
        """
        home = self._home(tuple(coords))
        missing = set(home._axes) - set(self.leaves(tuple(coords)))
        for name in home._axes:
            if name in missing and home._axes[name].size > 1:
                raise ValueError(f"rank({_call(coords)}): axis {name!r} is missing; give all of {list(home._axes)}")
        return sum(self._offset(name, coordinate) for name, coordinate in coords.items())

    def index(self, axes: Axes, rank: int) -> int:
        """Return the position of `rank` in its group over `axes`: `group(axes, rank)[index(axes, rank)] == rank`."""
        self._check_rank(rank)
        index = 0
        for axis in self._located(axes):
            index = index * axis.size + rank // axis.stride % axis.size
        return index

    def group(self, axes: Axes, rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` only in these axes, ascending; O(size of the group)."""
        self._check_rank(rank)
        located = self._located(axes)
        first = rank - sum(rank // axis.stride % axis.size * axis.stride for axis in located)
        return _spread(first, located)

    def groups(self, axes: Axes) -> Iterator[tuple[int, ...]]:
        """Yield all groups over `axes` in the order of their first rank. The groups partition the world."""
        leaves, home = self.leaves(axes), self._home((axes,) if isinstance(axes, str) else tuple(axes))
        across = [axis for name, axis in home._axes.items() if name not in leaves]
        located = self._located(axes)
        for starts in itertools.product(*(range(0, axis.size * axis.stride, axis.stride) for axis in across)):
            yield _spread(sum(starts), located)

    # New topologies from this one

    def split(self, axis: str, parts: Mapping[str, int] | Iterable[tuple[str, int]]) -> "Topology":
        """Split one axis into several, slowest first; the axis stays usable as their product.

        Raises:
            ValueError: The axis is no unsplit axis, a part's name is taken, or the parts' product is not its size.
        """
        if axis not in self._axes:
            raise ValueError(f"cannot split {axis!r}: it is no unsplit axis; {suggest(axis, self._axes)}")
        inside = Topology(parts, self._axes[axis].size)
        # The name of the split axis stays in use, for the product of its parts.
        names = [name for name in self._names() if name != axis]
        for name in inside.axes:
            if name in names or name == axis:
                raise ValueError(
                    f"cannot split {axis!r} into a part called {name!r}: the name is taken; rename the part"
                )
        sizes: dict[str, int] = {}
        for name, size in self.axes.items():
            sizes |= inside.axes if name == axis else {name: size}
        new = self._like(Topology(sizes))
        products = {**self._parts, axis: (axis,)}
        new._parts = {
            product: tuple(part for leaf in leaves for part in (inside.axes if leaf == axis else (leaf,)))
            for product, leaves in products.items()
        }
        # A part may have the name of an axis of a view, and must then have the same ranks.
        new._check_views()
        return new

    def alias(self, name: str, axes: Axes) -> "Topology":
        """Give a product of axes a name, as "model" is pipeline x tensor."""
        if name in self._names():
            raise ValueError(f"the name {name!r} is taken; axes and products are {self._names()}")
        new = self._like(self)
        new._parts = {**self._parts, name: self.leaves(axes)}
        new._check_views()
        return new

    def declare(self, *axes: Axes | Channels) -> "Topology":
        """Notes what `ProcessGroups` makes with the groups of single axes.

        Args:
            axes: Products of axes that need a live group of their own, and `Channels` over axes.
        """
        new = self._like(self)
        products = [self.leaves(wanted) for wanted in axes if not isinstance(wanted, Channels)]
        new._declared = tuple(dict.fromkeys([*self._declared, *products]))  # each product once
        private = [Channels(self.leaves(each.axes), each.count) for each in axes if isinstance(each, Channels)]
        new._channels = tuple(dict.fromkeys([*self._channels, *private]))
        return new

    def view(self, name: str, axes: Mapping[str, int] | Iterable[tuple[str, int]]) -> "Topology":
        """Add a second factorisation of the same ranks; an axis of the same name must mean the same in both.

        Experts cut the world otherwise than dense layers do: `view("expert", {"pipeline": 2, "expert_data": 2,
        "expert": 2})`. Axes of different factorisations cannot be mixed in one group.

        Args:
            name: The view's name.
            axes: Names and sizes of the view's axes, slowest first; one size may be -1.

        Raises:
            ValueError: The name is taken, the product is not the world size, or a shared axis lies differently.
        """
        if name in self._views:
            raise ValueError(f"there is a view called {name!r} already; views are {sorted(self._views)}")
        new = self._like(self)
        new._views = {**self._views, name: Topology(axes, self.world_size)}
        new._check_views()
        return new

    # As text and as a picture

    def to_json(self) -> str:
        """Return a line of JSON for `from_json`; equal topologies have equal lines."""
        record: dict[str, Any] = {"axes": [[name, axis.size] for name, axis in self._axes.items()]}
        if self._parts:
            record["products"] = {name: list(parts) for name, parts in sorted(self._parts.items())}
        if self._declared:
            record["declared"] = [list(product) for product in self._declared]
        if self._channels:
            record["channels"] = [[list(each.axes), each.count] for each in self._channels]
        if self._modes:
            record["modes"] = {axis: [mode, dict(options)] for axis, (mode, options) in sorted(self._modes.items())}
        if self._views:
            record["views"] = {name: json.loads(view.to_json()) for name, view in sorted(self._views.items())}
        return json.dumps(record)

    @classmethod
    def from_json(cls, text: str) -> "Topology":
        """Read what `to_json` wrote.

        Raises:
            ValueError: The text is no topology.
        """
        try:
            record = json.loads(text)
            new = cls([(name, size) for name, size in record["axes"]])
            for name, parts in record.get("products", {}).items():
                new = new.alias(name, parts)
            for name, view in record.get("views", {}).items():
                new = new.view(name, view["axes"])
            new = new.declare(*record.get("declared", ()))
            new = new.declare(*(Channels(axes, count) for axes, count in record.get("channels", ())))
            new._modes = {axis: (mode, options) for axis, (mode, options) in record.get("modes", {}).items()}
        except (KeyError, TypeError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"{text[:80]!r} is no topology, expected what to_json writes: {error}") from error
        return new

    def digest(self) -> int:
        """Return a hash of 63 bits: equal topologies have equal hashes, and different ones practically never."""
        return int.from_bytes(hashlib.sha256(self.to_json().encode()).digest()[:8]) >> 1

    def describe(self) -> str:
        """Return a readable table: every axis, its size, and one of its groups."""
        from .describe import describe  # noqa: PLC0415 - only those who ask for text pay for it

        return describe(self)

    def draw(self, path: "str | Path") -> None:
        """Draws the ranks, coloured by group, with one panel for each axis. Needs matplotlib.

        Args:
            path: The file to write; its ending decides the format (.png, .svg or .pdf).
        """
        from .draw import draw  # noqa: PLC0415 - matplotlib is an extra

        draw(self, path)

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.axes.items())
        return f"Topology({axes})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Topology) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return self.digest()

    # The parts

    def _check_views(self) -> None:
        for name, view in self._views.items():
            for axis, located in view._axes.items():
                if axis in self._names() and self.blocks(axis) != view.blocks(axis):
                    mine = " x ".join(f"{block.size} ranks {block.stride} apart" for block in self.blocks(axis))
                    raise ValueError(
                        f"view {name!r}: its axis {axis!r} is {located.size} ranks {located.stride} apart, but "
                        f"{axis!r} of this topology is {mine or 'one rank'}; reorder or resize the axes, or rename one"
                    )

    def _names(self) -> list[str]:
        return [*self._axes, *self._parts]

    def _home(self, names: tuple[str, ...]) -> "Topology":
        """Return the factorisation that contains all of these names: this topology, or one of the views."""
        for candidate in (self, *self._views.values()):
            if all(name in candidate._axes or name in candidate._parts for name in names):
                return candidate
        known = dict.fromkeys([*self._names(), *(name for view in self._views.values() for name in view._axes)])
        for name in names:
            if name not in known:
                raise ValueError(f"there is no axis {name!r}; {suggest(name, known)}")
        raise ValueError(f"axes {names} belong to different factorisations; name axes of one view only")

    def _located(self, axes: Axes) -> list[Axis]:
        home = self._home((axes,) if isinstance(axes, str) else tuple(axes))
        return [home._axes[name] for name in self.leaves(axes)]

    def _offset(self, name: str, coordinate: int) -> int:
        """Return the rank offset of a coordinate on an axis or on a product of axes."""
        size = self.size(name)
        if not 0 <= coordinate < size:
            raise ValueError(f"{name}={coordinate} is out of range: the axis has {size} coordinates, 0 to {size - 1}")
        offset = 0
        for axis in reversed(self._located(name)):
            coordinate, digit = divmod(coordinate, axis.size)
            offset += digit * axis.stride
        return offset

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is out of range: the world has {self.world_size} ranks, counted from 0")

    def _like(self, base: "Topology") -> "Topology":
        """Return a new topology with the axes of `base`, and all other attributes of this topology."""
        new = Topology.__new__(Topology)
        new._axes, new._parts = base._axes, self._parts
        new._views, new._modes = self._views, self._modes
        new._declared, new._channels = self._declared, self._channels
        return new


def _checked_pairs(
    axes: Mapping[str, int] | Iterable[tuple[str, int]], world_size: int | None
) -> list[tuple[str, int]]:
    """Names and positive sizes whose product is the world size, with a -1 filled in."""
    pairs = list(axes.items() if isinstance(axes, Mapping) else axes)
    names = [name for name, _ in pairs]
    for name, size in pairs:
        if not isinstance(name, str) or not name:
            raise ValueError(f"an axis is called {name!r}; a name is a string that is not empty")
        if names.count(name) > 1:
            raise ValueError(f"axis {name!r} is given twice in {names}; name each axis once")
        check_size(f"the size of axis {name!r}", size, inferred=True)
    unknown = [name for name, size in pairs if size == -1]
    product = math.prod(size for _, size in pairs if size != -1)
    if len(unknown) > 1:
        raise ValueError(f"the sizes of {unknown} are all -1; only one can be inferred")
    if unknown and world_size is None:
        raise ValueError(f"the size of {unknown[0]!r} is -1; give the world_size that it is inferred from")
    if world_size is not None:
        check_size("world_size", world_size)
        if world_size % product or (not unknown and product != world_size):
            rule = "does not divide" if unknown else "is not"
            raise ValueError(
                f"{dict(pairs)} gives {product} ranks, which {rule} the {world_size} there are; change a size"
            )
    return [(name, world_size // product if size == -1 and world_size else size) for name, size in pairs]


def _spread(first: int, axes: Iterable[Axis]) -> tuple[int, ...]:
    """Return the ranks reached from `first` by every combination of steps; ascending if axes are slowest first."""
    ranks = [first]
    for axis in axes:
        ranks = [rank + step for rank in ranks for step in range(0, axis.size * axis.stride, axis.stride)]
    return tuple(ranks)


def _call(coords: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in coords.items())
