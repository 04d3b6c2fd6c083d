"""Shared experts: a feed-forward layer that every token uses in addition to its routed experts."""

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
from .products import activation_of
from .selection import ExpertConfig


class SharedExperts(nn.Module):
    """Feed-forward layer that is sharded over the tensor group. It does not communicate.

    Its input is the gathered activation, and its output is this rank's summand of the sum over the tensor group. The
    submodules are `gate_proj` (only for gated activations), `up_proj` and `down_proj`.

    Args:
        hidden_size: Features of a token, h.
        intermediate_size: Features of all shared experts together.
        config: Options of the routed experts, of which `activation` and `interleaved` are used.
        axes: Axes of the tensor group.
        grid: Coordinates of this rank.
        init: Init rule of the weights; default: torch.nn.Linear's, uniform in +-1/sqrt(inputs).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        config: ExpertConfig,
        axes: Axes,
        grid: Grid,
        init: Init | None = None,
    ) -> None:
        super().__init__()
        check_divides(intermediate_size, axes, grid, "the features of all shared experts")
        self.activation = activation_of(config.activation, interleaved=config.interleaved)
        self._is_swiglu, self._interleaved = config.activation == "swiglu", config.interleaved
        outside, inside = ActivationLayout(), ActivationLayout(features=axes)
        linear = partial(ParallelLinear, bias=False, product=local_product, grid=grid, init=init)
        column = partial(
            linear, [Rows(length=intermediate_size, axes=axes)], hidden_size, cut=WeightSharding(rows=axes)
        )
        if self.activation.gated:
            self.gate_proj = column(takes=outside, out=inside)
        self.up_proj = column(takes=outside, out=inside)
        row = WeightSharding(columns=axes)
        self.down_proj = linear([Rows(length=hidden_size)], intermediate_size, cut=row, takes=inside, out=outside)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's summand of the sum over the tensor group, [..., h], for tokens [..., h]."""
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


def gate_of_shared(hidden_size: int, sum_over: Axes, grid: Grid, init: Init | None = None) -> ParallelLinear:
    """Return the linear layer whose sigmoid is the weight of the shared experts' output, [..., h] to [..., 1].

    Args:
        hidden_size: Features of a token, h.
        sum_over: Axes over which its gradient is a partial sum.
        grid: Coordinates of this rank.
        init: Init rule of its weight; default: torch.nn.Linear's.
    """
    return ParallelLinear(
        [Rows(length=1)],
        hidden_size,
        False,
        cut=WeightSharding(sum_over=sum_over),
        takes=ActivationLayout(),
        out=ActivationLayout(),
        product=local_product,
        grid=grid,
        init=init,
    )
