"""Definition of a tensor-parallel mode as data: sharding of activations and weights, and its matmuls."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from par_groups import LaneCounts, WeightGradHook

from .arithmetic import LinearFunction
from .grid import Axes
from .layout import ActivationLayout
from .product_1d import local_product
from .token_losses import TokenLosses, token_losses
from .token_parameters import TokenParameters


class ParallelMatmul(Protocol):
    """A matmul of activations and a weight over the ranks of a tensor group."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        hook: WeightGradHook | None,
        linear: LinearFunction | None = None,
    ) -> Tensor:
        """Multiply local activations by the local weight. Collective over the tensor group.

        Args:
            x: Local activations [..., k].
            weight: Local weight [n, k], of x's dtype.
            bias: Local bias [n'], or None.
            hook: Function that receives the pending weight gradient in backward and computes it later; or None.
            linear: Function that replaces torch's local matmul; or None.

        Returns:
            Local activations [..., n'] in the matmul's output layout.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class WeightSharding:
    """Sharding of a weight [N, K], as torch.nn.Linear stores it.

    Args:
        rows: Axes that shard N.
        columns: Axes that shard K.
        sum_over: Axes over which the gradient is partial after backward.
    """

    rows: Axes = ()
    columns: Axes = ()
    sum_over: Axes = ()


def _same(x: Tensor) -> Tensor:
    return x


def _as_one_run(product: ParallelMatmul, runs: tuple[int, ...]) -> ParallelMatmul:
    """Return the matmul itself, which multiplies all runs at once."""
    del runs
    return product


@dataclass(frozen=True, kw_only=True)
class ModeRules:
    """Layouts, shardings and matmuls of a tensor-parallel mode. The defaults are the rules of one device.

    Args:
        residual: Layout of the residual stream, which embeddings and row layers return.
        inner: Layout between a column and a row layer.
        column: Sharding of a column layer's weight.
        row: Sharding of a row layer's weight.
        column_product: Matmul from the residual layout to the inner layout.
        row_product: Matmul from the inner layout to the residual layout.
        to_residual: Function that converts an activation from the inner to the residual layout, without a matmul.
        vocabulary: Axes that shard the rows of an embedding table. Each rank looks up the ids of its rows.
        vocabulary_gathered: Axes that shard the table further, and over which each use gathers it.
        tied: Function from a rank's shard of the table to the column weight [V, H] of `tied_product`.
        tied_product: Matmul of a classifier that is tied to the embedding table.
        token_losses: Function from logits, full or sharded, to the loss of each token.
        of_runs: Function from `column_product`, and the numbers of local rows of a weight's runs, such as q, k and v,
            to the matmul of this weight.
        token_parameters: Norms and look-ups.
        lanes: Numbers of parts of which each sum over tensor and sequence ranks consists. Sharded features must divide
            by 32 times the tensor lanes, if there are several.
        expert_lanes: Numbers of lanes, if experts compute the rows of each lane alone; else None.
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
    token_losses: TokenLosses = token_losses
    of_runs: Callable[[Any, tuple[int, ...]], ParallelMatmul] = _as_one_run
    token_parameters: TokenParameters = field(default_factory=TokenParameters)
    lanes: LaneCounts = field(default_factory=partial(LaneCounts, data=1))
    expert_lanes: LaneCounts | None = None
