"""Parallel modes: how a mode cuts the group it is given into axes.

A mode is a function from the size of its group, and its own options, to a `Split`. It knows nothing of ranks: the
topology lays the axes out, slowest first, in place of the axis that was split.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from .._registry import Registry, suggest
from .channels import Channels

ModeFunction = Callable[..., "Split"]
F = TypeVar("F", bound=ModeFunction)


@dataclass(frozen=True, kw_only=True)
class Split:
    """Axes into which a mode splits its group.

    Args:
        axes: Names and sizes, slowest first; empty if the group stays one axis.
        declare: Products of axes, and `Channels`, that need process groups in addition to the groups of single axes.
    """

    axes: tuple[tuple[str, int], ...] = ()
    declare: tuple[tuple[str, ...] | Channels, ...] = ()


MODES: Mapping[str, Registry[ModeFunction]] = {
    "tensor": Registry("tensor mode", "par_groups.modes"),
    "sequence": Registry("sequence mode", "par_groups.sequence_modes"),
}


def register_mode(name: str, *, axis: str = "tensor") -> Callable[[F], F]:
    """Register a parallel mode under `name`, as a decorator.

    The function is called as `mode(size, **options)`: `size` is the number of ranks in the group, and the options are
    the other keys of the axis in the user's config. A separate wheel can provide a mode without an import by an entry
    point `name = "module:function"` in the group `par_groups.modes` (`par_groups.sequence_modes`).

    Args:
        name: Name of the mode in a config, `tensor=dict(size=4, mode=name)`.
        axis: Axis of the mode, "tensor" or "sequence". Default: "tensor".

    Raises:
        ValueError: The name is taken, or the axis has no modes.

    Example:
        >>> @register_mode("ladder")
        ... def ladder(size: int, *, rungs: int = 2) -> Split:
        ...     return Split(axes=(("rail", size // rungs), ("rung", rungs)))
    """
    if axis not in MODES:
        raise ValueError(f"axis {axis!r} has no modes; {suggest(axis, MODES)}")

    def register(function: F) -> F:
        MODES[axis].register(name, function)
        return function

    return register


def split_by_mode(axis: str, mode: str, size: int, options: Mapping[str, Any]) -> Split:
    """Split `size` ranks by the mode of that name.

    Raises:
        ValueError: The mode is unknown, or it does not support an option or the size.
    """
    function = MODES[axis][mode]
    _check_options(axis, mode, function, options)
    split = function(size, **options)
    product = math.prod(length for _, length in split.axes)
    if split.axes and product != size:
        raise ValueError(
            f"mode {mode!r} split {size} ranks into {dict(split.axes)}, which is {product}; mend {function.__module__}"
        )
    return split


def _check_options(axis: str, mode: str, function: ModeFunction, options: Mapping[str, Any]) -> None:
    # The first parameter is the size of the group, all others are options.
    parameters = list(inspect.signature(function).parameters.values())[1:]
    # A mode that takes any option checks its options itself.
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return
    taken = [parameter.name for parameter in parameters]
    for key in options:
        if key not in taken:
            raise ValueError(f"mode {mode!r} takes no option {key!r} ({axis}); {suggest(key, taken or ['none'])}")
    for parameter in parameters:
        name = parameter.name
        if parameter.default is inspect.Parameter.empty and name not in options:
            raise ValueError(f"mode {mode!r} needs the option {name!r}: {axis}=dict(..., {name}=...)")


@register_mode("1d")
def _one_d(
    size: int,
    *,
    sequence_parallel: bool = False,  # noqa: ARG001 - the layers read it
    kv_heads: int | None = None,
) -> Split:
    """Keep one axis, "tensor" itself (Megatron-LM, arXiv:1909.08053).

    If there are fewer key and value heads than ranks, the heads are replicated: `kv_heads` splits the axis into
    "kv_head" and "kv_copy". The replicas of a head are on consecutive ranks, like its query heads.
    """
    if kv_heads is None:
        return Split()
    if not isinstance(kv_heads, int) or isinstance(kv_heads, bool) or kv_heads < 1:
        raise ValueError(f"mode '1d': kv_heads is {kv_heads!r}, it must be a whole number of at least 1")
    if kv_heads >= size:
        return Split()
    if size % kv_heads:
        raise ValueError(f"mode '1d': kv_heads={kv_heads} does not divide the {size} ranks; make size a multiple of it")
    return Split(axes=(("kv_head", kv_heads), ("kv_copy", size // kv_heads)))


@register_mode("2d")
def _two_d(size: int) -> Split:
    """Split into a square of rows and columns, local rank = q * row + col (SUMMA; arXiv:2104.05343)."""
    q = _root("2d", "q*q", size, 1, 2)
    return Split(axes=(("row", q), ("col", q)))


@register_mode("2.5d")
def _two_and_a_half_d(size: int, *, depth: int) -> Split:
    """Split into `depth` squares, depth outermost (arXiv:2105.14500)."""
    if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
        raise ValueError(f"mode '2.5d': depth is {depth!r}, it must be a whole number of at least 1")
    q = _root("2.5d", f"q*q*depth with depth={depth}", size, depth, 2)
    return Split(axes=(("depth", depth), ("row", q), ("col", q)), declare=(("depth", "row"),))


@register_mode("3d")
def _three_d(size: int) -> Split:
    """Split into a cube, the weight axis fastest (arXiv:2105.14450)."""
    q = _root("3d", "q*q*q", size, 1, 3)
    return Split(
        axes=(("output", q), ("input", q), ("weight", q)),
        declare=(("input", "weight"), ("output", "weight")),
    )


DEFAULT_MODES: Mapping[str, str] = {"sequence": "gather"}
"""The mode of an axis that has several ranks and names none."""

SPLITS = ("auto", "contiguous", "zigzag", "balanced")
"""Ways to split a sequence over ranks; "auto" takes the fastest way for the attention."""


@register_mode("gather", axis="sequence")
def _gather(size: int, *, split: str = "auto", parts: int | None = None, keep: bool = False) -> Split:
    """Gather, on each rank, the keys and values for its queries in one exchange.

    Args:
        size: Number of ranks.
        split: Way to split a sequence over the ranks, one of `SPLITS`. Default: "auto".
        parts: Number of parts, by heads, in which keys and values are sent. Default: chosen by the attention.
        keep: Whether to save gathered keys and values until backward; otherwise backward gathers them again. Default:
            False.
    """
    _check_split("gather", split)
    _check_fetching("gather", parts, keep)
    return Split(declare=_over_tokens(size))


@register_mode("ring", axis="sequence")
def _ring(size: int, *, split: str = "auto") -> Split:
    """Send keys and values around the ring of sequence ranks (arXiv:2310.01889).

    Args:
        size: Number of ranks.
        split: Way to split a sequence over the ranks, one of `SPLITS`. Default: "auto".
    """
    _check_split("ring", split)
    return Split(declare=(*_over_tokens(size), *_around("sequence", size)))


@register_mode("ulysses", axis="sequence")
def _ulysses(size: int, *, split: str = "auto") -> Split:
    """Exchange sequence shards for head shards in an all-to-all (arXiv:2309.14509).

    Args:
        size: Number of ranks.
        split: "auto" or "contiguous", which are equivalent: contiguous tokens already balance the ranks' work.
    """
    _check_split("ulysses", split)
    if split not in {"auto", "contiguous"}:
        raise ValueError(
            f"sequence mode 'ulysses': split is {split!r}, but its ranks have equal work when tokens are contiguous; "
            "remove split, or use mode 'gather', 'ring' or '2d'"
        )
    return Split(declare=_over_tokens(size))


@register_mode("2d", axis="sequence")
def _ulysses_inside(
    size: int,
    *,
    ulysses: int = 2,
    outer: str = "ring",
    split: str = "auto",
    parts: int | None = None,
    keep: bool = False,
) -> Split:
    """Combine Ulysses among neighbours, such as the ranks of one node, with a ring or gather between such groups.

    Args:
        size: Number of ranks.
        ulysses: Number of ranks that exchange tokens for heads. Default: 2.
        outer: Mode between these groups, "ring" or "gather". Default: "ring".
        split: Way to split a sequence over the groups, one of `SPLITS`; inside a group, tokens are contiguous. Default:
            "auto".
        parts: Number of parts, by heads, in which keys and values are sent under "gather". Default: chosen by the
            attention.
        keep: Whether to save gathered keys and values until backward. Default: False.
    """
    _check_split("2d", split)
    if isinstance(ulysses, bool) or not isinstance(ulysses, int) or ulysses < 1:
        raise ValueError(f"sequence mode '2d': ulysses is {ulysses!r}; it must be a whole number of at least 1")
    if size % ulysses:
        divisors = ", ".join(str(ranks) for ranks in range(1, size + 1) if size % ranks == 0)
        raise ValueError(
            f"sequence mode '2d': ulysses={ulysses} does not divide the {size} ranks; use one of {divisors}"
        )
    if outer not in ("ring", "gather"):
        raise ValueError(f"sequence mode '2d': outer is {outer!r}; {suggest(str(outer), ('ring', 'gather'))}")
    if outer == "ring" and (parts is not None or keep):
        raise ValueError(
            "sequence mode '2d': parts and keep are of outer='gather', but outer is 'ring'; leave them out"
        )
    _check_fetching("2d", parts, keep)
    groups = size // ulysses
    between = _around("ring", groups) if outer == "ring" else ()
    return Split(axes=(("ring", groups), ("ulysses", ulysses)), declare=(*_over_tokens(size), *between))


def _over_tokens(size: int) -> tuple[tuple[str, ...], ...]:
    """Return the product of axes whose ranks have different tokens; gradients are averaged over it."""
    return (("data", "sequence"),) if size > 1 else ()


def _around(axis: str, size: int) -> tuple[Channels, ...]:
    """Return the communicators of a ring: one for keys and values, one for their gradients, which follow them."""
    return (Channels(axis, 2),) if size > 1 else ()


def _check_split(mode: str, split: object) -> None:
    if split not in SPLITS:
        raise ValueError(f"sequence mode {mode!r}: split is {split!r}; {suggest(str(split), SPLITS)}")


def _check_fetching(mode: str, parts: object, keep: object) -> None:
    if parts is not None and (isinstance(parts, bool) or not isinstance(parts, int) or parts < 1):
        raise ValueError(f"sequence mode {mode!r}: parts is {parts!r}; it must be a whole number of at least 1")
    if not isinstance(keep, bool):
        raise ValueError(f"sequence mode {mode!r}: keep is {keep!r}; it must be True or False")


def _root(mode: str, rule: str, size: int, factor: int, power: int) -> int:
    """Return the q of size = factor * q**power, or raise an error that names valid sizes."""
    q: int = round((size / factor) ** (1 / power))
    if factor * q**power == size:
        return q
    below, above = factor * max(q - 1, 1) ** power, factor * (q + 1) ** power
    nearest = sorted({below, factor * max(q, 1) ** power, above}, key=lambda choice: abs(choice - size))
    choices = " or ".join(str(choice) for choice in sorted(nearest[:2]))
    raise ValueError(f"mode {mode!r} needs {rule} ranks, but the size is {size}; use {choices}")
