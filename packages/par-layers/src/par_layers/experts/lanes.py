"""Experts whose bits do not depend on the number of ranks that hold them or shard each of them.

On one device an expert receives the rows of one lane at a time. With p expert ranks it receives the rows of p lanes
together, because each of these ranks sends its own. So the rows of each lane are multiplied alone, in the shapes of one
device, and the gradients of weights are exact sums over the lanes. The rows of an expert arrive sorted by their source.

Tensor ranks may shard the features between the two matmuls. These consist of **tensor lanes**: each is an expert of its
own with a part of the features, and the outputs are added in a fixed binary tree before the experts of a token are.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Self

import torch
from torch import Tensor

from par_groups import LaneCounts, WeightGradHook, WeightGradient, attributes, exact_sum, on_grid, tree, weight_and_hook

from .._collectives import start_tree_all_reduce
from .._once import once_differentiable
from ..modes.grid import Grid
from .experts import EXPERT, FEATURES, Experts
from .products import Activation, scaled
from .route import Route


@dataclass(frozen=True)
class FeatureLanes:
    """Tensor lanes of experts on one rank.

    Args:
        here: Number of lanes on this rank.
        grid: Coordinates of this rank, in the view "experts".
        sources: Number of adjacent ranks that send the tokens of one data lane, each a part of them.
    """

    here: int
    grid: Grid
    sources: int

    @classmethod
    def of(cls, lanes: LaneCounts, grid: Grid, features: int) -> Self:
        """Return the lanes of experts with a number of intermediate features.

        Raises:
            ValueError: The features do not divide into lanes, or ranks that hold the same experts have different tokens
                of a data lane.
        """
        if features % lanes.tensor:
            near = -(-features // lanes.tensor) * lanes.tensor
            raise ValueError(
                f"experts have {features} intermediate features, which do not divide into {lanes.tensor} tensor lanes; "
                f"use {near}, or fewer tensor lanes"
            )
        tensor, parts = grid.size(grid.larger(grid.tensor_axes)), grid.size((EXPERT,))
        sources = tensor if grid.size((FEATURES,)) == 1 else 1
        if parts % sources:
            raise ValueError(
                f"expert={parts} with tensor=1 and {tensor} tensor ranks: several ranks would have a part of a lane's "
                f"rows; use a multiple of {tensor} with numerics='canonical', or leave tensor=1 out"
            )
        return cls(lanes.tensor // grid.size((FEATURES,)), grid, sources)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the object itself: copies of a model use the same ranks."""
        return self

    def part(self, x: Tensor, lane: int, dim: int, runs: int) -> Tensor:
        """Return the part of a lane along the features, contiguous: it has a part of each run, such as gate and up."""
        if self.here == 1:
            return x
        pieces: Tensor = x.unflatten(dim, (runs, self.here, -1))
        # A library may choose another kernel for another stride, so that blocks are copied.
        return pieces.select(dim + 1, lane).flatten(dim, dim + 1).contiguous()

    def join(self, parts: list[Tensor], dim: int, runs: int) -> Tensor:
        """Return what has these parts, one of each lane."""
        if self.here == 1:
            return parts[0]
        lanes = [part.unflatten(dim, (runs, -1)) for part in parts]
        return torch.stack(lanes, dim + 1).flatten(dim, dim + 2)

    def start_sum(self, x: Tensor) -> Callable[[], Tensor]:
        """Start to continue the tree of this rank's lanes over the ranks that shard each expert."""
        if self.grid.size((FEATURES,)) == 1:
            return lambda: x
        return start_tree_all_reduce(x, self.grid.group((FEATURES,)))


