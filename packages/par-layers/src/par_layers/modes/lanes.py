"""Linear products and losses of mode 1d whose bits do not depend on the number of tensor ranks.

A weight consists of **lanes**: blocks of rows of a column-parallel weight, and of columns of a row-parallel one. Each
lane is multiplied alone, in one shape on every topology, and sums over lanes are added in a fixed binary tree. A rank
holds adjacent lanes that are one subtree, so that it adds them first and the ranks' sums afterwards.

A sequence consists of lanes, too, if ranks may split it: the rows of each are multiplied alone, and the gradients of
weights are exact sums over them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from par_groups import LaneCounts, WeightGradHook, WeightGradient, axis_size, exact_sum, on_grid, tree

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
    context_ranks = 1 if grid.topology is None else axis_size(grid.topology, "sequence")
    rows = SequenceLanes(lanes.sequence, lanes.sequence // context_ranks)
    column, row = LaneColumn(group, here, sequence, rows=rows), LaneRow(group, here, sequence, rows)

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
        # A lane has a part of each run, such as q, k and v, so the product needs the runs' local sizes.
        of_runs=lambda product, runs: replace(product, runs=runs),
        token_parameters=ChunkedParameters(row.sums),
        lanes=lanes,
    )


@dataclass(frozen=True)
class SequenceLanes:
    """Lanes of a sequence, as the ranks of a context hold them.

    Args:
        number: Number of lanes over all ranks; 1 for sequences that no rank splits.
        here: Number of lanes on this rank.
    """

    number: int
    here: int

    def blocks(self, x: Tensor) -> list[Tensor]:
        """Return the rows [rows, features] of each lane of activations [B, s, ..., features].

        Raises:
            ValueError: The activations have no sequence, or it does not divide into the lanes.
        """
        if self.number == 1:
            return [x.reshape(-1, x.shape[-1])]
        if x.dim() < 3 or x.shape[SEQUENCE] % self.here:
            raise ValueError(
                f"an activation of shape {list(x.shape)} does not consist of {self.here} lanes of a sequence, which is "
                "dim 1 of [batch, sequence, features]; pad the sequence, or use fewer sequence lanes"
            )
        return [lane.reshape(-1, x.shape[-1]) for lane in x.chunk(self.here, SEQUENCE)]

    def join(self, blocks: list[Tensor], like: Tensor) -> Tensor:
        """Return activations [B, s, ..., n] whose lanes have the rows of `blocks`, each [rows, n].

        Args:
            blocks: Rows of each lane.
            like: Activations with the same dims but the last.
        """
        if self.number == 1:
            return blocks[0].view(*like.shape[:-1], -1)
        shape = (like.shape[0], like.shape[SEQUENCE] // self.here, *like.shape[2:-1], -1)
        return torch.cat([block.view(shape) for block in blocks], SEQUENCE)

    def sum(self, gradients: list[Tensor]) -> Tensor:
        """Return the gradient of a parameter, of which each lane has a term, in fp64.

        It is exact, because autograd adds it to the gradients of other uses, and ranks of a sequence add it to theirs.
        """
        return on_grid(gradients[0]) if self.number == 1 else exact_sum(gradients)


WHOLE = SequenceLanes(1, 1)
"""A sequence that no rank splits, whose rows are multiplied together."""


@dataclass(frozen=True)
class LaneColumn:
    """Column-parallel matmul in lanes of output features.

    Args:
        group: The tensor group; None for one rank.
        lanes: Number of lanes on this rank.
        sequence: Whether the input is split along the sequence.
        runs: Numbers of local output features that are sharded separately; () for one run. A lane has a part of each.
        rows: Lanes of the sequence.
    """

    group: dist.ProcessGroup | None
    lanes: int
    sequence: bool
    runs: tuple[int, ...] = ()
    rows: SequenceLanes = WHOLE

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
        whole, blocks = product.gather(x), product.blocks(weight, 0)
        # The order of the features is that of the weight's rows: run by run, and lane by lane inside a run.
        lanes = [
            torch.cat([rows.mm(block.t()) for run in blocks for block in run], 1) for rows in product.rows.blocks(whole)
        ]
        # A bias inside the matmul would be rounded with it, in kernels that differ.
        return product.rows.join(lanes if bias is None else [lane.add_(bias) for lane in lanes], whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        product: LaneColumn = ctx.product
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        pieces = [product.blocks(rows, 1) for rows in product.rows.blocks(gradient)]
        group = product.group
        # The gather is in flight during the matmuls of the input gradient.
        gathering = start_all_gather(x, group) if needs_weight and product.sequence and group is not None else None
        summing = None
        if needs_x:
            blocks = product.blocks(weight, 0)
            sums = []
            for piece in pieces:
                # The input gradient is a sum over all output features, so over the runs and over the lanes.
                by_run = [[d.mm(w) for d, w in zip(*run, strict=True)] for run in zip(piece, blocks, strict=True)]
                # The tree over lanes is outermost, because its upper nodes are on several ranks.
                sums.append(tree([tree(of_lane) for of_lane in zip(*by_run, strict=True)]))
            partial = product.rows.join(sums, gradient)
            if group is None:
                summing = lambda: partial  # noqa: E731
            elif product.sequence:
                summing = start_tree_reduce_scatter_on(partial, group, SEQUENCE)
            else:
                summing = start_tree_all_reduce(partial, group)
        of_weight = None
        if needs_weight:
            whole = x if gathering is None or group is None else finish_all_gather_on(gathering, group, SEQUENCE)
            inputs = product.rows.blocks(whole)

            def compute() -> Tensor:
                pairs = zip(pieces, inputs, strict=True)
                return product.rows.sum([torch.cat([d.t().mm(x) for run in piece for d in run]) for piece, x in pairs])

            of_weight = _weight_gradient(weight, compute, ctx.hook)
        of_bias = None
        if needs_bias:
            of_bias = product.rows.sum([torch.cat([d.sum(0) for run in piece for d in run]) for piece in pieces])
        return None if summing is None else summing(), of_weight, of_bias, None, None


@dataclass(frozen=True)
class LaneRow:
    """Row-parallel matmul in lanes of input features.

    Args:
        group: The tensor group; None for one rank.
        lanes: Number of lanes on this rank.
        sequence: Whether the output is split along the sequence.
        rows: Lanes of the sequence.
    """

    group: dist.ProcessGroup | None
    lanes: int
    sequence: bool
    rows: SequenceLanes = WHOLE

    @property
    def sums(self) -> ChunkSums:
        """Sums of the gradient of the bias, which all ranks add to full features, perhaps of their own tokens."""
        # As many chunks of each lane of a sequence as tensor lanes, since every number of tensor ranks may split it.
        ranks = 1 if self.group is None or self.sequence else self.group.size()
        return ChunkSums(self.lanes * ranks * self.rows.here, cut=self.sequence or self.rows.number > 1)

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
        y: Tensor = _LaneRowMatmul.apply(x, weight, self, hook)  # type: ignore[no-untyped-call]
        # The lanes of this rank are one subtree, so the tree over the ranks continues their sum.
        if self.group is not None and self.sequence:
            y = tree_reduce_scatter_to(y, self.group, SEQUENCE)
        elif self.group is not None:
            y = tree_reduce_from(y, self.group)
        return y if bias is None else self.sums.scale(y, None, bias)


class _LaneRowMatmul(torch.autograd.Function):
    """The sum of the products of this rank's lanes, which is one term of the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, product: LaneRow, hook: WeightGradHook | None) -> Tensor:
        ctx.product, ctx.hook = product, hook
        save_operands(ctx, x, weight)
        sums = sums_on(x.device)
        return product.rows.join([sums(rows, weight, product.lanes) for rows in product.rows.blocks(x)], x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        product: LaneRow = ctx.product
        pieces = [rows.contiguous() for rows in product.rows.blocks(gradient)]
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            # Each lane has its own input features, so nothing is summed here.
            blocks = _columns(weight, product.lanes)
            of_x = product.rows.join([torch.cat([rows.mm(block) for block in blocks], 1) for rows in pieces], gradient)
        if ctx.needs_input_grad[1]:

            def compute() -> Tensor:
                pairs = zip(pieces, product.rows.blocks(x), strict=True)
                parts = [
                    torch.cat([rows.t().mm(part) for part in _columns(inputs, product.lanes)], 1)
                    for rows, inputs in pairs
                ]
                return product.rows.sum(parts)

            of_weight = _weight_gradient(weight, compute, ctx.hook)
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
        # With lanes no vocabulary is padded, because `check_lanes` requires that it divides.
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


def check_lanes(length: int, lanes: LaneCounts, what: str) -> None:
    """Check that sharded features consist of lanes of full vectors.

    Args:
        length: Number of features over all ranks.
        lanes: Numbers of lanes over all ranks.
        what: Description of the features, for the message.

    Raises:
        ValueError: The features do not divide.
    """
    unit = lanes.tensor * WIDTH
    if lanes.in_layers and length % unit:
        raise ValueError(
            f"{what} is {length}, which does not divide into {lanes.tensor} lanes of a multiple of {WIDTH} features; "
            f"use {-(-length // unit) * unit}, or fewer tensor lanes"
        )


def check_head(features: int, lanes: LaneCounts) -> None:
    """Check that the bits of an attention's backward do not depend on its number of heads.

    Args:
        features: Features of a head.
        lanes: Numbers of lanes over all ranks.

    Raises:
        ValueError: Heads have another size than a multiple of 8.
    """
    if lanes.in_layers and features % HEAD:
        raise ValueError(
            f"heads have {features} features: with tensor lanes, attention needs heads of a multiple of {HEAD} "
            f"features; use {-(-features // HEAD) * HEAD}"
        )


def sums_on(device: torch.device) -> Callable[[Tensor, Tensor, int], Tensor]:
    """Return the function for sums of lanes on a device: a Triton kernel on a GPU if possible, else `sum_of_lanes`."""
    if device.type == "cuda" and find_spec("triton"):
        from . import lane_kernel  # noqa: PLC0415 - it imports Triton

        return lane_kernel.sum_of_lanes
    return sum_of_lanes


def sum_of_lanes(x: Tensor, weight: Tensor, lanes: int) -> Tensor:
    """Return the tree of the products of lanes of features.

    Args:
        x: Rows [M, K].
        weight: Weight [N, K].
        lanes: Number of lanes of K.
    """
    pairs = zip(_columns(x, lanes), _columns(weight, lanes), strict=True)
    return tree([part.mm(block.t()) for part, block in pairs])


def _columns(x: Tensor, lanes: int) -> list[Tensor]:
    """Return contiguous blocks [rows, K/lanes] of [rows, K]."""
    return [block.contiguous() for block in x.chunk(lanes, 1)]


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
