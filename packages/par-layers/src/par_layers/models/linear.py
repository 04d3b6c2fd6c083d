"""Linears of an existing model that became columns and rows: the same objects, with another class."""

from importlib import import_module
from typing import Any, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from par_groups import WeightGradHook, WeightGradient, attributes, keep_packed_weights_, weight_and_hook

from .._collectives import (
    all_gather_to,
    finish_all_gather_on,
    gather_from,
    scatter_to,
    start_all_gather,
)
from ..layers.parallel_layer import ParallelLayer
from ..modes.arithmetic import LinearFunction, in_autocast_dtype
from ..modes.grid import Axes, Grid
from ..modes.layout import ActivationLayout, check_features
from ..modes.product_1d import (
    SEQUENCE,
    bias_gradient,
    local_product,
    save_operands,
    weight_gradient,
)
from ..modes.rules import ParallelMatmul
from .cutting import is_packed_4bit
from .sequence import CutSequence


class Watches(Protocol):
    """A region, as its Columns and its Row know it."""

    def column(self, y: Tensor) -> None:
        """Receive the output of a Column."""

    def row(self, y: Tensor) -> None:
        """Receive the output of the Row."""


class GatheredLogits:
    """Switch for sharded logits, which the model's entry sets for every forward.

    Args:
        cut: Whether the output of the head stays sharded over the vocabulary. Default: False.

    Attributes:
        held: Whether it stays sharded for now, even if `cut` is False.
        watched: Whether the sharded output of the running forward is wanted.
        latest: The sharded output of the running forward, if it is wanted.
    """

    def __init__(self, cut: bool = False) -> None:
        self.cut, self.held = cut, False
        self.watched = False
        self.latest: Tensor | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether the next output stays sharded."""
        return self.cut or self.held

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return itself: every forward sets its state first."""
        return self


class RegionEntry:
    """Full input of a region, which its columns share while the region runs, and the handle that gathers it again.

    Args:
        grid: Coordinates of this rank.
        axes: Axes of the tensor group.
    """

    def __init__(self, grid: Grid, axes: Axes) -> None:
        self.grid, self.axes = grid, axes
        self.whole: Tensor | None = None  # the entered input, gathered along the sequence
        self.part: Tensor | None = None  # of which this is the rank's own
        self.again: _Again | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return itself: it has state only while a region runs."""
        return self

    def gather(self, part: Tensor) -> Tensor:
        """Gather the full input from this rank's part [B, S/p, h]; backward: reduce-scatter."""
        group = self.grid.group(self.axes)
        # One for each forward: with several microbatches in flight, each backward gathers its own input.
        self.part, self.again = part, _Again(group)
        self.whole = all_gather_to(part, group, SEQUENCE)
        return self.whole

    def leave(self) -> None:
        """Discard the input when the region ends."""
        self.whole = self.part = self.again = None

    def product(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        hook: WeightGradHook | None,
        linear: LinearFunction | None = None,
    ) -> Tensor:
        """Compute the matmul of a column of the region, whose input is already gathered."""
        # A Column with another input, such as the states for cross-attention, or with its own product, such as
        # float8, saves what it reads itself.
        if x is not self.whole or linear is not None:
            return local_product(x, weight, bias, hook, linear)
        product: Tensor = _GatheredColumn.apply(x, weight, bias, self.part, (self.again, hook))  # type: ignore[no-untyped-call]
        return product


class _Again:
    """Full input of a region, gathered again once for the backward of all its columns.

    Args:
        group: The tensor group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.users = 0  # columns whose backward needs it
        self._left = 0
        self._started: Tensor | None = None
        self._whole: Tensor | None = None

    def start(self, part: Tensor) -> None:
        """Start the all-gather, unless another column has."""
        # Nobody is left before a backward and after it: a retained graph may run backward again.
        if self._left == 0:
            self._left = self.users
            self._started, self._whole = start_all_gather(part, self.group), None

    def finish(self) -> Tensor:
        """Return the full input [B, S, h]; the last column that calls frees it."""
        # Only the first of the columns waits.
        if self._whole is None and self._started is not None:
            self._whole = finish_all_gather_on(self._started, self.group, SEQUENCE)
        whole, self._left = self._whole, self._left - 1
        if self._left == 0:
            self._started = self._whole = None
        if whole is None:
            raise RuntimeError("a column needs the region's input before its gather; a bug of par-layers")
        return whole


class _GatheredColumn(torch.autograd.Function):
    """Column of a region whose input was gathered. It saves only this rank's part."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        part: Tensor,
        later: tuple[_Again, WeightGradHook | None],
    ) -> Tensor:
        ctx.again, ctx.hook = later
        if ctx.needs_input_grad[1]:
            # Only Columns with a trained weight read the full input in backward, and the last of them frees it.
            ctx.again.users += 1
        save_operands(ctx, part, weight)
        return functional.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        part, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if needs_weight:
            # The all-gather runs during the matmul of the input gradient, which does not need the gathered input.
            ctx.again.start(part)
        of_x = gradient @ weight if needs_x else None
        of_weight = weight_gradient(gradient, ctx.again.finish(), weight, ctx.hook) if needs_weight else None
        return of_x, of_weight, bias_gradient(gradient) if needs_bias else None, None, None