class LaneExperts(Experts):
    """`Experts` that compute the rows of each lane alone. Outputs are complete also where ranks shard each expert.

    Counts may be int64 [E', p]: the rows of each expert from each of p ranks, as the handle of
    `TokenDispatcher(by_source=True)` returns them. Counts [E'] are the rows of one lane.

    Args:
        num_experts: Number of experts on all ranks, E.
        hidden_size: Features of a token, h.
        intermediate_size: Features of the activation, f.
        lanes: Numbers of lanes over all ranks; default: one tensor lane.
        **options: Further arguments of `Experts`.

    Raises:
        ValueError: The features do not divide into tensor lanes, or ranks that hold the same experts have different
            tokens of a data lane.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        lanes: LaneCounts | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_experts, hidden_size, intermediate_size, **options)
        grid = options.get("grid") or Grid(None)
        self.lanes = FeatureLanes.of(LaneCounts(data=1) if lanes is None else lanes, grid, intermediate_size)
        self._runs = 2 if self.activation.gated and not self._interleaved else 1
        attributes.EXACT_GRADIENTS.set(self, True)

    def _forward(self, rows: Tensor, gates: Tensor, counts: Tensor | Sequence[int], route: Route | None) -> Tensor:
        up, up_hook = weight_and_hook(self, name=self._up)
        down, down_hook = weight_and_hook(self, name="down_proj")
        received = rows.shape[0] if route is None else route.splits.received
        table = torch.as_tensor(counts).reshape(len(counts), -1)
        # The tokens of a lane are in order of their sources, so together they are in the order of one device.
        sizes = table.unflatten(1, (-1, self.lanes.sources if table.shape[1] > 1 else 1)).sum(-1).tolist()
        if sum(map(sum, sizes)) != received:
            raise ValueError(
                f"counts are {sizes}, {sum(map(sum, sizes))} together, but there are {received} rows; give the counts "
                "that came with them"
            )
        hooks = (up_hook, down_hook)
        call = _LaneRows(self.activation, sizes, self.transposed, hooks, route, self.lanes, self._runs)
        y: Tensor = _LaneExpertsFunction.apply(  # type: ignore[no-untyped-call]
            rows.contiguous(), gates, call, up, down, self._parameters[self._up + "_bias"], self.down_proj_bias
        )
        return y


@dataclass(eq=False)
class _LaneRows:
    """Arguments of `_LaneExpertsFunction` that are not tensors.

    Args:
        activation: Function between the two matmuls.
        sizes: Number of rows of each expert from each lane, [E'][p].
        transposed: Whether weights are stored as [inputs, outputs].
        hooks: Receivers of the deferred gradients of the first and the second weight, or None.
        route: Permutation from tokens to routed tokens, if tokens are passed; else None.
        features: Tensor lanes of this rank.
        runs: Number of runs of the first weight's outputs that are in lanes each: 2 for gate before up, else 1.
    """

    activation: Activation
    sizes: list[list[int]]
    transposed: bool
    hooks: tuple[WeightGradHook | None, WeightGradHook | None]
    route: Route | None
    features: FeatureLanes
    runs: int

    def up(self, weight: Tensor, expert: int, lane: int) -> Tensor:
        """Return the first matrix of a tensor lane of an expert, [n / lanes, h]."""
        if self.transposed:
            return self.features.part(weight[expert], lane, 1, self.runs).t()
        return self.features.part(weight[expert], lane, 0, self.runs)

    def down(self, weight: Tensor, expert: int, lane: int) -> Tensor:
        """Return the second matrix of a tensor lane of an expert, [h, f / lanes]."""
        if self.transposed:
            return self.features.part(weight[expert], lane, 0, 1).t()
        return self.features.part(weight[expert], lane, 1, 1)

    def lanes(self) -> Iterator[tuple[int, slice]]:
        """Yield the expert and the rows of each lane that has rows of it."""
        start = 0
        # The rows of an expert are sorted by source, and each source is one lane of one device.
        for expert, of_lanes in enumerate(self.sizes):
            for size in of_lanes:
                if size:
                    yield expert, slice(start, start + size)
                start += size

    def summed(self, like: Tensor, of_lane: Callable[[slice], Tensor]) -> Tensor:
        """Return the gradient of a parameter, in fp64: of each expert the exact sum over the lanes.

        Args:
            like: The parameter [E', ...].
            of_lane: Function from rows to the gradient of their expert's part of the parameter.
        """
        terms: list[list[Tensor]] = [[] for _ in self.sizes]
        for expert, rows in self.lanes():
            terms[expert].append(of_lane(rows))
        # fp64 numbers on a common grid add exactly, so the number of ranks does not change the bits.
        total = torch.zeros(like.shape, dtype=torch.float64, device=like.device)
        for out, gradients in zip(total.unbind(), terms, strict=True):
            if gradients:
                out.copy_(on_grid(gradients[0]) if len(gradients) == 1 else exact_sum(gradients))
        return total

    def of_weight(self, number: int, weight: Tensor, wide: Tensor, rows: Tensor) -> Tensor | None:
        """Return the gradient of a weight; None if a hook receives it.

        Args:
            number: 0 for the first weight, 1 for the second.
            weight: The weight [E', ...].
            wide: Factor along the lanes, [lanes, R, features of a lane]: a gradient for the first weight, the input for
                the second.
            rows: The other factor, [R, h].
        """
        is_first = number == 0
        # The product is transposed here, since autograd would round the gradient of a transposed view to its dtype.
        lanes_first = is_first is not self.transposed

        def of_lane(own: slice) -> Tensor:
            parts = [lane[own].t() @ rows[own] if lanes_first else rows[own].t() @ lane[own] for lane in wide.unbind()]
            return self.features.join(parts, 0 if lanes_first else 1, self.runs if is_first else 1)

        def compute() -> Tensor:
            return self.summed(weight, of_lane)

        hook = self.hooks[number]
        if hook is None:
            return compute()
        hook(WeightGradient(weight, compute))
        return None


class _LaneExpertsFunction(torch.autograd.Function):
    """down(gate * activation(up(row))) with the weights of the row's expert, one matmul for each expert and lane."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gates: Tensor, call: _LaneRows, *parameters: Tensor | None) -> Tensor:
        up, down, up_bias, down_bias = parameters
        assert up is not None and down is not None  # noqa: S101, PT018 - for the type checker: both are parameters
        if call.route is not None:
            rows, gates = call.route.taken(rows), call.route.taken_gates(gates)
        up_of, down_of, features = cache(partial(call.up, up)), cache(partial(call.down, down)), call.features
        wide = rows.new_empty(features.here, len(rows), up.shape[2 if call.transposed else 1] // features.here)
        y = torch.empty_like(rows)
        for expert, own in call.lanes():
            # Tensors of their own rather than parts of larger ones: every operation has the strides of one device.
            row, gate, outers = rows[own], gates[own], []
            for lane in range(features.here):
                inner = row @ up_of(expert, lane).t()
                if up_bias is not None:
                    inner += features.part(up_bias[expert], lane, 0, call.runs)
                outers.append(call.activation.scaled(inner, gate) @ down_of(expert, lane).t())
                wide[lane, own] = inner
            y[own] = tree(outers)
        y = features.start_sum(y)()
        if down_bias is not None:
            for expert, own in call.lanes():
                # The gate has multiplied the input of the second matmul, so only the bias still lacks it.
                y[own] += scaled(down_bias[expert].expand_as(y[own]), gates[own])
        ctx.call = call
        ctx.save_for_backward(rows, wide, gates, up, down, up_bias, down_bias)
        return y if call.route is None else call.route.summed(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, wide, gates, up, down, up_bias, down_bias = ctx.saved_tensors
        call: _LaneRows = ctx.call
        gradient = gradient.contiguous() if call.route is None else call.route.taken(gradient)
        up_of, down_of, features = cache(partial(call.up, up)), cache(partial(call.down, down)), call.features
        of_rows, of_gates, of_wide = (torch.empty_like(each) for each in (rows, gates, wide))
        # Inputs of the second matmul.
        inner = rows.new_empty(features.here, len(rows), down.shape[1 if call.transposed else 2] // features.here)
        for expert, own in call.lanes():
            outer, gate, to_rows, to_gates = gradient[own], gates[own], [], []
            for lane in range(features.here):
                of_inner = outer @ down_of(expert, lane)
                inner[lane, own], of_gate, middle = call.activation.middle(wide[lane, own], gate, of_inner)
                to_gates.append(of_gate)
                to_rows.append(middle @ up_of(expert, lane))
                of_wide[lane, own] = middle
            of_rows[own], of_gates[own] = tree(to_rows), tree(to_gates)
        # The trees over the ranks are under way while gradients of weights are computed.
        summing = features.start_sum(of_rows), features.start_sum(of_gates)
        needs_up, needs_down, needs_up_bias, needs_down_bias = ctx.needs_input_grad[3:]
        of_up = call.of_weight(0, up, of_wide, rows) if needs_up else None
        of_down = call.of_weight(1, down, inner, gradient) if needs_down else None
        of_up_bias = of_down_bias = None
        if needs_up_bias:

            def of_bias(own: slice) -> Tensor:
                return features.join([lane[own].sum(0) for lane in of_wide.unbind()], 0, call.runs)

            of_up_bias = call.summed(up_bias, of_bias)
        if needs_down_bias:
            of_down_bias = call.summed(down_bias, lambda own: scaled(gradient[own], gates[own]).sum(0))
        of_rows, of_gates = summing[0](), summing[1]()
        if down_bias is not None:
            for expert, own in call.lanes():
                of_gates[own] += (gradient[own] * down_bias[expert]).sum(1, dtype=gates.dtype)
        if call.route is not None:
            of_rows, of_gates = call.route.summed(of_rows), call.route.placed_gates(of_gates)
        return of_rows, of_gates, None, of_up, of_down, of_up_bias, of_down_bias
