"""The config grammar: from a `parallel` dict to axes, slowest first.

    parallel = dict(pipeline=2, tensor=dict(size=4, mode="2d"))

Every axis may be an int or a dict with a size; the data size is what is left of the world. Experts may be folded into
the ranks of other axes, `expert=dict(size=8, tensor=1)`: the axis "expert" then has only the ranks that these lack.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .._registry import suggest
from .experts import check_mode, own_axis, view_of_experts
from .modes import DEFAULT_MODES, MODES, Split, split_by_mode

AXES = ("data", "pipeline", "sequence", "expert", "tensor")
"""The axes of a config, slowest first; rank = data * (pipeline * ... * tensor) + ... + tensor rank."""


@dataclass(frozen=True, kw_only=True)
class AxisConfig:
    """One axis as the user wrote it.

    Args:
        size: The number of coordinates; None is inferred from the world size.
        mode: The name of the mode that splits the axis; None leaves it in one piece.
        options: The further keys of the axis, which are its mode's.
    """

    size: int | None
    mode: str | None = None
    options: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Axes that a `parallel` config defines.

    Args:
        sizes: Size of every axis, slowest first.
        splits: Result of the mode of each axis that has a mode.
        modes: Name and options of each of these modes.
        experts: Axes of the view "experts" with their sizes, slowest first; empty without expert parallelism.
    """

    sizes: Mapping[str, int]
    splits: Mapping[str, Split]
    modes: Mapping[str, tuple[str, Mapping[str, Any]]]
    experts: Mapping[str, int]


def parse(parallel: Mapping[str, Any] | None, world_size: int) -> Layout:
    """Parse a `parallel` config for a world of that size.

    Raises:
        ValueError: Anything that is not the grammar above; the message names the value, the rule and a remedy.
    """
    if not isinstance(parallel, Mapping | None):
        raise ValueError(f"parallel is {parallel!r}; it must be a dict such as dict(pipeline=2)")
    check_size("world_size", world_size)
    parallel = parallel or {}
    for key in parallel:
        if key not in AXES:
            raise ValueError(f"parallel has the unknown key {key!r}; {suggest(str(key), AXES)}")
    axes = {name: _parse_axis(name, parallel.get(name, -1 if name == "data" else 1)) for name in AXES}
    given = {name: axis.size for name, axis in axes.items()}
    folded = axes["expert"].options  # empty: experts have an axis of their own, and are cut over the tensor axis
    if folded:
        given["expert"] = own_axis(given, folded["tensor"])
    sizes = _infer(given, world_size)
    # An axis of size 1 without options needs no mode; an axis without a default leaves the choice to the user.
    chosen = {
        name: axis.mode or (DEFAULT_MODES.get(name) if sizes[name] > 1 or axis.options else None)
        for name, axis in axes.items()
    }
    modes = {name: (mode, axes[name].options) for name, mode in chosen.items() if mode is not None}
    experts: Mapping[str, int] = {}
    if folded or sizes["expert"] > 1:
        check_mode(chosen["tensor"])
        experts = view_of_experts(sizes, axes["expert"].size or sizes["expert"], folded.get("tensor", sizes["tensor"]))
    splits = {name: split_by_mode(name, mode, sizes[name], options) for name, (mode, options) in modes.items()}
    if sizes["tensor"] > 1 and "tensor" not in modes:
        size, names = sizes["tensor"], ", ".join(map(repr, MODES["tensor"].names()))
        raise ValueError(
            f"parallel['tensor'] has size {size} but no mode; name one, as in tensor=dict(size={size}, mode='1d'). "
            f"Modes: {names}"
        )
    return Layout(sizes=sizes, splits=splits, modes=modes, experts=experts)


def check_size(what: str, size: object, *, inferred: bool = False) -> None:
    """Raise ValueError unless `size` is a whole number of at least 1, or -1 where it can be inferred."""
    # True is an int in Python, and would count as a size of 1.
    if isinstance(size, bool) or not isinstance(size, int):
        raise ValueError(f"{what} is {size!r}; it must be a whole number")
    if size < 1 and not (inferred and size == -1):
        raise ValueError(f"{what} is {size}; it must be at least 1" + (" (or -1: inferred)" if inferred else ""))


def _parse_axis(name: str, value: object) -> AxisConfig:
    """Read the value of one axis: an int, or a dict with a size and perhaps a mode with options of its own."""
    if not isinstance(value, Mapping):
        return AxisConfig(size=_parse_size(name, value), options={})
    options = dict(value)
    if "size" not in options:
        raise ValueError(f"parallel[{name!r}] is {dict(value)!r}, without a size: {name}=dict(size=...)")
    size, mode = _parse_size(f"{name}.size", options.pop("size")), options.pop("mode", None)
    if name not in MODES:
        taken = ("tensor",) if name == "expert" else ()
        for key in ("mode",) * (mode is not None) + tuple(options):
            if key not in taken:
                what = "a size, and tensor, the number of ranks that an expert is cut over" if taken else "a size alone"
                raise ValueError(f"parallel[{name!r}] has the unknown key {key!r}; it takes {what}")
    elif mode is None and options and name not in DEFAULT_MODES:
        raise ValueError(f"parallel[{name!r}] has {sorted(options)} but no mode that takes them; name the mode")
    if mode is not None and not isinstance(mode, str):
        raise ValueError(f"parallel[{name!r}] has mode={mode!r}; {suggest(str(mode), MODES[name].names())}")
    return AxisConfig(size=size, mode=mode, options=options)


def _parse_size(what: str, size: object) -> int | None:
    check_size(f"parallel {what}", size, inferred=True)
    return size if size != -1 else None  # type: ignore[return-value]  # checked above


def _infer(sizes: Mapping[str, int | None], world_size: int) -> dict[str, int]:
    """Fill in the one size that was left out, and check the product."""
    unknown = [name for name, size in sizes.items() if size is None]
    if len(unknown) > 1:
        raise ValueError(f"the sizes of {' and '.join(unknown)} cannot both be inferred; give all but one")
    known = {name: size for name, size in sizes.items() if size is not None}
    product = math.prod(known.values())
    formula = " * ".join(f"{name} {size}" for name, size in known.items() if size > 1) or "1"
    if world_size % product or (not unknown and product != world_size):
        if unknown:
            rule, remedy = "is not a multiple of", f"start {product} ranks or a multiple of it, or make an axis smaller"
        else:
            rule, remedy = "is not", f"start {product} ranks, or leave data out so that it is inferred"
        raise ValueError(f"the world of {world_size} ranks {rule} {formula} = {product}; {remedy}")
    return {name: world_size // product if size is None else size for name, size in sizes.items()}
