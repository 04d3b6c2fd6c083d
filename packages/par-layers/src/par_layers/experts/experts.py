"""The experts of this rank: for each row up to its expert's activation, the row's gate, and down again."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from par_groups import Box, Sharding, WeightGradHook, WeightGradient, set_sharding, weight_and_hook

from .._once import once_differentiable
from .._torch_private import apart
from ..layers.parallel_layer import ParallelLayer
from ..layers.parameter import ByPlace, EachExpert, Init, constant, uniform
from ..modes.arithmetic import in_autocast_dtype
from ..modes.grid import Axes, Grid
from .dispatch import Route
from .products import (
    Activation,
    Segments,
    activation_of,
    batched,
    is_one_by_one,
    linear_into,
    of_each_row,
    product,
    scaled,
    sums_of_rows,
    weight_product,
)

EXPERT, FEATURES = "expert_parallel", "expert_tensor"
"""The axes of the view "experts" over which experts are dealt out, and each of them cut."""


class Experts(ParallelLayer):
    """Experts whose weights are packed, one tensor for all of this rank's; plain functions of rows, without exchange.

    The parameters are on the meta device until `initialize` fills them, or weights are loaded. With E' experts of this
    rank and f' of f intermediate features they are `gate_up_proj` [E', 2 f', h], gate before up (`up_proj` [E', f', h]
    where the activation has no gate), `down_proj` [E', h, f'], and with a bias `gate_up_proj_bias` [E', 2 f'] and
    `down_proj_bias` [E', h]. Each pass gives every one a gradient, zeros for experts without rows.

    A row's gate multiplies its activation, before the product down, so that outputs are not needed for the gate's
    gradient; rows, the result of the first product and gates are saved for backward, which makes the activation again.

    Args:
        experts: Number of experts of all ranks, E.
        hidden: Features of a row, h.
        intermediate: Features of the activation, f.
        activation: "swiglu" or "clamped_swiglu" (gpt-oss's), "gelu" (which has no gate), or an `Activation`.
        bias: Whether both products have a bias.
        interleaved: Whether gate and up alternate, feature by feature; an `Activation` of your own must expect it.
        transposed: Whether weights are [E', h, 2 f'] and [E', f', h].
        grid: This rank's place: experts are dealt out over its axis `expert_parallel`, and with an axis `expert_tensor`
            features are cut and outputs partial sums over it. None for one device.
        init: How weights are filled; default: as torch.nn.Linear, uniform in +-1/sqrt(inputs). Biases begin at zero.

    Raises:
        ValueError: Experts or features do not divide by the ranks, or there is no such activation.
    """

    weight_grad_hook: WeightGradHook | None = None
    """Set by those who want to compute weight gradients later, such as a pipeline schedule."""

    def __init__(
        self,
        experts: int,
        hidden: int,
        intermediate: int,
        *,
        activation: str | Activation = "swiglu",
        bias: bool = False,
        interleaved: bool = False,
        transposed: bool = False,
        grid: Grid | None = None,
        init: Init | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation_of(activation, interleaved=interleaved)
        if interleaved and not self.activation.gated:
            raise ValueError("interleaved is True, but the activation has no gate; give interleaved=False")
        self.experts, self.hidden, self.intermediate, self.transposed = experts, hidden, intermediate, transposed
        place = _Place(Grid(None) if grid is None else grid, experts, intermediate, transposed)
        self.local_experts, self._adds_bias = place.local_experts, place.rank == 0
        gated = self.activation.gated
        wide, runs = (2 * intermediate, 1 if interleaved else 2) if gated else (intermediate, 1)
        up_init, down_init = init or uniform(1 / math.sqrt(hidden)), init or uniform(1 / math.sqrt(intermediate))
        self._up = "gate_up_proj" if gated else "up_proj"
        self.register_parameter(self._up, place.parameter((wide, hidden), up_init, cut=0, runs=runs))
        self.down_proj = place.parameter((hidden, intermediate), down_init, cut=1)
        up_bias = place.parameter((wide,), constant(0.0), cut=0, runs=runs) if bias else None
        self.register_parameter(self._up + "_bias", up_bias)
        self.down_proj_bias = place.parameter((hidden,), constant(0.0)) if bias else None

    def forward(
        self, rows: Tensor, gates: Tensor, counts: Tensor | Sequence[int], *, route: Route | None = None
    ) -> Tensor:
        """The experts' outputs, multiplied by the gates.

        Args:
            rows: Rows [R, h], expert by expert.
            gates: Their weights, [R].
            counts: Number of rows of each of this rank's experts, int64 [E']; or a list.
            route: Given by `Sent.through` alone, where nothing is exchanged: rows and gates are those of tokens, [M, h]
                and [M, k], and what is returned is the sum of each token, [M, h].

        Returns:
            [R, h]; where features are cut over `expert_tensor`, this rank's part of the sum over it.

        Raises:
            ValueError: Shapes do not fit, or counts do not add up to the rows.
        """
        if rows.ndim != 2 or rows.shape[1] != self.hidden or (route is None and gates.shape != rows.shape[:1]):
            raise ValueError(
                f"rows are {list(rows.shape)} and gates {list(gates.shape)}; these experts take [R, {self.hidden}] and "
                "[R]"
            )
        if len(counts) != self.local_experts:
            raise ValueError(
                f"there are counts of {len(counts)} experts, but this rank has {self.local_experts} of {self.experts}"
            )
        if not is_compiling():
            return self._forward(rows, gates, counts, route)
        alike = isinstance(counts, list) and counts == [rows.shape[0] // len(counts)] * len(counts)
        if alike and self.weight_grad_hook is None:
            return self._batched(rows, gates)
        return apart(self._forward, rows, gates, counts, route)

    def _forward(self, rows: Tensor, gates: Tensor, counts: Tensor | Sequence[int], route: Route | None) -> Tensor:
        up, up_hook = weight_and_hook(self, name=self._up)
        down, down_hook = weight_and_hook(self, name="down_proj")
        if self.transposed:
            up, down = up.transpose(1, 2), down.transpose(1, 2)
        rows, up, up_bias = in_autocast_dtype(rows.contiguous(), up, self._parameters[self._up + "_bias"])
        _, down, down_bias = in_autocast_dtype(rows, down, self.down_proj_bias)
        received = rows.shape[0] if route is None else route.splits.received
        segments = Segments(counts, received, rows, up, down)
        y: Tensor = _Experts.apply(  # type: ignore[no-untyped-call]
            rows,
            gates,
            _Computation(self.activation, segments, self._adds_bias, up_hook, down_hook, self.transposed, route),
            up,
            down,
            up_bias,
            down_bias,
        )
        return y

    def _batched(self, rows: Tensor, gates: Tensor) -> Tensor:
        """As `_forward` where all experts have as many rows, in plain operations that a graph may fuse or run again."""
        up: Tensor = getattr(self, self._up)
        down: Tensor = self.down_proj
        if self.transposed:
            up, down = up.transpose(1, 2), down.transpose(1, 2)
        rows, up, up_bias = in_autocast_dtype(rows, up, self._parameters[self._up + "_bias"])
        _, down, down_bias = in_autocast_dtype(rows, down, self.down_proj_bias)
        wide = batched(rows, up)
        if up_bias is not None:
            wide = wide + up_bias.repeat_interleave(wide.shape[0] // len(up_bias), 0)
        y = batched(scaled(self.activation.differentiable(wide), gates), down)
        if down_bias is not None and self._adds_bias:
            y = y + scaled(down_bias.repeat_interleave(y.shape[0] // len(down_bias), 0), gates)
        return y

    def extra_repr(self) -> str:
        """Number of experts here and everywhere, features, and what differs from the defaults."""
        here = "" if self.local_experts == self.experts else f", {self.local_experts} here"
        return f"{self.experts} experts{here}, hidden={self.hidden}, intermediate={self.intermediate}"


class _Place:
    """Which experts, and which of their features, a rank has.

    Args:
        grid: The rank's place.
        experts: Number of experts of all ranks.
        intermediate: Features of the activation.
        transposed: Whether inputs come before outputs in weights.
    """

    def __init__(self, grid: Grid, experts: int, intermediate: int, transposed: bool) -> None:
        ranks, self._parts = grid.size((EXPERT,)), grid.size((FEATURES,))
        if experts < 1 or experts % ranks:
            raise ValueError(
                f"{experts} experts do not divide by {ranks} ranks of {EXPERT!r}; use a multiple of {ranks} experts, "
                "or fewer ranks"
            )
        if intermediate % self._parts:
            near = math.ceil(intermediate / self._parts) * self._parts
            raise ValueError(
                f"intermediate is {intermediate}, which does not divide by {self._parts} ranks of {FEATURES!r}; use "
                f"{near}, or expert=dict(..., tensor=1)"
            )
        self._grid, self._experts, self._intermediate, self._transposed = grid, experts, intermediate, transposed
        self.local_experts = experts // ranks
        self.rank = grid.index((FEATURES,))

    def parameter(
        self, features: tuple[int, ...], init: Init, *, cut: int | None = None, runs: int = 1
    ) -> nn.Parameter:
        """A parameter on the meta device that stands for this rank's part.

        Args:
            features: For one expert, the lengths of outputs and inputs; of outputs alone for a bias.
            init: How the whole parameter is filled.
            cut: Which of them is cut over `expert_tensor`; None for neither.
            runs: Number of runs of equal length, each cut by itself, that it consists of.
        """
        order = (0, 2, 1) if self._transposed and len(features) == 2 else range(1 + len(features))
        shape = [self._experts, *features]
        start = [self._grid.index((EXPERT,)) * self.local_experts, *(0 for _ in features)]
        size, step = [self.local_experts, *features], 0
        axes: Axes = (EXPERT,)
        if cut is not None:
            step = features[cut] // runs  # of the whole parameter from run to run
            size[1 + cut] = step // self._parts
            axes = (EXPERT, FEATURES)
        local = list(size)
        local[1 + (cut or 0)] *= runs
        stride = [math.prod(local[dim] for dim in order if order.index(dim) > order.index(of)) for of in order]
        boxes = []
        for run in range(runs):
            if cut is not None:
                start[1 + cut] = run * step + self.rank * size[1 + cut]
            boxes.append(
                Box(
                    start=tuple(start[dim] for dim in order),
                    size=tuple(size[dim] for dim in order),
                    offset=run * size[1 + (cut or 0)] * stride[order.index(1 + (cut or 0))],
                    stride=tuple(stride),
                    copies=self._grid.copies(axes),
                    sum_over=(),
                )
            )
        parameter = nn.Parameter(torch.empty([local[dim] for dim in order], device="meta"))
        set_sharding(parameter, Sharding(tuple(shape[dim] for dim in order), tuple(boxes)))
        parameter.par_init = init if isinstance(init, ByPlace) else EachExpert(init)  # type: ignore[attr-defined]  # a tensor takes attributes
        return parameter


@dataclass(eq=False)
class _Computation:
    """What `_Experts` is told beside tensors.

    Args:
        activation: What is computed between the products.
        segments: Which rows are whose.
        adds_bias: Whether this rank adds the bias of the product down, which one of those that cut an expert does.
        up_hook: Takes the first weight's gradient for later, or None.
        down_hook: Takes the second one's.
        transposed: Whether the weights are transposed views of the parameters.
        route: Where tokens are given, how their rows lie; None where rows are given.
    """

    activation: Activation
    segments: Segments
    adds_bias: bool
    up_hook: WeightGradHook | None
    down_hook: WeightGradHook | None
    transposed: bool
    route: Route | None

    @property
    def is_later(self) -> bool:
        """Whether weight gradients are computed later, so that what they are made of is kept."""
        return self.up_hook is not None or self.down_hook is not None

    def middle(self, wide: Tensor, gates: Tensor, of_act: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What lies between the products, once more, and its gradients.

        Args:
            wide: The results of the first product, [R, n].
            gates: The gates, [R].
            of_act: The gradient of what goes into the second product, [R, f]; it is overwritten.

        Returns:
            What went into the second product, [R, f]; the gradient of gates, [R]; and that of `wide`, [R, n].
        """
        act, pull = self.activation.again(wide)
        of_gates = (of_act * act).sum(1, dtype=gates.dtype)
        column = gates.unsqueeze(1)
        return act.mul_(column), of_gates, pull(of_act.mul_(column))

    def weight_gradient(
        self, hook: WeightGradHook | None, weight: Tensor, left: Tensor, right: Tensor
    ) -> Tensor | None:
        """The gradient of a weight [E', n, k], of rows [R, n] and [R, k]; or None, and the hook has it for later."""
        if self.transposed:  # computed as the parameter lies in memory, which would else be copied
            left, right = right, left
        if hook is None:
            gradient = weight_product(left, right, self.segments)
            return gradient.transpose(1, 2) if self.transposed else gradient
        hook(WeightGradient(weight, partial(weight_product, left, right, self.segments)))
        return None


class _Experts(torch.autograd.Function):
    """down(gate * activation(up(row))), by the row's expert. Saved are rows, the result of `up`, and gates."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        gates: Tensor,
        told: _Computation,
        *parameters: Tensor | None,
    ) -> Tensor:
        ctx.told = told
        up, down, up_bias, down_bias = parameters
        if up is None or down is None:
            raise RuntimeError("experts have no weights; a bug of par-layers")
        segments, activation, route = told.segments, told.activation, told.route
        if route is not None:
            rows, gates = route.taken(rows), route.taken_gates(gates)
        if is_one_by_one(segments.rows, segments.experts, rows.device.type):
            wide, y = (rows.new_empty(segments.rows, weight.shape[1]) for weight in (up, down))
            for expert, (row, gate, inner, out) in enumerate(segments.of(rows, gates, wide, y)):
                linear_into(inner, row, up[expert], None if up_bias is None else up_bias[expert])
                linear_into(out, activation.scaled(inner, gate), down[expert])
        else:
            wide = product(rows, up, segments, up_bias)
            y = product(activation.scaled(wide, gates), down, segments)
        if down_bias is not None and told.adds_bias:
            y += scaled(of_each_row(down_bias, segments), gates)
        ctx.save_for_backward(rows, wide, gates, up, down, up_bias, down_bias)
        return y if route is None else route.summed(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: a checkpoint gives them once
        rows, wide, gates, up, down, _, down_bias = saved
        told: _Computation = ctx.told
        segments, route = told.segments, told.route
        gradient = gradient.contiguous() if route is None else route.taken(gradient)
        if told.is_later or not is_one_by_one(segments.rows, segments.experts, rows.device.type):
            of_act = product(gradient, down.transpose(1, 2), segments)
            act, of_gates, of_wide = told.middle(wide, gates, of_act)
            of_rows = product(of_wide, up.transpose(1, 2), segments) if ctx.needs_input_grad[0] else None
            of_up = told.weight_gradient(told.up_hook, up, of_wide, rows) if ctx.needs_input_grad[3] else None
            of_down = told.weight_gradient(told.down_hook, down, gradient, act) if ctx.needs_input_grad[4] else None
            of_up_bias = sums_of_rows(of_wide, segments) if ctx.needs_input_grad[5] else None
        else:
            of_rows, of_gates, of_up, of_down, of_up_bias = _one_by_one(told, saved, ctx.needs_input_grad, gradient)
        of_down_bias = None
        if down_bias is not None:
            of_down_bias = sums_of_rows(scaled(gradient, gates), segments)
            if told.adds_bias:
                of_gates += (gradient * of_each_row(down_bias, segments)).sum(1, dtype=gates.dtype)
        if route is not None:
            of_rows = None if of_rows is None else route.summed(of_rows)
            of_gates = route.placed_gates(of_gates)
        return of_rows, of_gates, None, of_up, of_down, of_up_bias, of_down_bias


def _one_by_one(
    told: _Computation, saved: Sequence[Tensor], needs: Sequence[bool], gradient: Tensor
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of rows, gates, weights and the first bias, expert by expert.

    Args:
        told: What forward was told.
        saved: What it saved.
        needs: Which of its arguments need a gradient.
        gradient: The gradient of its result, [R, h].
    """
    rows, wide, gates, up, down, up_bias, _ = saved
    needs_rows, _, _, needs_up, needs_down = needs[:5]
    of_rows = torch.empty_like(rows) if needs_rows else None
    of_gates = torch.empty_like(gates)
    of_up, of_down = torch.empty_like(up) if needs_up else None, torch.empty_like(down) if needs_down else None
    of_up_bias = None if up_bias is None else torch.empty_like(up_bias)
    start = 0
    for expert, size in enumerate(told.segments.sizes):
        mine = slice(start, start + size)
        start += size
        row, outer = rows[mine], gradient[mine]
        act, of_gates[mine], of_wide = told.middle(wide[mine], gates[mine], outer @ down[expert])
        if of_rows is not None:
            torch.mm(of_wide, up[expert], out=of_rows[mine])
        if of_up is not None:
            torch.mm(of_wide.t(), row, out=of_up[expert])
        if of_down is not None:
            torch.mm(outer.t(), act, out=of_down[expert])
        if of_up_bias is not None:
            torch.sum(of_wide, 0, out=of_up_bias[expert])
    return of_rows, of_gates, of_up, of_down, of_up_bias
