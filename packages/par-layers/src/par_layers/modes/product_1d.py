"""Linear products over one axis: Megatron's column and row, with and without sequence parallelism.

Source: Shoeybi et al. 2019 (arXiv:1909.08053); sequence parallelism: Korthikanti et al. 2022 (arXiv:2205.05198).
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from par_groups import WeightGradHook, WeightGradient

from .._collectives import (
    all_gather_on,
    all_gather_to,
    copy_to,
    finish,
    finish_all_gather_on,
    may_overwrite,
    reduce_from,
    reduce_from_,
    reduce_scatter_to,
    start_all_gather,
    start_all_reduce_,
    start_reduce_scatter_on,
)
from .arithmetic import LinearFunction

SEQUENCE = 1
"""The dim of an activation that sequence parallelism cuts."""


def local_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, hook: WeightGradHook | None, linear: LinearFunction | None = None
) -> Tensor:
    """Compute the matmul of torch.nn.Linear, on one device or inside a sharded region."""
    if linear is not None:
        return linear(x, weight, bias)
    if hook is None:
        return functional.linear(x, weight, bias)
    product: Tensor = _LocalMatmul.apply(x, weight, bias, hook)  # type: ignore[no-untyped-call]
    return product


@dataclass(frozen=True)
class Column1D:
    """Column-parallel matmul: an input that is replicated, or split along the sequence; sharded output features.

    Args:
        group: The tensor group.
        sequence: Whether the input is split along the sequence.
    """

    group: dist.ProcessGroup
    sequence: bool

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        hook: WeightGradHook | None,
        linear: LinearFunction | None = None,
    ) -> Tensor:
        """Multiply [..., K] or [B, S/p, K] by [N/p, K]; return [..., N/p] or [B, S, N/p]."""
        if linear is not None:
            # The user's function needs plain tensors, so the communication is wrapped around it instead of fused into
            # one autograd function.
            whole = all_gather_to(x, self.group, SEQUENCE) if self.sequence else copy_to(x, self.group)
            return linear(whole, weight, bias)
        function = _SequenceColumn if self.sequence else _ColumnMatmul
        product: Tensor = function.apply(x, weight, bias, self.group, hook)  # type: ignore[no-untyped-call]
        return product


@dataclass(frozen=True)
class Row1D:
    """Row-parallel matmul: sharded input features; an output that is replicated, or split along the sequence.

    Args:
        group: The tensor group.
        sequence: Whether the output is split along the sequence.
    """

    group: dist.ProcessGroup
    sequence: bool

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        hook: WeightGradHook | None,
        linear: LinearFunction | None = None,
    ) -> Tensor:
        """Multiply [..., K/p] by [N, K/p]; return [..., N] or [B, S/p, N]. The bias is added once, after the sum."""
        partial = local_product(x, weight, None, hook, linear)
        if self.sequence:
            summed = reduce_scatter_to(partial, self.group, SEQUENCE)
        elif linear is None:
            summed = reduce_from_(partial, self.group)
        else:  # the user's function may have saved its result for backward, so that is not overwritten
            summed = reduce_from(partial, self.group)
        if bias is None:
            return summed
        # Each rank would add the bias to its partial sum, and it would count once per rank; so it is added after the
        # sum.
        return summed.add_(bias) if may_overwrite() else summed + bias


class _ColumnMatmul(torch.autograd.Function):
    """Backward: the all-reduce of the input gradient is in flight while the weight gradient is computed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup, hook: WeightGradHook | None
    ) -> Tensor:
        ctx.group, ctx.hook = group, hook
        save_operands(ctx, x, weight)
        return functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        rows = gradient.reshape(-1, gradient.shape[-1])
        # The input gradient is computed first, so that its all-reduce runs during the matmul of the weight gradient.
        summed = start_all_reduce_(rows.mm(weight), ctx.group) if needs_x else None
        of_weight = weight_gradient(rows, x, weight, ctx.hook) if needs_weight else None
        of_bias = rows.sum(0) if needs_bias else None
        of_x = None if summed is None else summed().view(*gradient.shape[:-1], weight.shape[1])
        return of_x, of_weight, of_bias, None, None


class _SequenceColumn(torch.autograd.Function):
    """Only the cut input is saved; backward gathers it again, while the input gradient is computed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: dist.ProcessGroup, hook: WeightGradHook | None
    ) -> Tensor:
        ctx.group, ctx.hook = group, hook
        save_operands(ctx, x, weight)
        return functional.linear(all_gather_on(x, group, SEQUENCE), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # Saving the gathered input would cost p times the memory, and this gather hides behind the input gradient.
        gathering = start_all_gather(x, ctx.group) if needs_weight else None
        scattering = start_reduce_scatter_on(gradient @ weight, ctx.group, SEQUENCE) if needs_x else None
        of_weight = None
        if gathering is not None:
            whole = finish_all_gather_on(gathering, ctx.group, SEQUENCE)
            of_weight = weight_gradient(gradient, whole, weight, ctx.hook)
        of_bias = bias_gradient(gradient) if needs_bias else None
        return None if scattering is None else finish(scattering), of_weight, of_bias, None, None


class _LocalMatmul(torch.autograd.Function):
    """The plain product, whose weight gradient is left to a hook."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, hook: WeightGradHook) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.hook = hook
        return functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        of_x = gradient @ weight if needs_x else None
        of_weight = weight_gradient(gradient, x, weight, ctx.hook) if needs_weight else None
        return of_x, of_weight, bias_gradient(gradient) if needs_bias else None, None


def save_operands(ctx: Any, x: Tensor, weight: Tensor) -> None:
    """Save what the backward of a product needs of its operands: with a frozen weight, not x.

    Args:
        ctx: The context of an autograd function whose first two inputs are the operands; `ctx.hook` is set.
        x: The activations.
        weight: The weight.
    """
    needs_x, needs_weight = ctx.needs_input_grad[:2]
    # A frozen weight, as under LoRA, needs no input for its gradient; not saving it is most of the memory of such
    # layers.
    ctx.save_for_backward(x if needs_weight else None, weight if needs_x or ctx.hook is not None else None)


def weight_gradient(gradient: Tensor, x: Tensor, weight: Tensor, hook: WeightGradHook | None) -> Tensor | None:
    """Return the weight gradient [N, K] from [..., N] and [..., K]; None if the hook receives it for later."""
    left, right = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
    if hook is None:
        return left.t().mm(right)
    hook(WeightGradient(weight, lambda: left.t().mm(right), (left, right)))
    return None


def bias_gradient(gradient: Tensor) -> Tensor:
    """Return the bias gradient [N] from [..., N]."""
    return gradient.reshape(-1, gradient.shape[-1]).sum(0)
