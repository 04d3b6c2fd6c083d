"""Linear products and losses of mode 1d whose bits do not depend on the number of tensor ranks.

A weight consists of **lanes**: blocks of rows of a column-parallel weight, and of columns of a row-parallel one. Each
lane is multiplied alone, in one shape on every topology, and sums over lanes are added in a fixed binary tree. A rank
holds adjacent lanes that are one subtree, so that it adds them first and the ranks' sums afterwards.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from par_groups import LaneCounts, WeightGradHook, WeightGradient, tree

from .._collectives import (
    all_gather_on,
    all_to_all,
    finish,
    finish_all_gather_on,
    gather_from,
    start_all_gather,
    start_all_reduce,
    start_tree_all_reduce,
    start_tree_reduce_scatter_on,
    tree_reduce_from,
    tree_reduce_scatter_to,
)
from .arithmetic import LinearFunction
from .chunks import ChunkedParameters, ChunkSums
from .grid import Axes, Grid
from .layout import ActivationLayout
from .product_1d import SEQUENCE, save_operands
from .rules import ModeRules, WeightSharding
from .token_losses import LossOptions, losses_of_cut_vocabulary

WIDTH = 32
"""Number that the features of a lane must divide by.

Vectorized functions such as SiLU and exp have other bits in the last, incomplete vector of a tensor. With lanes of full
vectors no element is in one, wherever a rank's features end.
"""


HEAD = 8
"""Number that the features of a head must divide by: for others, torch's attention has bits that depend on heads."""


def rules_in_lanes(mode: str | None, grid: Grid, options: dict[str, Any], lanes: LaneCounts) -> ModeRules:
    """Return the rules of mode 1d, or of one device, for weights in lanes.

    Args:
        mode: "1d", or None for one device.
        grid: This rank's coordinates.
        options: Options of the mode.
        lanes: Numbers of lanes.

    Raises:
        ValueError: The mode has no products in lanes.
    """
    if mode not in (None, "1d"):
        raise ValueError(
            f"mode={mode!r} with numerics='canonical': it divides sums whose order no other topology has; use mode='1d'"
        )
    axes: Axes = grid.larger(grid.tensor_axes)
    group = grid.group(axes) if axes else None
    here = lanes.tensor // grid.size(axes)
    sequence = bool(options.get("sequence_parallel", False)) and group is not None
    column, row = LaneColumn(group, here, sequence), LaneRow(group, here, sequence)

    def to_residual(y: Tensor) -> Tensor:
        if group is None:
            return y
        return all_to_all(y, group, SEQUENCE, -1) if sequence else gather_from(y, group, -1)

    return ModeRules(
        residual=ActivationLayout(sequence=axes if sequence else ()),
        inner=ActivationLayout(features=axes),
        column=WeightSharding(rows=axes),
        row=WeightSharding(columns=axes),
        column_product=column,
        row_product=row,
        to_residual=to_residual,
        vocabulary=axes,
        tied_product=column,
        token_losses=LaneLosses(group, lanes.tensor),
        of_runs=lambda product, runs: replace(product, runs=runs),
        token_parameters=ChunkedParameters(row.sums),
        lanes=lanes,
    )


@dataclass(frozen=True)
class LaneColumn:
    """Column-parallel matmul in lanes of output features.

    Args:
        group: The tensor group; None for one rank.
        lanes: Number of lanes on this rank.
        sequence: Whether the input is split along the sequence.
        runs: Numbers of local output features that are sharded separately; () for one run. A lane has a part of each.
    """

    group: dist.ProcessGroup | None
    lanes: int
    sequence: bool
    runs: tuple[int, ...] = ()

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        hook: WeightGradHook | None,
        linear: LinearFunction | None = None,
    ) -> Tensor:
        """Multiply [..., K] or [B, S/p, K] by [N/p, K]; return [..., N/p] or [B, S, N/p]."""
        _check_torch(linear)
        product: Tensor = _LaneColumnMatmul.apply(x, weight, bias, self, hook)  # type: ignore[no-untyped-call]
        return product

    def gather(self, x: Tensor) -> Tensor:
        """Return the full input."""
        return all_gather_on(x, self.group, SEQUENCE) if self.sequence and self.group is not None else x

    def blocks(self, x: Tensor, dim: int) -> list[list[Tensor]]:
        """Return the blocks of a tensor whose dim is the local output features: for each run, those of each lane."""
        runs = x.split(self.runs, dim) if self.runs else (x,)
        # Contiguous copies, since a library may choose another kernel for another stride.
        return [[block.contiguous() for block in run.chunk(self.lanes, dim)] for run in runs]


