"""All-reduce in two levels, which sends one node-local sum per element between nodes."""

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
    """Process groups of this rank for a two-level all-reduce.

    Args:
        local: Ranks of the same node.
        node: Ranks with the same local index, one per node.
    """

    local: dist.ProcessGroup
    node: dist.ProcessGroup

    @torch.no_grad()
    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of x over all ranks of all nodes; any shape."""
        flat = functional.pad(x.flatten(), (0, -x.numel() % self.local.size()))
        part = reduce_scatter_to(flat, self.local, 0)  # [n / local]
        part = reduce_from(part, self.node)  # all-reduce; the same shape
        total = gather_from(part, self.local, 0)  # all-gather
        return total[: x.numel()].view(x.shape)

    def copy_to(self, x: Tensor) -> Tensor:
        """Return x before a column layer; backward all-reduces the gradient."""
        copied: Tensor = _CopyTo.apply(x, self)  # type: ignore[no-untyped-call]
        return copied

    def sum_from(self, x: Tensor) -> Tensor:
        """All-reduce partial sums of a row layer; backward is the identity."""
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
