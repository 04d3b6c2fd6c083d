"""Shared experts: a feed-forward layer that every token goes to, beside those that a router chooses."""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..layers.linear import ParallelLinear, check_divides
from ..layers.parameter import Init, Rows
from ..modes.grid import Axes, Grid
from ..modes.layout import ActivationLayout
from ..modes.product_1d import local_product
from ..modes.rules import WeightSharding
from .products import Activation, activation_of


class SharedExperts(nn.Module):
    """A gated feed-forward layer, cut over the tensor group; what goes in was gathered, and the result is to be summed.

    The layers are called `gate_proj`, `up_proj` and `down_proj`; without a gate in the activation there are the latter
    two.

    Args:
        hidden: Features of a token.
        intermediate: Features of all shared experts together.
        activation: What is between the products.
        interleaved: Whether an activation of your own expects gate and up to alternate, feature by feature.
        axes: The axes of the tensor group.
        grid: This rank's place.
        init: How weights are filled; default: as torch.nn.Linear, uniform in +-1/sqrt(inputs).
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        activation: str | Activation,
        interleaved: bool,
        axes: Axes,
        grid: Grid,
        init: Init | None = None,
    ) -> None:
        super().__init__()
        check_divides(intermediate, axes, grid, "the features of all shared experts")
        self.activation = activation_of(activation, interleaved=interleaved)
        self._is_swiglu, self._interleaved = activation == "swiglu", interleaved
        outside, inside = ActivationLayout(), ActivationLayout(features=axes)
        linear = partial(ParallelLinear, bias=False, product=local_product, grid=grid, init=init)
        column = partial(linear, [Rows(length=intermediate, axes=axes)], hidden, cut=WeightSharding(rows=axes))
        if self.activation.gated:
            self.gate_proj = column(takes=outside, out=inside)
        self.up_proj = column(takes=outside, out=inside)
        row = WeightSharding(columns=axes)
        self.down_proj = linear([Rows(length=hidden)], intermediate, cut=row, takes=inside, out=outside)

    def forward(self, x: Tensor) -> Tensor:
        """From tokens [..., h] to this rank's part of the sum over the tensor group, [..., h]."""
        inner = self.up_proj(x)
        if self._is_swiglu:
            inner = functional.silu(self.gate_proj(x)) * inner
        else:
            rows = inner.flatten(0, -2)
            if self.activation.gated:
                parts = (self.gate_proj(x).flatten(0, -2), rows)
                rows = torch.stack(parts, -1).flatten(-2) if self._interleaved else torch.cat(parts, -1)
            inner = self.activation.forward(rows).view(inner.shape)
        summand: Tensor = self.down_proj(inner)
        return summand


def gate_of_shared(hidden: int, sum_over: Axes, grid: Grid, init: Init | None = None) -> ParallelLinear:
    """The layer whose sigmoid multiplies what shared experts give to a token, [..., h] to [..., 1].

    Args:
        hidden: Features of a token.
        sum_over: The axes over which its gradient is partial.
        grid: This rank's place.
        init: How its weight is filled; default: as torch.nn.Linear.
    """
    return ParallelLinear(
        [Rows(length=1)],
        hidden,
        False,
        cut=WeightSharding(sum_over=sum_over),
        takes=ActivationLayout(),
        out=ActivationLayout(),
        product=local_product,
        grid=grid,
        init=init,
    )
