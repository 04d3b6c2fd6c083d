"""Experts whose bits do not depend on the number of ranks that hold them.

On one device an expert receives the rows of one lane at a time. With p expert ranks it receives the rows of p lanes
together, because each of these ranks sends its own. So the rows of each lane are multiplied alone, in the shapes of one
device, and the gradients of weights are exact sums over the lanes. The rows of an expert arrive sorted by their source.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from par_groups import WeightGradHook, WeightGradient, attributes, exact_sum, on_grid, weight_and_hook

from .._once import once_differentiable
from .experts import Experts
from .products import Activation, scaled
from .route import Route


class LaneExperts(Experts):
    """`Experts` that compute the rows of each lane alone. The arguments are those of `Experts`.

    Counts may be int64 [E', p]: the rows of each expert from each of p ranks, as the handle of
    `TokenDispatcher(by_source=True)` returns them. Counts [E'] are the rows of one lane.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        attributes.EXACT_GRADIENTS.set(self, True)

    def _forward(self, rows: Tensor, gates: Tensor, counts: Tensor | Sequence[int], route: Route | None) -> Tensor:
        up, up_hook = weight_and_hook(self, name=self._up)
        down, down_hook = weight_and_hook(self, name="down_proj")
        received = rows.shape[0] if route is None else route.splits.received
        sizes = torch.as_tensor(counts).reshape(len(counts), -1).tolist()
        if sum(map(sum, sizes)) != received:
            raise ValueError(
                f"counts are {sizes}, {sum(map(sum, sizes))} together, but there are {received} rows; give the counts "
                "that came with them"
            )
        call = _LaneRows(self.activation, sizes, self.transposed, (up_hook, down_hook), route)
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
    """

    activation: Activation
    sizes: list[list[int]]
    transposed: bool
    hooks: tuple[WeightGradHook | None, WeightGradHook | None]
    route: Route | None

    def matrix(self, weight: Tensor, expert: int) -> Tensor:
        """Return the matrix [outputs, inputs] of an expert."""
        return weight[expert].t() if self.transposed else weight[expert]

    def lanes(self) -> Iterator[tuple[int, slice]]:
        """Yield the expert and the rows of each lane that has rows of it."""
        start = 0
        # The rows of an expert are sorted by source, and each source is one lane of one device.
        for expert, of_lanes in enumerate(self.sizes):
            for size in of_lanes:
                if size:
                    yield expert, slice(start, start + size)
                start += size

    def summed(self, like: Tensor, of_lane: Callable[[int, slice], Tensor]) -> Tensor:
        """Return the gradient of a parameter, in fp64: of each expert the exact sum over the lanes.

        Args:
            like: The parameter [E', ...].
            of_lane: Function from an expert and rows to the gradient of the expert's part of the parameter.
        """
        terms: list[list[Tensor]] = [[] for _ in self.sizes]
        for expert, rows in self.lanes():
            terms[expert].append(of_lane(expert, rows))
        # fp64 numbers on a common grid add exactly, so the number of ranks does not change the bits.
        total = torch.zeros(like.shape, dtype=torch.float64, device=like.device)
        for out, gradients in zip(total.unbind(), terms, strict=True):
            if gradients:
                out.copy_(on_grid(gradients[0]) if len(gradients) == 1 else exact_sum(gradients))
        return total

    def of_weight(self, number: int, weight: Tensor, left: Tensor, right: Tensor) -> Tensor | None:
        """Return the gradient of a weight from [R, outputs] and [R, inputs]; None if a hook receives it."""
        # The product is transposed here, since autograd would round the gradient of a transposed view to its dtype.
        first, second = (right, left) if self.transposed else (left, right)

        def compute() -> Tensor:
            return self.summed(weight, lambda _, rows: first[rows].t() @ second[rows])

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
        wide = rows.new_empty(len(rows), call.matrix(up, 0).shape[0])
        y = rows.new_empty(len(rows), call.matrix(down, 0).shape[0])
        for expert, lane in call.lanes():
            # Tensors of their own rather than parts of larger ones: every operation has the strides of one device.
            inner = rows[lane] @ call.matrix(up, expert).t()
            if up_bias is not None:
                inner += up_bias[expert]
            outer = call.activation.scaled(inner, gates[lane]) @ call.matrix(down, expert).t()
            if down_bias is not None:
                # The gate has multiplied the input of the second matmul, so only the bias still lacks it.
                outer += scaled(down_bias[expert].expand_as(outer), gates[lane])
            wide[lane], y[lane] = inner, outer
        ctx.call = call
        ctx.save_for_backward(rows, wide, gates, up, down, up_bias, down_bias)
        return y if call.route is None else call.route.summed(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, wide, gates, up, down, up_bias, down_bias = ctx.saved_tensors
        call: _LaneRows = ctx.call
        gradient = gradient.contiguous() if call.route is None else call.route.taken(gradient)
        of_rows, of_gates, of_wide = (torch.empty_like(each) for each in (rows, gates, wide))
        inner = rows.new_empty(len(rows), call.matrix(down, 0).shape[1])  # input of the second matmul
        for expert, lane in call.lanes():
            outer = gradient[lane]
            of_inner = outer @ call.matrix(down, expert)
            inner[lane], of_gate, middle = call.activation.middle(wide[lane], gates[lane], of_inner)
            if down_bias is not None:
                of_gate += (outer * down_bias[expert]).sum(1, dtype=gates.dtype)
            of_rows[lane], of_gates[lane], of_wide[lane] = middle @ call.matrix(up, expert), of_gate, middle
        needs_up, needs_down, needs_up_bias, needs_down_bias = ctx.needs_input_grad[3:]
        of_up = call.of_weight(0, up, of_wide, rows) if needs_up else None
        of_down = call.of_weight(1, down, gradient, inner) if needs_down else None
        of_up_bias = call.summed(up_bias, lambda _, lane: of_wide[lane].sum(0)) if needs_up_bias else None
        of_down_bias = None
        if needs_down_bias:
            of_down_bias = call.summed(down_bias, lambda _, lane: scaled(gradient[lane], gates[lane]).sum(0))
        if call.route is not None:
            of_rows, of_gates = call.route.summed(of_rows), call.route.placed_gates(of_gates)
        return of_rows, of_gates, None, of_up, of_down, of_up_bias, of_down_bias
