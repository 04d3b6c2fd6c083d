"""The product over a square of ranks: SUMMA, for the modes 2d and 2.5d.

Rank (row i, col j) holds block X[i, j] of the activations (tokens by row, features by col) and block W[j, i] of the
weight [N, K] (N by col, K by row). Every block of K is broadcast in turn, while the one before is multiplied.

Source: van de Geijn and Watts 1997 (SUMMA); Xu et al. 2021 (arXiv:2104.05343); Wang et al. 2021 (arXiv:2105.14500).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from par_groups import WeightGradHook, WeightGradient

from .arithmetic import LinearFunction, refuse
from .product_1d import save_operands


@dataclass(frozen=True)
class Summa:
    """The product on a square of q x q ranks.

    Args:
        along_row: The group over "col": the ranks of this row, which share tokens.
        along_col: The group over "row": the ranks of this column, which share the output features.
    """

    along_row: dist.ProcessGroup
    along_col: dist.ProcessGroup

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        hook: WeightGradHook | None,
        linear: LinearFunction | None = None,
    ) -> Tensor:
        """Multiply [B/q, ..., K/q] by [N/q, K/q]; return [B/q, ..., N/q]."""
        refuse(linear, "2d or 2.5d")
        product: Tensor = _SummaMatmul.apply(x, weight, self, hook)  # type: ignore[no-untyped-call]
        return product if bias is None else product + bias

    @property
    def q(self) -> int:
        """Ranks on a side of the square."""
        return self.along_row.size()

    def blocks(self, x: Tensor, weight: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Block k of K, of both operands, for every k; the next one's broadcasts are in flight during this one's use.

        Yields:
            k, X[i, k] of this row (broadcast over "col" from col k), W[j, k] of this column (over "row" from row k).
        """
        started = self._start(0, x, weight)
        for k in range(self.q):
            blocks, works = started
            # The next blocks are broadcast while this one is multiplied; two blocks are in memory at a time.
            if k + 1 < self.q:
                started = self._start(k + 1, x, weight)
            for work in works:
                work.wait()
            yield k, *blocks

    def _start(self, k: int, x: Tensor, weight: Tensor) -> tuple[tuple[Tensor, Tensor], list[dist.Work]]:
        x_block, x_work = _start_broadcast(x, k, self.along_row)
        w_block, w_work = _start_broadcast(weight, k, self.along_col)
        return (x_block, w_block), [x_work, w_work]


class _SummaMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, square: Summa, hook: WeightGradHook | None) -> Tensor:
        ctx.square, ctx.hook = square, hook
        save_operands(ctx, x, weight)
        tokens = x.flatten(0, -2)
        # The blocks of K add up in place, in the same order on all ranks.
        product = x.new_zeros(tokens.shape[0], weight.shape[0])
        for _, x_block, w_block in square.blocks(tokens, weight):
            product.addmm_(x_block, w_block.t())
        shaped: Tensor = product.unflatten(0, x.shape[:-1])
        return shaped

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        upstream, square = gradient.flatten(0, -2), ctx.square
        of_x = of_weight = None
        # Each gradient needs the other operand's blocks. Together they share one loop, whose broadcasts overlap with
        # both matmuls.
        # With a hook, the weight gradient is computed later, so both gradients cannot share a loop.
        if needs_x and needs_weight and ctx.hook is None:
            of_x, of_weight = _both_gradients(x.flatten(0, -2), weight, upstream, square)
        elif needs_x:
            of_x = _input_gradient(weight, upstream, square)
        elif needs_weight and ctx.hook is None:
            of_weight = _weight_gradient(x.flatten(0, -2), upstream, square)
        if needs_weight and ctx.hook is not None:
            ctx.hook(WeightGradient(weight, lambda: _weight_gradient(x.flatten(0, -2), upstream, square)))
        return None if of_x is None else of_x.unflatten(0, gradient.shape[:-1]), of_weight, None, None


def _both_gradients(x: Tensor, weight: Tensor, gradient: Tensor, square: Summa) -> tuple[Tensor, Tensor]:
    """Return the gradients of the input and of the weight.

    dX[i, k] is the sum over "col" of dY[i, j] W[j, k]; dW[j, k] is the sum over "row" of dY[i, j].T X[i, k].
    """
    of_x, of_weight = _SummaReduction(square.along_row), _SummaReduction(square.along_col)
    for k, x_block, w_block in square.blocks(x, weight):
        of_x.start(gradient @ w_block, k)
        of_weight.start(gradient.t() @ x_block, k)
    return of_x.finish(), of_weight.finish()


def _input_gradient(weight: Tensor, gradient: Tensor, square: Summa) -> Tensor:
    of_x = _SummaReduction(square.along_row)
    for k in range(square.q):
        w_block, work = _start_broadcast(weight, k, square.along_col)
        work.wait()
        of_x.start(gradient @ w_block, k)
    return of_x.finish()


def _weight_gradient(x: Tensor, gradient: Tensor, square: Summa) -> Tensor:
    of_weight = _SummaReduction(square.along_col)
    for k in range(square.q):
        x_block, work = _start_broadcast(x, k, square.along_row)
        work.wait()
        of_weight.start(gradient.t() @ x_block, k)
    return of_weight.finish()


class _SummaReduction:
    """Partial sums for every member of a group; each keeps the sum that is its own.

    Two reductions at most are in flight, so that the partial sums in memory do not grow with the group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._works: list[dist.Work] = []
        self._mine: Tensor | None = None

    def start(self, partial: Tensor, member: int) -> None:
        """Start to sum `partial` on the group's rank `member`, after the oldest reduction if two are in flight."""
        # Each reduction keeps its partial sum in memory until it ends.
        if len(self._works) > 1:
            self._works.pop(0).wait()
        root = dist.get_global_rank(self._group, member)
        work = dist.reduce(partial, root, group=self._group, async_op=True)  # sum, at the root alone
        if work is not None:
            self._works.append(work)
        # The reduction writes the sum into the root's own tensor.
        if member == dist.get_rank(self._group):
            self._mine = partial

    def finish(self) -> Tensor:
        """Wait for all, and return this rank's sum."""
        for work in self._works:
            work.wait()
        if self._mine is None:
            raise RuntimeError("no sum was started for this rank; a bug of par-layers")
        return self._mine


def _start_broadcast(x: Tensor, member: int, group: dist.ProcessGroup) -> tuple[Tensor, dist.Work]:
    """Broadcast over `group` from its rank `member`.

    For a GPU's tensor, gloo writes the sent values back into the tensor. `.data` prevents that autograd, which may have
    saved the tensor, counts this write as a change.
    """
    own = member == dist.get_rank(group)
    block = x.contiguous().data if own else torch.empty_like(x, memory_format=torch.contiguous_format)
    work = dist.broadcast(block, dist.get_global_rank(group, member), group=group, async_op=True)
    if work is None:
        raise RuntimeError(f"the broadcast of rank {member} gave no handle: this rank is not in its group")
    return block, work
