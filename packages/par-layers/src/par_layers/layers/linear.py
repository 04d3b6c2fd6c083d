"""Linear layers: a column opens a pair, a row closes it, a Linear stays in the residual layout."""

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from par_groups import WeightGradHook, weight_and_hook

from ..modes.arithmetic import LinearFunction, in_autocast_dtype
from ..modes.grid import Axes, Grid
from ..modes.layout import ActivationLayout, check_features
from ..modes.rules import ParallelMatmul, WeightSharding
from .parallel_layer import ParallelLayer
from .parameter import Init, Rows, make_parameter, uniform


class ParallelLinear(ParallelLayer):
    """Linear layer with a sharded weight; create it by a `LayerSet`.

    Args:
        rows: Runs of output features. Each run is sharded separately.
        in_features: Number of input features, K.
        bias: Whether the layer has a bias.
        cut: Sharding of the weight.
        takes: Layout of the input.
        out: Layout of the output. The bias is sharded like its features.
        product: Matmul over the ranks.
        grid: This rank's coordinates.
        init: Initialization of the weight; default: uniform in +-1/sqrt(K), as in torch.nn.Linear.
        then: Function that is applied to the matmul's output, or None.
    """

    weight_grad_hook: WeightGradHook | None = None
    """Function that delays the weight gradient, for example for a zero-bubble pipeline schedule; None by default."""

    linear: LinearFunction | None
    """Function that replaces torch's local matmul, for example by float8; for one device and mode 1d.

    The layer's collectives do not change, but they do not overlap with the function. The function must call the layer's
    `weight_grad_hook` itself.
    """

    def __init__(
        self,
        rows: Sequence[Rows],
        in_features: int,
        bias: bool,
        *,
        cut: WeightSharding,
        takes: ActivationLayout,
        out: ActivationLayout,
        product: ParallelMatmul,
        grid: Grid,
        init: Init | None = None,
        then: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = sum(run.length for run in rows)
        self.local_parts = local_rows(rows, grid)
        self._product, self._then, self._takes = product, then, takes
        self.linear = None  # on the instance: a module that is assigned would be hidden by an attribute of the class
        self._local_in = in_features // grid.size(takes.features)
        bound = 1 / math.sqrt(in_features)
        check_divides(in_features, cut.columns, grid, "in_features")
        self.weight = make_parameter(rows, [(in_features, cut.columns)], grid, init or uniform(bound), cut.sum_over)
        # The bias is added to the output, so its gradient is partial over the axes that split the output's tokens.
        self.bias = make_parameter(rows, [], grid, uniform(bound), out.tokens) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map local activations [..., k] to local activations [..., n]."""
        check_features(x, self._local_in, self._takes, "a linear")
        # A function that replaces the matmul calls the hook itself.
        weight, hook = weight_and_hook(self) if self.linear is None else (self.weight, None)
        x, weight, bias = in_autocast_dtype(x, weight, self.bias)
        y = self._product(x, weight, bias, hook, self.linear)
        return y if self._then is None else self._then(y)

    def parts(self, y: Tensor) -> tuple[Tensor, ...]:
        """Split an output into the local parts of the layer's blocks, such as q, k and v.

        Args:
            y: Output of `forward`, [..., n].
        """
        parts: tuple[Tensor, ...] = y.split(self.local_parts, dim=-1)
        return parts

    def extra_repr(self) -> str:
        """Return the input features, the output features and whether there is a bias."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def block_rows(out_features: int, blocks: int | Sequence[int], unit: int, axes: Axes, grid: Grid) -> list[Rows]:
    """Return the runs of a column layer's output features. A unit is never split between ranks.

    A block with fewer units than ranks, such as keys and values of few heads, is sharded only over the leading axes and
    replicated over the rest. Its gradient is partial over the axes that replicate it.

    Args:
        out_features: Number of features of all blocks.
        blocks: Number or sizes of the blocks.
        unit: Number of features that stay on one rank.
        axes: Axes that shard the blocks.
        grid: This rank's coordinates.

    Raises:
        ValueError: The sizes do not add up, or do not divide.
    """
    if isinstance(blocks, int):
        if out_features % blocks:
            raise ValueError(f"out_features is {out_features}, which does not divide into {blocks} blocks")
        blocks = [out_features // blocks] * blocks
    if sum(blocks) != out_features:
        raise ValueError(f"blocks {list(blocks)} add up to {sum(blocks)}, but out_features is {out_features}")
    return [_rows_of_block(length, unit, axes, grid) for length in blocks]


def local_rows(rows: Sequence[Rows], grid: Grid) -> tuple[int, ...]:
    """Return this rank's number of rows of each run."""
    return tuple((run.padded or run.length) // grid.size(run.axes) for run in rows)


def _rows_of_block(length: int, unit: int, axes: Axes, grid: Grid) -> Rows:
    if length % unit:
        raise ValueError(f"a block of {length} features does not divide into units of {unit}")
    units, ranks = length // unit, grid.size(axes)
    if units % ranks == 0:
        return Rows(length=length, axes=axes)
    # The longest prefix of axes comes first, because it replicates the block on the fewest ranks.
    for leading in range(len(axes) - 1, 0, -1):
        if units < ranks and units % grid.size(axes[:leading]) == 0:
            return Rows(length=length, axes=axes[:leading], sum_over=axes[leading:])
    if units < ranks and ranks % units == 0:
        remedy = (
            "for fewer key and value heads than ranks, say so in the config: "
            f"tensor=dict(size={ranks}, mode='1d', kv_heads={units})"
        )
    else:
        remedy = f"use {math.ceil(units / ranks) * ranks * unit} features"
    raise ValueError(f"{units} units of {unit} features do not divide by {ranks} ranks ({' x '.join(axes)}); {remedy}")


def check_divides(length: int, axes: Axes, grid: Grid, what: str) -> None:
    """Raise ValueError, naming size and divisor, unless a dim divides evenly over `axes`.

    Args:
        length: Size of the full dim.
        axes: Axes that split the dim.
        grid: Coordinates of this rank.
        what: Description of the dim, for the message.
    """
    ranks = grid.size(axes)
    if length % ranks:
        near = math.ceil(length / ranks) * ranks
        raise ValueError(f"{what} is {length}, which does not divide by {ranks} ranks ({' x '.join(axes)}); use {near}")
