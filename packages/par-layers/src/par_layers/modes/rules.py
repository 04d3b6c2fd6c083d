"""What a tensor mode is, in one record: how it cuts activations and weights, and its products."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from par_groups import WeightGradHook

from .arithmetic import LinearFunction
from .grid import Axes
from .layout import Layout
from .product_1d import local_product


class Product(Protocol):
    """A linear product over the ranks of a tensor group."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        hook: WeightGradHook | None,
        linear: LinearFunction | None = None,
    ) -> Tensor:
        """Local activations and weight, [..., k] and [n, k], to local activations [..., n'].

        Args:
            x: [..., k].
            weight: [n, k], of x's dtype.
            bias: [n'] or None.
            hook: Is handed the weight gradient during backward, instead of computing it.
            linear: Multiplies in place of torch's product.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How a weight [N, K] is cut, as torch.nn.Linear stores it.

    Args:
        rows: Axes over which N is cut.
        columns: Axes over which K is cut.
        sum_over: Axes over which the gradient is partial after backward.
    """

    rows: Axes = ()
    columns: Axes = ()
    sum_over: Axes = ()


def _same(x: Tensor) -> Tensor:
    return x


def _same_table(table: Tensor) -> Tensor:
    return table


@dataclass(frozen=True, kw_only=True)
class Rules:
    """A tensor mode. The defaults are one device.

    Args:
        residual: Layout of what blocks add to: what embeddings give and a row layer leads back to.
        inner: Layout between a column and a row layer.
        column: Cut of a column layer's weight.
        row: Cut of a row layer's weight.
        column_product: From residual to inner.
        row_product: From inner to residual.
        to_residual: Brings an inner activation to the residual layout, without a product.
        vocabulary: Axes over which an embedding table is cut; each rank looks up its part of the ids.
        vocabulary_gathered: Axes over which the table is cut further, and gathered for use.
        tied: From the table, as it lies, to the column weight [V, H] that `tied_product` takes.
        tied_product: The product of a classifier that shares the table.
    """

    residual: Layout = field(default_factory=Layout)
    inner: Layout = field(default_factory=Layout)
    column: Cut = field(default_factory=Cut)
    row: Cut = field(default_factory=Cut)
    column_product: Product = local_product
    row_product: Product = local_product
    to_residual: Callable[[Tensor], Tensor] = _same
    vocabulary: Axes = ()
    vocabulary_gathered: Axes = ()
    tied: Callable[[Tensor], Tensor] = _same_table
    tied_product: Product = local_product
