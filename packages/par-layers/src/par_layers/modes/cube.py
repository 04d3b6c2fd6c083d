"""The product over a cube of ranks, for the mode 3d.

A column product gathers the activations over one axis and the weight over another, multiplies, and reduce-scatters over
the third. Row products are the same with "input" and "output" in each other's place. Only shards are saved.

Source: Bian et al. 2021 (arXiv:2105.14450), after Agarwal et al. 1995.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from par_groups import WeightGradHook, WeightGradient

from .._collectives import (
    finish,
    finish_all_gather_on,
    start_all_gather,
    start_reduce_scatter,
    start_reduce_scatter_on,
)
from .arithmetic import LinearFunction, refuse
from .product_1d import save_operands


@dataclass(frozen=True)
class Cube:
    """Matmul on a cube of d x d x d ranks.

    Args:
        gather: Group that splits the tokens of the input; the axis "input" for a column layer.
        scatter: Group that splits the tokens of the output; the axis "output" for a column layer.
        weight: Group that shards the weight a second time.
        weight_dim: Dim of the weight that is sharded a second time: 1 (K), or 0 (N) for an embedding table.
    """

    gather: dist.ProcessGroup
    scatter: dist.ProcessGroup
    weight: dist.ProcessGroup
    weight_dim: int = 1

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        hook: WeightGradHook | None,
        linear: LinearFunction | None = None,
    ) -> Tensor:
        """Multiply [B/d2, ..., K/d] by [N/d, K/d2]; return [B/d2, ..., N/d]."""
        refuse(linear, "3d")
        product: Tensor = _CubeMatmul.apply(x, weight, self, hook)  # type: ignore[no-untyped-call]
        return product if bias is None else product + bias


class _CubeMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, cube: Cube, hook: WeightGradHook | None) -> Tensor:
        ctx.cube, ctx.hook = cube, hook
        save_operands(ctx, x, weight)
        gathering_x = start_all_gather(x, cube.gather)  # [B/d, ..., K/d]
        # Both gathers are in flight together, over different communicators.
        gathering_weight = start_all_gather(weight, cube.weight)  # [N/d, K/d]
        whole_weight = finish_all_gather_on(gathering_weight, cube.weight, cube.weight_dim)
        partial = finish(gathering_x) @ whole_weight.t()  # a sum over `scatter` is still to come
        return finish(start_reduce_scatter(partial, cube.scatter))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Overlap the gather of x with the input gradient, and the reduce-scatter of that with the weight gradient."""
        x, weight = ctx.saved_tensors
        cube: Cube = ctx.cube
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        # All gathers are started before the first wait. They use different communicators, and each is needed as late as
        # possible.
        gathering_gradient = start_all_gather(gradient, cube.scatter)  # [B/d, ..., N/d]
        gathering_weight = start_all_gather(weight, cube.weight) if needs_x else None
        gathering_x = start_all_gather(x, cube.gather) if needs_weight and ctx.hook is None else None
        upstream = finish(gathering_gradient)
        scattering = of_weight = None
        if gathering_weight is not None:
            whole_weight = finish_all_gather_on(gathering_weight, cube.weight, cube.weight_dim)
            # The input gradient comes first, because its reduce-scatter can overlap with the weight gradient.
            scattering = start_reduce_scatter(upstream @ whole_weight, cube.gather)
        if gathering_x is not None:
            of_weight = _weight_gradient(gathering_x, upstream, cube)
        elif needs_weight:
            # The gather of x is part of the deferred computation: all ranks defer in the same order, so it stays
            # matched.
            ctx.hook(WeightGradient(weight, lambda: _weight_gradient(start_all_gather(x, cube.gather), upstream, cube)))
        return None if scattering is None else finish(scattering), of_weight, None, None


def _weight_gradient(gathering_x: Tensor, upstream: Tensor, cube: Cube) -> Tensor:
    """Return this rank's part of the weight gradient, [N/d, K/d], reduce-scattered over `weight`."""
    product = upstream.flatten(0, -2).t() @ finish(gathering_x).flatten(0, -2)
    return finish(start_reduce_scatter_on(product, cube.weight, cube.weight_dim))