class _LaneColumnMatmul(torch.autograd.Function):
    """Backward: the tree over the ranks is under way while the weight gradient is computed."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, product: LaneColumn, hook: WeightGradHook | None
    ) -> Tensor:
        ctx.product, ctx.hook = product, hook
        save_operands(ctx, x, weight)
        whole = product.gather(x)
        rows = whole.reshape(-1, whole.shape[-1])
        y = torch.cat([rows.mm(block.t()) for run in product.blocks(weight, 0) for block in run], 1)
        # A bias inside the matmul would be rounded with it, in kernels that differ.
        y = y if bias is None else y.add_(bias)
        return y.view(*whole.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        product: LaneColumn = ctx.product
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        pieces = product.blocks(gradient.reshape(-1, gradient.shape[-1]), 1)
        group = product.group
        gathering = start_all_gather(x, group) if needs_weight and product.sequence and group is not None else None
        summing = None
        if needs_x:
            pairs = zip(pieces, product.blocks(weight, 0), strict=True)
            by_run = [[d.mm(w) for d, w in zip(*run, strict=True)] for run in pairs]
            # The tree over lanes is outermost, because its upper nodes are on several ranks.
            partial = tree([tree(of_lane) for of_lane in zip(*by_run, strict=True)]).view(*gradient.shape[:-1], -1)
            if group is None:
                summing = lambda: partial  # noqa: E731
            elif product.sequence:
                summing = start_tree_reduce_scatter_on(partial, group, SEQUENCE)
            else:
                summing = start_tree_all_reduce(partial, group)
        of_weight = None
        if needs_weight:
            whole = x if gathering is None or group is None else finish_all_gather_on(gathering, group, SEQUENCE)
            rows = whole.reshape(-1, whole.shape[-1])
            of_weight = _weight_gradient(
                weight, lambda: torch.cat([d.t().mm(rows) for run in pieces for d in run]), ctx.hook
            )
        of_bias = torch.cat([d.sum(0) for run in pieces for d in run]) if needs_bias else None
        return None if summing is None else summing(), of_weight, of_bias, None, None


@dataclass(frozen=True)
class LaneRow:
    """Row-parallel matmul in lanes of input features.

    Args:
        group: The tensor group; None for one rank.
        lanes: Number of lanes on this rank.
        sequence: Whether the output is split along the sequence.
    """

    group: dist.ProcessGroup | None
    lanes: int
    sequence: bool

    @property
    def sums(self) -> ChunkSums:
        """Sums of the gradient of the bias, which all ranks add to full features, perhaps of their own tokens."""
        # As many chunks of a sequence as tensor lanes, since every number of tensor ranks may split it.
        ranks = 1 if self.group is None or self.sequence else self.group.size()
        return ChunkSums(self.lanes * ranks, cut=self.sequence)

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        hook: WeightGradHook | None,
        linear: LinearFunction | None = None,
    ) -> Tensor:
        """Multiply [..., K/p] by [N, K/p]; return [..., N] or [B, S/p, N]. The bias is added once, after the sum."""
        _check_torch(linear)
        y: Tensor = _LaneRowMatmul.apply(x, weight, self.lanes, hook)  # type: ignore[no-untyped-call]
        if self.group is not None and self.sequence:
            y = tree_reduce_scatter_to(y, self.group, SEQUENCE)
        elif self.group is not None:
            y = tree_reduce_from(y, self.group)
        return y if bias is None else self.sums.scale(y, None, bias)


class _LaneRowMatmul(torch.autograd.Function):
    """The sum of the products of this rank's lanes, which is one term of the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, lanes: int, hook: WeightGradHook | None) -> Tensor:
        ctx.lanes, ctx.hook = lanes, hook
        save_operands(ctx, x, weight)
        pairs = zip(_columns(x, lanes), _columns(weight, lanes), strict=True)
        return tree([part.mm(block.t()) for part, block in pairs]).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = torch.cat([rows.mm(block) for block in _columns(weight, ctx.lanes)], 1).view(
                *gradient.shape[:-1], -1
            )
        if ctx.needs_input_grad[1]:
            of_weight = _weight_gradient(
                weight, lambda: torch.cat([rows.t().mm(part) for part in _columns(x, ctx.lanes)], 1), ctx.hook
            )
        return of_x, of_weight, None, None


