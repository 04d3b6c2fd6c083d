"""The layers of the mode: Megatron's column and row, with an all-reduce in two levels."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from par_layers import ActivationLayout, ModeRules, WeightSharding, gather_from

from .two_levels import TwoLevels

multiply = ModeRules().column_product
"""One device's product: it knows what to do with a hook, and with a function in the place of torch's."""


def new_mode_layers(grid: Any, **_: object) -> ModeRules:
    """Which axes cut what, and the two products.

    Args:
        grid: This rank's place on the axes, and its groups.
        **_: The options of the mode, which have served their purpose: the topology has the axes.
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
    """Whole x times the columns of this rank: features come out cut."""

    levels: TwoLevels

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, hook: Any, linear: Any = None) -> Tensor:
        """[..., K] and [N/p, K] to [..., N/p]."""
        return multiply(self.levels.copy_to(x), weight, bias, hook, linear)


@dataclass(frozen=True)
class Row:
    """x with cut features times the rows of this rank: partial sums, added up."""

    levels: TwoLevels

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, hook: Any, linear: Any = None) -> Tensor:
        """[..., K/p] and [N, K/p] to [..., N]; the bias is added once, after the sum."""
        summed = self.levels.sum_from(multiply(x, weight, None, hook, linear))
        return summed if bias is None else summed + bias
