"""Rules of the built-in modes 1d, 2d, 2.5d and 3d, with one function for each mode."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor

from par_groups import Registry

from .._collectives import all_to_all, exchange, gather_from
from .cube import Cube
from .grid import Axes, Grid
from .layout import ActivationLayout
from .product_1d import SEQUENCE, Column1D, Row1D
from .rules import ModeRules, WeightSharding
from .summa import Summa

RulesFunction = Callable[..., ModeRules]

LAYER_SETS: Registry[RulesFunction] = Registry("layer set", "par_layers.layer_sets")


def register_layer_set(name: str) -> Callable[[RulesFunction], RulesFunction]:
    """Register the layers of a parallel mode, as a decorator of a function that returns its `ModeRules`.

    The function is called as `function(grid, **options)`, with this rank's `Grid` and the mode's options. Another
    package can provide it by an entry point in the group `par_layers.layer_sets`.

    Args:
        name: Name of the mode, as registered with par-groups.

    Raises:
        ValueError: The name is taken.

    Example:
        @register_layer_set("columns")
        def columns(grid: Grid) -> ModeRules:
            return ModeRules(column=WeightSharding(rows=grid.tensor_axes), ...)
    """

    def register(function: RulesFunction) -> RulesFunction:
        LAYER_SETS.register(name, function)
        return function

    return register


def rules_of(mode: str | None, grid: Grid, options: dict[str, Any]) -> ModeRules:
    """Return the rules of a mode, or the rules of one device if the tensor group has one rank.

    Args:
        mode: Name of the mode; None for one device.
        grid: This rank's coordinates.
        options: Options of the mode.

    Raises:
        ValueError: The mode is unknown, or does not support an option.
    """
    if mode is None or grid.groups is None:
        return ModeRules()
    function = LAYER_SETS[mode]
    signature = inspect.signature(function)
    try:
        signature.bind(grid, **options)
    except TypeError as error:
        raise ValueError(f"mode {mode!r} does not take the options {options}: {error}; it takes {signature}") from None
    # The options were checked above even for one rank, so that a wrong option fails on a laptop, too.
    return function(grid, **options) if grid.size(grid.tensor_axes) > 1 else ModeRules()


@register_layer_set("1d")
def _one_d(grid: Grid, *, sequence_parallel: bool = False, kv_heads: int | None = None) -> ModeRules:  # noqa: ARG001
    """Return the rules of mode 1d, a line of ranks as in Megatron; only the topology reads `kv_heads`."""
    axes = grid.tensor_axes
    group = grid.group(axes)
    column = Column1D(group, sequence_parallel)

    # The residual stream is equal on all ranks, and so is its gradient. That is why `gather_from` need not sum it.
    def to_residual(y: Tensor) -> Tensor:
        return all_to_all(y, group, SEQUENCE, -1) if sequence_parallel else gather_from(y, group, -1)

    return ModeRules(
        residual=ActivationLayout(sequence=axes if sequence_parallel else ()),
        inner=ActivationLayout(features=axes),
        column=WeightSharding(rows=axes),
        row=WeightSharding(columns=axes),
        column_product=column,
        row_product=Row1D(group, sequence_parallel),
        to_residual=to_residual,
        vocabulary=axes,
        tied_product=column,
    )


@register_layer_set("2d")
def _two_d(grid: Grid) -> ModeRules:
    return _square(grid, ())


@register_layer_set("2.5d")
def _two_and_a_half_d(grid: Grid, *, depth: int | None = None) -> ModeRules:  # noqa: ARG001 - the topology knows it
    return _square(grid, ("depth",))


def _square(grid: Grid, depth: Axes) -> ModeRules:
    """Return the rules of mode 2d, a square of rows and columns.

    With a depth, of several squares with different tokens.
    """
    layout = ActivationLayout(batch=(*depth, "row"), features=("col",))
    # Ranks of one row differ in their column, so the group along a row is the axis "col".
    product = Summa(along_row=grid.group(("col",)), along_col=grid.group(("row",)))
    # The squares along `depth` hold the same weights and see different tokens.
    cut = WeightSharding(rows=("col",), columns=("row",), sum_over=depth)
    q = grid.size(("col",))
    # A classifier multiplies by the transposed table, so the ranks (row, col) and (col, row) exchange their blocks.
    transposed = (grid.index(depth) * q + grid.rank_on("col")) * q + grid.rank_on("row")  # of the tensor group
    return ModeRules(
        residual=layout,
        inner=layout,
        column=cut,
        row=cut,
        column_product=product,
        row_product=product,
        vocabulary=("row",),
        tied=lambda table: exchange(table, grid.group(grid.tensor_axes), transposed),
        tied_product=product,
    )


@register_layer_set("3d")
def _three_d(grid: Grid) -> ModeRules:
    """Return the rules of mode 3d, a cube: columns change the layout, and rows change it back."""
    incoming, outgoing, weight = (grid.group((axis,)) for axis in ("input", "output", "weight"))
    d = grid.size(("weight",))
    o, i, w = (grid.rank_on(axis) for axis in ("output", "input", "weight"))
    cube = grid.group(("output", "input", "weight"))
    return ModeRules(
        residual=ActivationLayout(batch=("weight", "input"), features=("output",)),
        inner=ActivationLayout(batch=("weight", "output"), features=("input",)),
        # All three axes shard each weight, so no gradient is partial over an axis.
        column=WeightSharding(rows=("input",), columns=("output", "weight")),
        row=WeightSharding(rows=("output",), columns=("input", "weight")),
        column_product=Cube(gather=incoming, scatter=outgoing, weight=weight),
        row_product=Cube(gather=outgoing, scatter=incoming, weight=weight),
        # The inner layout has "input" and "output" swapped; a rank's activations therefore move to the rank with
        # swapped coordinates.
        to_residual=lambda y: exchange(y, cube, (i * d + o) * d + w),
        vocabulary=("input",),
        vocabulary_gathered=("weight",),
        # The embedding shards the rows of the table over "weight"; a linear layer shards its columns.
        tied_product=Cube(gather=incoming, scatter=outgoing, weight=weight, weight_dim=0),
    )
