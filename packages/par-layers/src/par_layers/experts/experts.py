"""The experts of this rank: two grouped matmuls with an activation and the gate of each routed token in between."""

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
from .products import (
    Activation,
    ExpertSegments,
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
from .route import Route
from .selection import ExpertConfig

EXPERT, FEATURES = "expert_parallel", "expert_tensor"
"""Axes of the view "experts": over the first, ranks hold different experts; over the second, shards of each expert."""


class Experts(ParallelLayer):
    """Experts of this rank, with one packed parameter per weight. They compute, and do not communicate.

    The parameters stay on the meta device until `initialize` fills them or a checkpoint is loaded. With E' experts of
    this rank and f' of the f intermediate features, they are `gate_up_proj` [E', 2 f', h], gate before up (`up_proj`
    [E', f', h] for activations without a gate), `down_proj` [E', h, f'], and with a bias `gate_up_proj_bias` [E', 2 f']
    and `down_proj_bias` [E', h]. Every backward gives each parameter a gradient, zeros for experts without tokens.

    The gate of a routed token multiplies its activation, before the second matmul, so the gradient of the gate needs no
    outputs. Backward uses three saved tensors: the routed tokens, the result of the first matmul, and the gates. It
    recomputes the activation.

    Args:
        num_experts: Number of experts on all ranks, E.
        hidden_size: Features of a token, h.
        intermediate_size: Features of the activation, f.
        config: Activation, bias and weight layout; default: `ExpertConfig()`.
        grid: Coordinates of this rank. The axis `expert_parallel` partitions the experts. The axis `expert_tensor`
            shards each expert, whose outputs are then partial sums. None for one device.
        init: Init rule of the weights; default: torch.nn.Linear's, uniform in +-1/sqrt(inputs). Biases start at zero.

    Raises:
        ValueError: Experts or features do not divide by the ranks, or the activation is unknown.
    """

    weight_grad_hook: WeightGradHook | None = None
    """Receiver of deferred weight gradients, set by zero-bubble pipeline schedules; None computes them in backward."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        config: ExpertConfig | None = None,
        grid: Grid | None = None,
        init: Init | None = None,
    ) -> None:
        super().__init__()
        config = ExpertConfig() if config is None else config
        self.activation = activation_of(config.activation, interleaved=config.interleaved)
        gated, self._interleaved = self.activation.gated, config.interleaved
        if config.interleaved and not gated:
            raise ValueError("interleaved=True: the activation has no gate; pass ExpertConfig(interleaved=False)")
        self.num_experts, self.hidden_size, self.intermediate_size = num_experts, hidden_size, intermediate_size
        self.transposed = config.transposed
        shards = _ExpertShards(Grid(None) if grid is None else grid, num_experts, intermediate_size, config.transposed)
        # Ranks of one expert add their outputs, so only the first shard adds the second bias.
        self.num_local_experts, self._adds_bias = shards.local_experts, shards.rank == 0
        # Gate and up are sharded separately, so that each rank has matching features of both. Interleaved weights hold
        # pairs of neighbours, which one contiguous shard keeps together.
        wide, runs = (2 * intermediate_size, 1 if config.interleaved else 2) if gated else (intermediate_size, 1)
        up_init, down_init = (init or uniform(1 / math.sqrt(inputs)) for inputs in (hidden_size, intermediate_size))
        self._up = "gate_up_proj" if gated else "up_proj"
        self.register_parameter(self._up, shards.parameter((wide, hidden_size), up_init, cut=0, runs=runs))
        self.down_proj = shards.parameter((hidden_size, intermediate_size), down_init, cut=1)
        up_bias = shards.parameter((wide,), constant(0.0), cut=0, runs=runs) if config.bias else None
        self.register_parameter(self._up + "_bias", up_bias)
        self.down_proj_bias = shards.parameter((hidden_size,), constant(0.0)) if config.bias else None

    def forward(
        self, rows: Tensor, gates: Tensor, counts: Tensor | Sequence[int], *, route: Route | None = None
    ) -> Tensor:
        """Compute the experts' outputs, multiplied by the gates.

        Args:
            rows: Routed tokens, sorted by expert, [R, h].
            gates: Weights of the routed tokens, [R].
            counts: Number of routed tokens of each expert of this rank, int64 [E'] or a list.
            route: Internal argument of `DispatchHandle.apply` on one device. With it, rows are the tokens [M, h], gates
                are [M, k], and the result is the sum per token, [M, h].

        Returns:
            Outputs, [R, h]. With several ranks on `expert_tensor`, this rank's summand of the sum over them.

        Raises:
            ValueError: Shapes do not fit, or counts do not add up to R.
        """
        if rows.ndim != 2 or rows.shape[1] != self.hidden_size or (route is None and gates.shape != rows.shape[:1]):
            raise ValueError(
                f"rows have shape {list(rows.shape)} and gates {list(gates.shape)}: these experts need matching routed "
                f"tokens; pass [R, {self.hidden_size}] and [R]"
            )
        if len(counts) != self.num_local_experts:
            raise ValueError(
                f"counts has {len(counts)} elements: this rank has {self.num_local_experts} of {self.num_experts} "
                f"experts; pass {self.num_local_experts} counts"
            )
        if not is_compiling():
            return self._forward(rows, gates, counts, route)
        alike = isinstance(counts, list) and counts == [rows.shape[0] // len(counts)] * len(counts)
        # Equal counts make the matmuls a batch of one shape, which the compiler can trace. Anything else runs between
        # two graphs.
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
        # With a route, `rows` are tokens that the function itself gathers, so their number is not the number of routed
        # tokens.
        received = rows.shape[0] if route is None else route.splits.received
        segments = ExpertSegments(counts, received, rows, up, down)
        y: Tensor = _ExpertsFunction.apply(  # type: ignore[no-untyped-call]
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
        """Compute `_forward` for equal counts, in plain operations that torch.compile may fuse or recompute."""
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
        """Return the number of experts, in total and on this rank, and the features."""
        here = "" if self.num_local_experts == self.num_experts else f", {self.num_local_experts} on this rank"
        return f"{self.num_experts} experts{here}, {self.hidden_size}, {self.intermediate_size}"


class _ExpertShards:
    """Experts of one rank, and the features of them that it holds.

    Args:
        grid: Coordinates of the rank.
        experts: Number of experts on all ranks.
        intermediate: Features of the activation.
        transposed: Whether weights are stored as [inputs, outputs].
    """

    def __init__(self, grid: Grid, experts: int, intermediate: int, transposed: bool) -> None:
        ranks, self._parts = grid.size((EXPERT,)), grid.size((FEATURES,))
        if experts < 1 or experts % ranks:
            raise ValueError(
                f"num_experts={experts}: not a multiple of the {ranks} ranks of {EXPERT!r}; pass a multiple of {ranks} "
                "or use fewer ranks"
            )
        if intermediate % self._parts:
            near = math.ceil(intermediate / self._parts) * self._parts
            raise ValueError(
                f"intermediate_size={intermediate}: not a multiple of the {self._parts} ranks of {FEATURES!r}; pass "
                f"{near}, or use expert=dict(..., tensor=1)"
            )
        self._grid, self._experts, self._intermediate, self._transposed = grid, experts, intermediate, transposed
        self.local_experts = experts // ranks
        self.rank = grid.index((FEATURES,))

    def parameter(
        self, features: tuple[int, ...], init: Init, *, cut: int | None = None, runs: int = 1
    ) -> nn.Parameter:
        """Return a meta parameter of this rank's shape, with sharding metadata.

        Args:
            features: Outputs and inputs of one expert; only outputs for a bias.
            init: Init rule of the unsharded parameter.
            cut: Index in `features` that is sharded over `expert_tensor`; None for neither.
            runs: Number of equal blocks of that dimension that are sharded separately.
        """
        order = (0, 2, 1) if self._transposed and len(features) == 2 else range(1 + len(features))
        shape = [self._experts, *features]
        start = [self._grid.index((EXPERT,)) * self.local_experts, *(0 for _ in features)]
        size, step = [self.local_experts, *features], 0
        axes: Axes = (EXPERT,)
        if cut is not None:
            step = features[cut] // runs  # distance between runs in the unsharded parameter
            size[1 + cut] = step // self._parts
            axes = (EXPERT, FEATURES)
        local = list(size)
        local[1 + (cut or 0)] *= runs
        # The stride of a dim is the product of the local sizes of the dims behind it, in the order of memory.
        stride = [math.prod(local[dim] for dim in order if order.index(dim) > order.index(of)) for of in order]
        boxes = []
        for run in range(runs):
            if cut is not None:
                # Gate and up are two runs: a rank holds the same range of features in both.
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
    """Arguments of `_ExpertsFunction` that are not tensors.

    Args:
        activation: Function between the two matmuls.
        segments: Ranges of the routed tokens of each expert.
        adds_bias: Whether this rank adds the bias of the second matmul. One of the ranks that shard an expert does.
        up_hook: Receiver of the first weight's deferred gradient, or None.
        down_hook: Receiver of the second weight's deferred gradient, or None.
        transposed: Whether the weights are transposed views of the parameters.
        route: Permutation from tokens to routed tokens, if tokens are passed; else None.
    """

    activation: Activation
    segments: ExpertSegments
    adds_bias: bool
    up_hook: WeightGradHook | None
    down_hook: WeightGradHook | None
    transposed: bool
    route: Route | None

    @property
    def is_later(self) -> bool:
        """Whether weight gradients are deferred, so that their inputs must stay alive."""
        return self.up_hook is not None or self.down_hook is not None

    def weight_gradient(
        self, hook: WeightGradHook | None, weight: Tensor, left: Tensor, right: Tensor
    ) -> Tensor | None:
        """Return the gradient of a weight [E', n, k] from [R, n] and [R, k]; None if the hook receives it."""
        # A transposed weight is a view of the parameter. Computing the transposed product directly gives a gradient in
        # the parameter's memory layout, which autograd would otherwise copy.
        if self.transposed:
            left, right = right, left
        if hook is None:
            gradient = weight_product(left, right, self.segments)
            return gradient.transpose(1, 2) if self.transposed else gradient
        hook(WeightGradient(weight, partial(weight_product, left, right, self.segments)))
        return None


class _ExpertsFunction(torch.autograd.Function):
    """down(gate * activation(up(row))) with the weights of the row's expert.

    It saves rows, the result of `up` and gates: h + 2 f + 1 numbers per routed token. Saving outputs, too, would take
    h more.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        gates: Tensor,
        call: _Computation,
        *parameters: Tensor | None,
    ) -> Tensor:
        ctx.call = call
        up, down, up_bias, down_bias = parameters
        assert up is not None and down is not None  # noqa: S101, PT018 - for the type checker: both are parameters
        segments, activation, route = call.segments, call.activation, call.route
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
        if down_bias is not None and call.adds_bias:
            y += scaled(of_each_row(down_bias, segments), gates)
        ctx.save_for_backward(rows, wide, gates, up, down, up_bias, down_bias)
        return y if route is None else route.summed(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: a checkpoint returns saved tensors only once
        rows, wide, gates, up, down, _, down_bias = saved
        call: _Computation = ctx.call
        segments, route = call.segments, call.route
        gradient = gradient.contiguous() if route is None else route.taken(gradient)
        # Deferred weight gradients read the inputs of all experts later, so these must exist as full tensors.
        if call.is_later or not is_one_by_one(segments.rows, segments.experts, rows.device.type):
            # The gate multiplies before the second matmul, so its gradient needs the activation and not the output,
            # which is not saved.
            of_act = product(gradient, down.transpose(1, 2), segments)
            act, of_gates, of_wide = call.activation.middle(wide, gates, of_act)
            of_rows = product(of_wide, up.transpose(1, 2), segments) if ctx.needs_input_grad[0] else None
            of_up = call.weight_gradient(call.up_hook, up, of_wide, rows) if ctx.needs_input_grad[3] else None
            of_down = call.weight_gradient(call.down_hook, down, gradient, act) if ctx.needs_input_grad[4] else None
            of_up_bias = sums_of_rows(of_wide, segments) if ctx.needs_input_grad[5] else None
        else:
            of_rows, of_gates, of_up, of_down, of_up_bias = _one_by_one(call, saved, ctx.needs_input_grad, gradient)
        of_down_bias = None
        if down_bias is not None:
            of_down_bias = sums_of_rows(scaled(gradient, gates), segments)
            # Only the first shard of an expert has added the bias, so only its gates get this gradient.
            if call.adds_bias:
                of_gates += (gradient * of_each_row(down_bias, segments)).sum(1, dtype=gates.dtype)
        if route is not None:
            # One token has several rows, whose gradients are added.
            of_rows = None if of_rows is None else route.summed(of_rows)
            of_gates = route.placed_gates(of_gates)
        return of_rows, of_gates, None, of_up, of_down, of_up_bias, of_down_bias


def _one_by_one(
    call: _Computation, saved: Sequence[Tensor], needs: Sequence[bool], gradient: Tensor
) -> tuple[Tensor | None, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of rows, gates, weights and the first bias, one expert after the other.

    Args:
        call: Arguments of forward that are not tensors.
        saved: Saved tensors.
        needs: Whether each argument of forward needs a gradient.
        gradient: Gradient of the result, [R, h].
    """
    rows, wide, gates, up, down, up_bias, _ = saved
    needs_rows, _, _, needs_up, needs_down = needs[:5]
    of_rows = torch.empty_like(rows) if needs_rows else None
    of_gates = torch.empty_like(gates)
    of_up, of_down = torch.empty_like(up) if needs_up else None, torch.empty_like(down) if needs_down else None
    of_up_bias = None if up_bias is None else torch.empty_like(up_bias)
    # On a CPU, the rows of one expert stay in cache across its three matmuls.
    start = 0
    for expert, size in enumerate(call.segments.sizes):
        mine = slice(start, start + size)
        start += size
        row, outer = rows[mine], gradient[mine]
        act, of_gates[mine], of_wide = call.activation.middle(wide[mine], gates[mine], outer @ down[expert])
        if of_rows is not None:
            torch.mm(of_wide, up[expert], out=of_rows[mine])
        if of_up is not None:
            torch.mm(of_wide.t(), row, out=of_up[expert])
        if of_down is not None:
            torch.mm(outer.t(), act, out=of_down[expert])
        if of_up_bias is not None:
            torch.sum(of_wide, 0, out=of_up_bias[expert])
    return of_rows, of_gates, of_up, of_down, of_up_bias
