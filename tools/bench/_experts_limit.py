"""The least that a layer of experts can take here: its work as one bare function, with a backward by hand.

Softmax router, one sort, one exchange of counts, of rows with their gates, and of outputs, and both products of
gated experts. Nothing is checked, no autograd runs, and there is one dtype and no option: what par-layers takes beyond
it is the price of being a layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from par_layers.experts.rows import assigned, slots

ONE_BY_ONE = 256
"""Mean number of rows of an expert from which on one expert is computed after the other."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The parameters of a layer.

    Args:
        router: [E, h].
        up: Gate and up of this rank's experts, [E / p, 2 f, h].
        down: Their products down, [E / p, h, f].
        top_k: Number of experts of a token, k.
        capacity: The multiple of the mean number of rows that an expert takes of a rank; None: all of them.
    """

    router: Tensor
    up: Tensor
    down: Tensor
    top_k: int
    capacity: float | None = None


@torch.no_grad()
def forward_and_backward(x: Tensor, upstream: Tensor, weights: Weights, group: dist.ProcessGroup) -> Sequence[Tensor]:
    """One step of a layer.

    Args:
        x: Tokens [M, h].
        upstream: The gradient of the result, [M, h].
        weights: The parameters.
        group: The ranks over which experts are dealt out.

    Returns:
        The result, and the gradients of x, router, up and down.
    """
    tokens, width = x.shape
    experts, top_k = len(weights.router), weights.top_k
    scores = torch.mm(x, weights.router.t()).softmax(-1)
    best, ids = scores.topk(top_k, dim=-1)
    total = best.sum(-1, keepdim=True)
    gates = best / total
    if weights.capacity is None:
        in_order, order = ids.flatten().sort(stable=True)
        counts = torch.bincount(in_order, minlength=experts)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    else:
        each = slots(weights.capacity, tokens, top_k, experts)
        order, places, _ = assigned(ids, gates, experts, each)
        counts, places = torch.full((experts,), each), places.flatten()
    route = _Route(order // top_k, places, torch.arange(0, len(places), top_k), weights.capacity is not None)

    if group.size() == 1:
        rows, gate = route.taken(x), route.extended(gates.flatten()).index_select(0, order)
        y, pull = _experts(rows, gate, counts, weights)
        result = route.summed(y)
        of_rows, of_gates, of_up, of_down = pull(route.taken(upstream))
        of_x = route.summed(of_rows)
    else:
        arriving = counts
        if weights.capacity is None:
            arriving = torch.empty_like(counts)
            told = group.alltoall_base(arriving, counts, [], [])
        packed = torch.empty(len(order), width + 1)
        torch.index_select(route.extended(x), 0, route.tokens, out=packed[:, :width])
        packed[:, width] = route.extended(gates.flatten()).index_select(0, order)
        if weights.capacity is None:
            told.wait()
        arrived = arriving.view(group.size(), -1)
        sizes, expected = counts.view(group.size(), -1).sum(1).tolist(), arrived.sum(1).tolist()
        to_experts, to_sources = _orders(arrived, sum(expected))
        received = _exchange(packed, sizes, expected, group).index_select(0, to_experts)
        rows, gate = received[:, :width].contiguous(), received[:, width].contiguous()
        y, pull = _experts(rows, gate, arrived.sum(0), weights)
        result = route.summed(_exchange(y.index_select(0, to_sources), expected, sizes, group))
        back = _exchange(route.taken(upstream), sizes, expected, group).index_select(0, to_experts)
        of_rows, of_gates, of_up, of_down = pull(back)
        packed = torch.cat([of_rows, of_gates.unsqueeze(1)], 1).index_select(0, to_sources)
        returned = _exchange(packed, expected, sizes, group)
        of_x, of_gates = route.summed(returned[:, :width].contiguous()), returned[:, width]

    pulled = route.extended(of_gates).index_select(0, places).view(tokens, top_k)
    of_best = (pulled - (pulled * gates).sum(-1, keepdim=True)) / total
    of_scores = torch.zeros_like(scores).scatter_(1, ids, of_best)
    of_logits = scores * (of_scores - (of_scores * scores).sum(-1, keepdim=True))
    of_x.addmm_(of_logits, weights.router)
    return result, of_x, torch.mm(of_logits.t(), x), of_up, of_down


@dataclass(frozen=True)
class _Route:
    """Which rows are sent, and where their outputs are found.

    Args:
        tokens: Which token is in each sent row.
        places: Which sent row each row of a token is.
        bags: Where each token's rows begin in `places`.
        has_gaps: Whether some rows are empty and some places nowhere: they point to zeros at the end.
    """

    tokens: Tensor
    places: Tensor
    bags: Tensor
    has_gaps: bool

    def extended(self, x: Tensor) -> Tensor:
        """With those zeros."""
        return torch.cat([x, x.new_zeros(1, *x.shape[1:])]) if self.has_gaps else x

    def taken(self, x: Tensor) -> Tensor:
        """The sent rows of tokens."""
        return self.extended(x).index_select(0, self.tokens)

    def summed(self, rows: Tensor) -> Tensor:
        """For each token the sum of its rows."""
        sums: Tensor = torch.embedding_bag(self.extended(rows), self.places, self.bags, False, 0, False, None)[0]
        return sums


Pull = Callable[[Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]


def _experts(rows: Tensor, gates: Tensor, counts: Tensor, weights: Weights) -> tuple[Tensor, Pull]:
    """The outputs of rows, and the function from their gradient to those of rows, gates, up and down."""
    up, down = weights.up, weights.down
    column = gates.unsqueeze(1)
    if len(rows) >= ONE_BY_ONE * len(up):
        return _one_by_one(rows, column, counts.tolist(), up, down)
    ends = counts.cumsum(0, dtype=torch.int32)
    wide = functional.grouped_mm(rows, up.transpose(1, 2), offs=ends)
    y = functional.grouped_mm(_activation(wide, column), down.transpose(1, 2), offs=ends)

    def pull(gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        act, of_gates, of_wide = _middle(wide, column, functional.grouped_mm(gradient, down, offs=ends))
        of_down = functional.grouped_mm(gradient.t(), act, offs=ends)
        of_up = functional.grouped_mm(of_wide.t(), rows, offs=ends)
        return functional.grouped_mm(of_wide, up, offs=ends), of_gates, of_up, of_down

    return y, pull


def _one_by_one(rows: Tensor, column: Tensor, sizes: list[int], up: Tensor, down: Tensor) -> tuple[Tensor, Pull]:
    """As `_experts`, one expert after the other, whose rows stay in cache."""
    wide, y = rows.new_empty(len(rows), up.shape[1]), torch.empty_like(rows)
    parts = list(zip(rows.split(sizes), column.split(sizes), wide.split(sizes), strict=True))
    for (row, gate, inner), out, first, second in zip(parts, y.split(sizes), up, down, strict=True):
        torch.mm(row, first.t(), out=inner)
        torch.mm(_activation(inner, gate), second.t(), out=out)

    def pull(gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        of_rows, of_gates, of_up, of_down = map(torch.empty_like, (rows, column, up, down))
        lines = zip(parts, gradient.split(sizes), of_rows.split(sizes), of_gates.split(sizes), strict=True)
        for each, ((row, gate, inner), outer, of_row, of_gate) in enumerate(lines):
            act, found, of_inner = _middle(inner, gate, torch.mm(outer, down[each]))
            of_gate[:, 0] = found
            torch.mm(of_inner, up[each], out=of_row)
            torch.mm(of_inner.t(), row, out=of_up[each])
            torch.mm(outer.t(), act, out=of_down[each])
        return of_rows, of_gates.flatten(), of_up, of_down

    return y, pull


def _activation(wide: Tensor, column: Tensor) -> Tensor:
    gate, up = wide.chunk(2, 1)
    return functional.silu(gate).mul_(up).mul_(column)


def _middle(wide: Tensor, column: Tensor, of_act: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The activation times gates, and the gradients of gates and of what the activation was made of."""
    gate, up = wide.chunk(2, 1)
    silu = functional.silu(gate)
    act, of_wide = silu * up, torch.empty_like(wide)
    of_gate, of_up = of_wide.chunk(2, 1)
    of_column = (of_act * act).sum(1)
    of_act *= column
    torch.mul(of_act, silu, out=of_up)
    torch.ops.aten.silu_backward.grad_input(of_act.mul_(up), gate, grad_input=of_gate)
    return act.mul_(column), of_column, of_wide


def _orders(arrived: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Which arrived row comes at each place when they lie expert by expert, and the inverse."""
    experts = torch.arange(arrived.shape[1]).repeat(arrived.shape[0])
    to_experts = experts.repeat_interleave(arrived.flatten(), output_size=total).argsort(stable=True)
    return to_experts, torch.empty_like(to_experts).scatter_(0, to_experts, torch.arange(total))


def _exchange(x: Tensor, sizes: list[int], expected: list[int], group: dist.ProcessGroup) -> Tensor:
    received = x.new_empty(sum(expected), x.shape[1])
    group.alltoall_base(received, x, expected, sizes).wait()
    return received
