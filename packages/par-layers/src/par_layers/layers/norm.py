"""LayerNorm and RMSNorm over features that may be cut."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._collectives import finish, start_all_reduce
from ..modes.arithmetic import autocast_dtype
from ..modes.grid import Grid
from ..modes.layout import check_features
from ..modes.rules import ModeRules
from .linear import check_divides
from .parallel_layer import ParallelLayer
from .parameter import Rows, constant, make_parameter

_HALF = (torch.float16, torch.bfloat16)


class ParallelNorm(ParallelLayer):
    """Normalisation over features: LayerNorm with a mean, RMSNorm without. `LayerSet` makes it.

    Args:
        features: Features of the residual stream.
        rules: Rules of the mode; weights are sharded like the features of the residual stream.
        grid: Coordinates of this rank.
        mean: Whether the layer subtracts the mean and adds a bias.
        eps: Number that is added to the variance.
    """

    def __init__(self, features: int, rules: ModeRules, grid: Grid, *, mean: bool, eps: float) -> None:
        super().__init__()
        layout = rules.residual
        check_divides(features, layout.features, grid, "features")
        rows = [Rows(length=features, axes=layout.features)]
        self.features, self.eps, self._layout = features, eps, layout
        self.weight = make_parameter(rows, [], grid, constant(1.0), layout.tokens)
        self.bias = make_parameter(rows, [], grid, constant(0.0), layout.tokens) if mean else None
        self._mean, self._token_parameters = mean, rules.token_parameters
        self._group = grid.group(layout.features) if grid.size(layout.features) > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., features], perhaps sharded, in x's dtype; under autocast in fp32 at least."""
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        check_features(x, weight.shape[0], self._layout, "a norm")
        # torch's own norms do the same under autocast.
        if (x.dtype in _HALF or weight.dtype in _HALF) and autocast_dtype(x) is not None:
            x, weight, bias = x.float(), weight.float(), None if bias is None else bias.float()
        if self._group is None:
            return self._token_parameters.norm(x, weight, bias, eps=self.eps, mean=self._mean)
        normal: Tensor = _Normalise.apply(x, self._group, self.features, self.eps, self._mean)  # type: ignore[no-untyped-call]
        # Autograd computes the gradients of weight and bias; they are partial over the axes that split tokens.
        scaled = normal * weight
        return (scaled if bias is None else scaled + bias).to(x.dtype)  # weights may be wider

    def extra_repr(self) -> str:
        """Return the features, eps, and whether the layer subtracts the mean."""
        return f"{self.features}, eps={self.eps}, mean={self._mean}"


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) over features cut over a group.

    The sums take one all-reduce of a number a token each, the mean before the variance: the sum of squares of numbers
    far from zero would lose digits.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, features: int, eps: float, mean: bool) -> Tensor:
        wide = x.float() if x.dtype in _HALF else x
        if mean:
            wide = wide - _sum(wide, group) / features
        scale = torch.rsqrt(_sum(wide.square(), group) / features + eps)
        normal = (wide * scale).to(x.dtype)
        # Backward needs only the normalized values and one number per token, so x is not saved.
        ctx.save_for_backward(normal, scale)
        ctx.group, ctx.features, ctx.mean = group, features, mean
        return normal

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        """Compute dx = scale * (g - normal * mean(g * normal) - mean(g)); one all-reduce sums both means."""
        normal, scale = ctx.saved_tensors
        g = gradient.to(scale.dtype)
        along = [(g * normal).sum(-1)] + ([g.sum(-1)] if ctx.mean else [])
        means = finish(start_all_reduce(torch.stack(along), ctx.group)) / ctx.features
        result = g - normal * means[0].unsqueeze(-1)
        if ctx.mean:
            result = result - means[1].unsqueeze(-1)
        return (result * scale).to(gradient.dtype), None, None, None, None


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce the sum over the last dim, which stays as a dim of size 1."""
    return finish(start_all_reduce(x.sum(-1, keepdim=True), group))
