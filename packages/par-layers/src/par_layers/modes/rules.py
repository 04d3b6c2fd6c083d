"""What a tensor mode is, in one record: how it cuts activations and weights, and its products."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from par_groups import WeightGradHook

from .arithmetic import LinearFunction
from .grid import Axes
from .layout import ActivationLayout
from .product_1d import local_product


class ParallelMatmul(Protocol):
    """A linear product over the ranks of a tensor group."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        hook: WeightGradHook | None,
        linear: LinearFunction | None = None,
    ) -> Tensor:
        """Multiplies local activations with the local weight.

        Args:
            x: Local activations [..., k].
            weight: The local weight [n, k], of x's dtype.
            bias: The local bias [n'], or None.
            hook: Is handed the weight gradient during backward, which then does not compute it; or None.
            linear: Multiplies in place of torch's product; or None.

        Returns:
            Local activations [..., n'] in the layout that the product leads to.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class WeightSharding:
    """How a weight [N, K] is cut, as torch.nn.Linear stores it.

    Args:
        rows: The axes over which N is cut.
        columns: The axes over which K is cut.
        sum_over: The axes over which the gradient is partial after backward.
    """

    rows: Axes = ()
    columns: Axes = ()
    sum_over: Axes = ()


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True, kw_only=True)
class ModeRules:
    """How a tensor mode cuts and multiplies. The defaults are one device.

    Args:
        residual: The layout of what blocks add to: what embeddings give and a row layer leads back to.
        inner: The layout between a column and a row layer.
        column: How a column layer's weight is cut.
        row: How a row layer's weight is cut.
        column_product: The product that leads from the residual layout to the inner one.
        row_product: The product that leads from the inner layout to the residual one.
        to_residual: Brings an activation from the inner to the residual layout, without a product.
        vocabulary: The axes over which an embedding table is cut; each rank looks up its part of the ids.
        vocabulary_gathered: The axes over which the table is cut further, and gathered for use.
        tied: From the table, as it lies on the ranks, to the column weight [V, H] that `tied_product` takes.
        tied_product: The product of a classifier that shares the table.
    """

    residual: ActivationLayout = field(default_factory=ActivationLayout)
    inner: ActivationLayout = field(default_factory=ActivationLayout)
    column: WeightSharding = field(default_factory=WeightSharding)
    row: WeightSharding = field(default_factory=WeightSharding)
    column_product: ParallelMatmul = local_product
    row_product: ParallelMatmul = local_product
    to_residual: Callable[[Tensor], Tensor] = _same
    vocabulary: Axes = ()
    vocabulary_gathered: Axes = ()
    tied: Callable[[Tensor], Tensor] = _same
    tied_product: ParallelMatmul = local_product