@dataclass(frozen=True)
class LaneLosses:
    """Losses of tokens, whose sums over the vocabulary are trees of its lanes; see `TokenLosses`.

    Args:
        group: The tensor group; None for one rank.
        lanes: Number of lanes on all ranks.
    """

    group: dist.ProcessGroup | None
    lanes: int

    def __call__(self, logits: Tensor, target: Tensor, grid: Grid, axes: Axes, options: LossOptions) -> Tensor:
        """Return the losses of tokens, from full or sharded logits."""
        ranks = options.classes // logits.shape[-1]
        sums = LaneSums(self.group if ranks > 1 else None, self.lanes // ranks)
        return losses_of_cut_vocabulary(logits, target, sums, grid.index(axes) if ranks > 1 else 0, options)


@dataclass(frozen=True)
class LaneSums:
    """Reductions over a vocabulary in lanes.

    Args:
        group: The ranks that shard the vocabulary; None for full logits.
        lanes: Number of lanes on this rank.
    """

    group: dist.ProcessGroup | None
    lanes: int

    def maximum(self, highest: Tensor) -> Tensor:
        """Return the maximum over the ranks, which has no rounding."""
        return highest if self.group is None else finish(start_all_reduce(highest, self.group, "max"))

    def of_rows(self, x: Tensor) -> Tensor:
        """Return the tree of the row sums of the lanes."""
        return tree([lane.contiguous().sum(-1) for lane in x.chunk(self.lanes, -1)])

    def over_ranks(self, partial: Tensor) -> Tensor:
        """Return the tree of the ranks' sums."""
        return partial if self.group is None else start_tree_all_reduce(partial, self.group)()


def check_lanes(length: int, lanes: int, what: str) -> None:
    """Check that sharded features consist of lanes of full vectors.

    Args:
        length: Number of features over all ranks.
        lanes: Number of lanes over all ranks; 1 for features without lanes.
        what: Description of the features, for the message.

    Raises:
        ValueError: The features do not divide.
    """
    unit = lanes * WIDTH
    if lanes > 1 and length % unit:
        raise ValueError(
            f"{what} is {length}, which does not divide into {lanes} lanes of a multiple of {WIDTH} features; use "
            f"{-(-length // unit) * unit}, or fewer tensor lanes"
        )


def check_head(features: int, lanes: int) -> None:
    """Check that the bits of an attention's backward do not depend on its number of heads.

    Args:
        features: Features of a head.
        lanes: Number of lanes over all ranks; 1 for features without lanes.

    Raises:
        ValueError: Heads have another size than a multiple of 8.
    """
    if lanes > 1 and features % HEAD:
        raise ValueError(
            f"heads have {features} features: with tensor lanes, attention needs heads of a multiple of {HEAD} "
            f"features; use {-(-features // HEAD) * HEAD}"
        )


def _columns(x: Tensor, lanes: int) -> list[Tensor]:
    """Return contiguous blocks [rows, K/lanes] of [..., K]."""
    return [block.contiguous() for block in x.reshape(-1, x.shape[-1]).chunk(lanes, 1)]


def _weight_gradient(weight: Tensor, compute: Callable[[], Tensor], hook: WeightGradHook | None) -> Tensor | None:
    """Return the weight gradient; None if the hook receives it for later."""
    if hook is None:
        return compute()
    hook(WeightGradient(weight, compute))
    return None


def _check_torch(linear: LinearFunction | None) -> None:
    if linear is not None:
        raise ValueError(
            f"`linear` of this layer is {linear!r}, but numerics='canonical' multiplies lanes by torch's own matmul; "
            "set `linear` to None"
        )
