"""An all-reduce in two levels: between nodes travels only what one rank of each node has summed."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from par_layers import gather_from, reduce_from, reduce_scatter_to


@dataclass(frozen=True)
class TwoLevels:
    """The groups of a rank.

    Args:
        local: The ranks of its node.
        node: The ranks in its place on all nodes.
    """

    local: dist.ProcessGroup
    node: dist.ProcessGroup

    @torch.no_grad()
    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks of all nodes; any shape."""
        flat = functional.pad(x.flatten(), (0, -x.numel() % self.local.size()))
        part = reduce_scatter_to(flat, self.local, 0)  # [n / local]
        part = reduce_from(part, self.node)  # all-reduce; the same shape
        return gather_from(part, self.local, 0)[: x.numel()].view(x.shape)  # all-gather

    def copy_to(self, x: Tensor) -> Tensor:
        """Identity; backward: all-reduce. Where whole activations enter a cut region."""
        copied: Tensor = _CopyTo.apply(x, self)  # type: ignore[no-untyped-call]
        return copied

    def sum_from(self, x: Tensor) -> Tensor:
        """All-reduce; backward: identity. Where a cut region ends in partial sums."""
        summed: Tensor = _SumFrom.apply(x, self)  # type: ignore[no-untyped-call]
        return summed


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, levels: TwoLevels) -> Tensor:
        ctx.levels = levels
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.levels.all_reduce(gradient), None


class _SumFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, levels: TwoLevels) -> Tensor:
        del ctx
        return levels.all_reduce(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        del ctx
        return gradient, None
