"""Column and row layers of the mode, as in Megatron, with a two-level all-reduce."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from par_layers import ActivationLayout, ModeRules, WeightSharding, gather_from

from .two_levels import TwoLevels

multiply = ModeRules().column_product
"""Matmul of one device; it applies hooks and replacements of torch's linear."""


def new_mode_layers(grid: Any, **_: object) -> ModeRules:
    """Build the sharding rules and the two matmuls of the mode.

    Args:
        grid: Position of this rank on the axes, and its process groups.
        **_: Options of the mode; unused, because the topology already has the axes.
    """
    levels = TwoLevels(local=grid.group(("local",)), node=grid.group(("node",)))
    axes = ("node", "local")
    both = grid.group(axes)
    column = Column(levels)
    return ModeRules(
        inner=ActivationLayout(features=axes),
        column=WeightSharding(rows=axes),
        row=WeightSharding(columns=axes),
        column_product=column,
        row_product=Row(levels),
        to_residual=lambda y: gather_from(y, both, -1),
        vocabulary=axes,
        tied_product=column,
    )


@dataclass(frozen=True)
class Column:
    """Matmul of a column layer: full features in, sharded features out."""

    levels: TwoLevels

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        hook: Any,
        linear: Any = None,
    ) -> Tensor:
        """Multiply x [..., K] by weight [N/p, K]; return [..., N/p]."""
        return multiply(self.levels.copy_to(x), weight, bias, hook, linear)


@dataclass(frozen=True)
class Row:
    """Matmul of a row layer: sharded features in, summed features out."""

    levels: TwoLevels

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        hook: Any,
        linear: Any = None,
    ) -> Tensor:
        """Multiply x [..., K/p] by weight [N, K/p]; return the sum [..., N]."""
        # The bias is added after the sum: before it, every rank would add it once.
        summed = self.levels.sum_from(multiply(x, weight, None, hook, linear))
        return summed if bias is None else summed + bias