class _Adopted(ParallelLayer, nn.Linear):
    """Base of both adopted linears."""

    weight_grad_hook: WeightGradHook | None = None
    """Set by those who want to compute weight gradients later, such as a pipeline schedule."""

    linear: LinearFunction | None
    """Multiplies this rank's part in place of torch's product, such as in float8."""

    transposed: bool
    """Whether the weight is [in, out], as in transformers' Conv1D."""

    grid: Grid
    axes: Axes

    records = (attributes.SHARDING.name,)

    def operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None, WeightGradHook | None]:
        """Return x, this rank's weight [n, k] and bias in autocast's dtype, and the hook of the weight gradient."""
        if is_packed_4bit(self.weight):  # a cast would change the codes; the weight is frozen
            return x, self.weight, None if self.bias is None else self.bias.to(x.dtype), None
        if not self.transposed:
            weight, hook = weight_and_hook(self) if self.linear is None else (self.weight, None)
        elif self.linear is None:
            weight, hook = weight_and_hook(self, self.weight.t())
            hook = None if hook is None else _turned(hook)
        else:
            weight, hook = self.weight.t(), None
        x, weight, bias = in_autocast_dtype(x, weight, self.bias)
        return x, weight, bias, hook


class PackedMatmul:
    """Matmul by a weight that bitsandbytes has packed, in place of torch's.

    bitsandbytes dequantizes this rank's shard of one layer in the forward, and again in the backward. It saves neither
    the dequantized weight nor x.

    Args:
        dtype: The dtype of the matmul; None for that of x. The output has the dtype of x.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype

    def __call__(self, x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        """Map [..., k] to [..., n] by packed codes [n, k / weights of an element]."""
        dtype = self.dtype or x.dtype
        own = None if bias is None else bias.to(dtype)
        multiply = import_module("bitsandbytes").matmul_4bit
        y: Tensor = multiply(x.to(dtype), weight, bias=own, quant_state=weight.quant_state)
        return y.to(x.dtype)


def _turned(hook: WeightGradHook) -> WeightGradHook:
    """Return the hook of a weight [in, out] for gradients that are computed as [out, in]."""

    def turned(gradient: WeightGradient) -> None:
        operands = None if gradient.operands is None else gradient.operands[::-1]
        hook(WeightGradient(gradient.weight, lambda: gradient.compute().t(), operands))

    return turned


class AdoptedColumn(_Adopted):
    """Linear whose output features are sharded.

    It keeps the attributes of the original linear, including `in_features` and `out_features` of the full weight.
    """

    product: ParallelMatmul
    """The matmul over the ranks, or that of a region that enters the input for all its columns."""

    region: Watches | None
    """The region that begins here."""

    gather: bool
    """Whether the output is gathered, unless `logits` says otherwise."""

    logits: GatheredLogits | None

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., K], equal on all ranks, to this rank's features [..., N/p], or to all features."""
        check_features(x, self.in_features, ActivationLayout(), "a column")
        x, weight, bias, hook = self.operands(x)
        y = self.product(x, weight, bias, hook, self.linear)
        if self.region is not None:
            self.region.column(y)
        if not self.gather:
            return y
        group = self.grid.group(self.axes)
        local = y.shape[-1]
        padding = local * group.size() - self.out_features
        if self.logits is not None and self.logits.is_sharded:
            if padding:
                real = self.out_features - self.grid.index(self.axes) * local
                # Padded classes must get the probability 0 in a loss over sharded logits.
                y = y.masked_fill(torch.arange(local, device=y.device) >= real, -torch.inf)
            # After the forward, the model's entry looks in the graph whether a loss was computed from this shard.
            if self.logits.watched:
                self.logits.latest = y
            return y
        whole = gather_from(y, group, -1)
        return whole[..., : self.out_features].contiguous() if padding else whole


class AdoptedRow(_Adopted):
    """A linear whose input features are cut."""

    split: bool
    """Whether the input is whole."""

    products: tuple[ParallelMatmul, ParallelMatmul]
    """The matmuls whose output is full, and is cut along the sequence."""

    sequence: CutSequence | None
    """Says whether the output is cut along the sequence; None where it never is."""

    region: Watches | None
    """The region that ends here."""

    def forward(self, x: Tensor) -> Tensor:
        """Map this rank's features [..., K/p] to [..., N], equal on all ranks, or to [B, S/p, N]."""
        if self.split:
            check_features(x, self.in_features, ActivationLayout(), "a row")
            x = scatter_to(x, self.grid.group(self.axes), -1)
        check_features(x, self.in_features // self.grid.size(self.axes), ActivationLayout(features=self.axes), "a row")
        x, weight, bias, hook = self.operands(x)
        sequence = self.sequence is not None and self.sequence.is_cut(self)
        if sequence and x.dim() < 3:
            raise ValueError(
                f"a row is given a tensor of shape {tuple(x.shape)}, and cuts its output along the sequence, which is "
                "dim 1 of [batch, sequence, features]; use sequence_parallel=False"
            )
        y = self.products[sequence](x, weight, bias, hook, self.linear)
        if self.region is not None:
            self.region.row(y)
        return y


def adopt_linear_(
    linear: nn.Module,
    adopted: type[_Adopted],
    grid: Grid,
    axes: Axes,
    *,
    transposed: bool,
    **attributes: Any,
) -> None:
    """Turn a linear into a column or a row, in place: hooks, names and references keep the same object.

    Args:
        linear: torch's linear, or transformers' Conv1D.
        adopted: New class of the linear.
        grid: Coordinates of this rank.
        axes: Axes of the tensor group.
        transposed: Whether the weight is [in, out].
        **attributes: Further attributes of the class.
    """
    inside: dict[str, Any] = linear.__dict__
    if transposed:
        # Conv1D has other names for its features, and checks of Columns and Rows read torch's.
        inside["in_features"], inside["out_features"] = inside["nx"], inside["nf"]
    weight: Any = linear.weight
    product = None
    if is_packed_4bit(weight):
        product = PackedMatmul(inside.get("compute_dtype"))
        inside["quant_state"] = weight.quant_state  # bitsandbytes holds it twice
        keep_packed_weights_(linear)
    linear.__class__ = adopted
    inside.update(grid=grid, axes=axes, transposed=transposed, linear=product, **attributes)
