"""Differentiable gather and sum over the ranks of a sequence. Autograd graphs store only the group's name."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._collectives import finish
from .._torch_private import functional_collectives, group_of_name


def all_sum(x: Tensor, group: str) -> Tensor:
    """All-reduce a sum; backward: all-reduce of the gradients.

    Args:
        x: This rank's part of the sum.
        group: Name of the group.
    """
    result: Tensor = _SumOverRanks.apply(x, group)  # type: ignore[no-untyped-call]
    return result


def all_tokens(x: Tensor, home: Tensor, dim: int, group: str) -> Tensor:
    """All-gather the tokens of all ranks in the order of the sequence; backward: reduce-scatter.

    Args:
        x: This rank's tokens along `dim`.
        home: Index of each token of the sequence in the concatenation of all ranks' tokens, int64 [length].
        dim: Dim of the tokens.
        group: Name of the group.
    """
    result: Tensor = _AllTokens.apply(x, home, dim, group)  # type: ignore[no-untyped-call]
    return result


def all_highest(x: Tensor, group: str) -> Tensor:
    """Return the maximum over the ranks, without a gradient.

    Args:
        x: This rank's value.
        group: Name of the group.
    """
    return finish(functional_collectives.all_reduce.default(x, "max", group))


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return _summed(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _summed(gradient, ctx.group), None


def _summed(x: Tensor, group: str) -> Tensor:
    return finish(functional_collectives.all_reduce.default(x.contiguous(), "sum", group))


class _AllTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, home: Tensor, dim: int, group: str) -> Tensor:
        ranks = group_of_name(group).size()
        mine = x.movedim(dim, 0).contiguous()  # [s, ...]
        everything = mine.new_empty((ranks * len(mine), *mine.shape[1:]))
        gather = functional_collectives.all_gather_into_tensor_out.default
        everything = finish(gather(mine, ranks, group, out=everything))
        ctx.save_for_backward(home)
        ctx.dim, ctx.group, ctx.padded = dim, group, len(everything)
        row: Tensor = everything.index_select(0, home).movedim(0, dim)
        return row

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (home,) = ctx.saved_tensors
        rows = gradient.movedim(ctx.dim, 0)
        everything = rows.new_zeros((ctx.padded, *rows.shape[1:]))
        # Padding has no gradient: its rows stay zero.
        everything[home] = rows
        reduce, ranks = functional_collectives.reduce_scatter_tensor.default, group_of_name(ctx.group).size()
        mine = finish(reduce(everything, "sum", ranks, ctx.group))
        return mine.movedim(0, ctx.dim), None, None, None
