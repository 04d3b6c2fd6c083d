"""Sends rows to the ranks of their experts, begun in one autograd function and awaited in the next; and outputs back.

    Send -> (what you compute) -> Receive -> Experts -> Combine

In backward Receive begins the way back of gradients, and Send waits for it. Autograd runs nodes in the reverse order of
their making, so what was computed between `send` and `receive` is differentiated between begin and wait, too. Nothing
can be computed while outputs return, forward or backward, so Combine both begins and waits. A layer takes three
exchanges forward (counts, rows, outputs) and two backward.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling

from .._collectives import start_exchange
from .._once import once_differentiable
from .._torch_private import apart, assert_async, is_any_autocast_enabled, sums_of_bags
from . import graph
from .capacity import assigned, extended, slots
from .rows import PADDING, by_expert, inverse, sorted_by_expert


class TokenDispatcher:
    """Brings tokens to their experts, which are dealt out over the ranks of a group, and the sums of outputs back.

    Args:
        experts: Number of experts of all ranks, E; rank r of p has E / p of them, from r * E / p on.
        group: The ranks; None for one device. Of par-groups take one that nothing else uses,
            `groups.channels("expert_parallel", 1)[0]`, lest an exchange meets another collective of the same ranks.
        capacity: Number of rows that an expert takes of each rank, as a multiple of the mean, M * k / E. Those beyond
            it are dropped, the ones with the smallest gates. All splits are equal then, so that no counts are exchanged
            and the host of an accelerator reads nothing; there all ranks must have the same number of tokens. On CPUs
            the highest number counts, which ranks say beside their rows. None takes every row.

    Raises:
        ValueError: The experts do not divide by the ranks, or the capacity is not positive.

    Example:
        sent = dispatch.send(x, ids, gates)
        shared = shared_expert(x)  # while rows travel
        rows, gates, counts = sent.receive()
        y = sent.combine(experts(rows, gates, counts)) + shared
    """

    def __init__(self, experts: int, group: dist.ProcessGroup | None, *, capacity: float | None = None) -> None:
        self.experts, self.capacity = experts, capacity
        self.ranks = 1 if group is None else group.size()
        self.group = None if self.ranks == 1 else group
        self._most = 1  # on CPUs, the number of tokens that a capacity was last a multiple of: the same on all ranks
        if experts < 1 or experts % self.ranks:
            raise ValueError(
                f"{experts} experts do not divide by {self.ranks} ranks; use a multiple of {self.ranks} experts, or "
                "fewer ranks"
            )
        if capacity is not None and not capacity > 0:
            raise ValueError(f"capacity is {capacity}; give a positive multiple of the mean, or None to drop nothing")

    def __deepcopy__(self, memo: dict[int, Any]) -> "TokenDispatcher":
        """Itself: copies of a model work on the same ranks."""
        return self

    def send(
        self, x: Tensor, ids: Tensor, gates: Tensor, *, tokens: int | None = None, priorities: Tensor | None = None
    ) -> "DispatchHandle":
        """Begins to send this rank's rows. Every rank of the group must call it, one without tokens too.

        Args:
            x: This rank's tokens, [M, h].
            ids: The experts of each token, int64 [M, k].
            gates: Their weights, [M, k]; narrower ones than x are cast to its dtype.
            tokens: Where ranks have different numbers of tokens, the one that a capacity is a multiple of; default: M.
                It must be the same on all ranks of accelerators; on CPUs the highest counts.
            priorities: By what rows compete for the slots of a capacity, [M, k]; default: the gates. Where this may run
                again in backward give `Routing.priorities`, so that each row has the slot that it had.

        Returns:
            What is on its way. With a capacity torch.compile traces all of it, through `receive`, `through` and
            `combine`; without one a dispatch lies between two graphs, since rows are as many as routing makes them.

        Raises:
            ValueError: Shapes do not fit; or some rank has ids out of range, and then every rank raises.
        """
        if x.ndim != 2 or ids.ndim != 2 or ids.shape != gates.shape or ids.shape[0] != x.shape[0]:
            raise ValueError(
                f"x is {list(x.shape)}, ids are {list(ids.shape)}, gates {list(gates.shape)}; they must be [M, h], "
                "[M, k] and [M, k]"
            )
        if priorities is not None and priorities.shape != ids.shape:
            raise ValueError(f"priorities are {list(priorities.shape)} and ids {list(ids.shape)}; they must be alike")
        if gates.dtype.itemsize < x.dtype.itemsize:
            gates = gates.to(x.dtype)
        if self.capacity is not None:
            most = len(x) if tokens is None else tokens
            ranked = gates if priorities is None else priorities
            if is_compiling():
                placed = self._placed(ids, ranked, self._each(ids, most))
                return _GraphDispatchHandle(x, gates, *placed, experts=self.experts, group=self.group)
            if self.group is None or x.device.type != "cpu" or type(x) is not Tensor:
                return self._sent(x, gates, self._slots(x, ids, gates, most, ranked))
            return self._send_agreed(x, ids, gates, most, ranked)
        return apart(self._send_all, x, ids, gates) if is_compiling() else self._send_all(x, ids, gates)

    def _send_all(self, x: Tensor, ids: Tensor, gates: Tensor) -> "DispatchHandle":
        """Every row travels."""
        return self._sent(x, gates, self._rows(x, ids, gates))

    def _send_agreed(self, x: Tensor, ids: Tensor, gates: Tensor, own: int, priorities: Tensor) -> "DispatchHandle":
        """As many rows travel to every expert, by the highest number of tokens that a rank has.

        Splits of different sizes would end the process. So all ranks send as many rows as last time, whatever they
        have, and say beside them how many tokens there are. Where the highest number is another one they all know, and
        send once more.

        Args:
            x: This rank's tokens.
            ids: Their experts.
            gates: Their weights.
            own: How many tokens this rank says that it has.
            priorities: By what rows compete.
        """
        before = self._most
        sent = self._sent(x, gates, self._slots(x, ids, gates, before, priorities, max(own, 1)))

        def again(heard: int) -> DispatchHandle | None:
            if heard == before:
                return None
            self._most = heard
            return self._sent(x, gates, self._slots(x, ids, gates, heard, priorities))

        sent.again = again
        return sent

    def _each(self, ids: Tensor, most: int) -> int:
        """Number of slots of an expert for each rank, where a rank has at most so many tokens."""
        return slots(self.capacity or 0, most, ids.shape[1], self.experts)

    def _placed(self, ids: Tensor, priorities: Tensor, each: int) -> tuple[Tensor, Tensor, Tensor]:
        """Which row is in each slot, in which slot each row is, and how many are dropped."""
        assert_async(((ids >= 0) & (ids < self.experts)).all(), out_of_range([], self.experts))
        return assigned(ids, priorities.detach(), self.experts, each)

    def _slots(
        self, x: Tensor, ids: Tensor, gates: Tensor, most: int, priorities: Tensor, own: int | None = None
    ) -> "Route":
        """As many rows travel to every expert; `most` is the number of tokens that this is a multiple of."""
        top_k, local, each = ids.shape[1], self.experts // self.ranks, self._each(ids, most)
        order, places, dropped = self._placed(ids, priorities, each)
        sizes = [local * each] * self.ranks
        counts = torch.full((local,), each * self.ranks, dtype=torch.int64, device="cpu")
        splits = Splits(sizes, sizes, sum(sizes), counts)
        if self.ranks > 1 and local > 1:
            arrived = torch.arange(sum(sizes), device=x.device)
            splits.to_experts = arrived.view(self.ranks, local, each).transpose(0, 1).flatten()
            splits.to_sources = arrived.view(local, self.ranks, each).transpose(0, 1).flatten()
        return Route(
            x.shape[1],
            gates.dtype,
            order // top_k,
            order,
            places,
            settle=lambda: splits,
            group=self.group,
            dropped=dropped,
            own=own,
        )

    def _sent(self, x: Tensor, gates: Tensor, route: "Route") -> "DispatchHandle":
        if self.group is None:
            return DispatchHandle(route, x, gates)
        return DispatchHandle(route, _Send.apply(x, gates, route))  # type: ignore[no-untyped-call]

    def _rows(self, x: Tensor, ids: Tensor, gates: Tensor) -> "Route":
        """Every row travels; the exchange of their numbers has begun."""
        order, counts = sorted_by_expert(ids, self.experts)
        if self.group is not None:
            settle = exchange_counts(counts.view(self.ranks, -1), self.group)
        else:
            if ids.device.type != "cpu":
                assert_async(counts[0] >= 0, out_of_range([], self.experts))
            elif min(counts.tolist()) < 0:
                raise ValueError(out_of_range([dist.get_rank() if dist.is_initialized() else 0], self.experts))
            splits = Splits([], [], ids.numel(), counts)

            def settle() -> Splits:
                return splits

        places = inverse(order).view(ids.shape)
        return Route(x.shape[1], gates.dtype, order // ids.shape[1], order, places, settle=settle, group=self.group)


def out_of_range(ranks: list[int], experts: int) -> str:
    """What is wrong with ids of these ranks of the world; of none, where only the device knows."""
    who = f"rank {', '.join(map(str, ranks))}" if ranks else "this rank"
    return (
        f"ids of {who} are none of 0 .. {experts - 1}; a router gives such ids where its scores are NaN: look for the "
        "first NaN of its input"
    )


class DispatchHandle:
    """Rows on their way: `receive` waits for those of this rank's experts, `combine` sends their outputs back.

    Args:
        route: How they travel.
        x: Stands for what is on its way; where nothing is exchanged, the tokens themselves.
        gates: Where nothing is exchanged, the tokens' gates.
    """

    def __init__(self, route: "Route", x: Tensor, gates: Tensor | None = None) -> None:
        self._route, self._x, self._gates = route, x, gates
        self.again: Callable[[int], DispatchHandle | None] | None = None
        """Sends once more, where the highest number of tokens of a rank is not the one for which was sent."""

    @property
    def dropped(self) -> Tensor | None:
        """Number of this rank's rows that a capacity dropped, int64 []; None without one. It may wait for the rows."""
        self._agree()
        return self._route.dropped

    def _agree(self) -> None:
        """Makes sure, once, that these rows were sent for the number of tokens that ranks have now."""
        again, self.again = self.again, None
        sent = None if again is None else again(self._route.heard())
        if sent is not None:
            self._route, self._x = sent._route, sent._x

    def receive(self) -> tuple[Tensor, Tensor, Tensor]:
        """Waits for the rows of this rank's experts.

        Returns:
            The rows [R, h], expert by expert; their gates [R]; and the number of rows of each of this rank's experts,
            int64 [E / p], in the host's memory unless nothing was exchanged. Within a graph of torch.compile these are
            a list.
        """
        return apart(self._receive) if is_compiling() else self._receive()

    def _receive(self) -> tuple[Tensor, Tensor, Tensor]:
        self._agree()
        if self._gates is None:
            rows, gates = _Receive.apply(self._x, self._route)  # type: ignore[no-untyped-call]
        else:
            rows, gates = _Take.apply(self._x, self._gates, self._route)  # type: ignore[no-untyped-call]
        return rows, gates, self._route.splits.counts

    def through(self, experts: Callable[..., Tensor]) -> Tensor:
        """What `combine(experts(*receive()))` gives; where nothing is exchanged, in one autograd function.

        Args:
            experts: This rank's `Experts`.
        """
        # Autocast casts rows: those of a token are added in the wider dtype, as the pieces do.
        if self._gates is None or is_compiling() or is_any_autocast_enabled():
            return self.combine(experts(*self.receive()))
        return experts(self._x, self._gates, self._route.splits.counts, route=self._route)

    def combine(self, rows: Tensor) -> Tensor:
        """Brings outputs back to their tokens and adds those of each token, in the order of its ids.

        Args:
            rows: The outputs [R, h], in the order of the received rows, already multiplied by their gates.

        Returns:
            A sum for each token, [M, h]; zero for one whose rows were all dropped.

        Raises:
            ValueError: There are more or fewer rows than were received.
        """
        return apart(self._combine, rows) if is_compiling() else self._combine(rows)

    def _combine(self, rows: Tensor) -> Tensor:
        route = self._route
        if rows.ndim != 2 or rows.shape[0] != route.splits.received:
            raise ValueError(f"the outputs are {list(rows.shape)}, but {route.splits.received} rows were received")
        if self._gates is not None:
            summed: Tensor = _Sum.apply(rows, route)  # type: ignore[no-untyped-call]
        else:
            summed = _Combine.apply(rows, route)  # type: ignore[no-untyped-call]
        return summed


class _GraphDispatchHandle(DispatchHandle):
    """Rows on their way in a graph of torch.compile, with a capacity.

    Args:
        x: This rank's tokens, [M, h].
        gates: Their weights, [M, k].
        order: Which row, counted over [M, k], is in each slot, int64 [E * C]; M * k in an empty one.
        places: In which slot each row is, int64 [M, k]; E * C where it is dropped.
        dropped: Number of dropped rows, int64 [].
        experts: Number of experts of all ranks, E.
        group: The ranks; None for one device.
    """

    def __init__(
        self,
        x: Tensor,
        gates: Tensor,
        order: Tensor,
        places: Tensor,
        dropped: Tensor,
        *,
        experts: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._dropped = dropped
        self._ranks = 1 if group is None else group.size()
        self._name = "" if group is None else group.group_name
        self._local, self._each = experts // self._ranks, order.shape[0] // experts
        self._order, self._places = order, places
        self._width, self._dtype = x.shape[1], gates.dtype
        self._filled = graph.filled(x, gates, order, places)
        self._started = None if group is None else graph.begin(*self._filled, self._ranks, self._name)

    @property
    def dropped(self) -> Tensor:
        return self._dropped

    def receive(self) -> tuple[Tensor, Tensor, list[int]]:  # type: ignore[override]  # what a graph can hold
        rows, gates = self._filled
        if self._started is not None:
            rows, gates = graph.arrive(self._started, self._width, self._dtype, self._ranks, self._name)
            rows = rows.view(self._ranks, self._local, self._each, self._width).transpose(0, 1).flatten(0, 2)
            gates = gates.view(self._ranks, self._local, self._each).transpose(0, 1).flatten()
        return rows, gates, [self._ranks * self._each] * self._local

    def through(self, experts: Callable[..., Tensor]) -> Tensor:
        return self.combine(experts(*self.receive()))

    def combine(self, rows: Tensor) -> Tensor:
        if self._ranks > 1:
            by_source = rows.view(self._local, self._ranks, self._each, self._width).transpose(0, 1).flatten(0, 2)
            rows = graph.back(by_source, self._ranks, self._name)
        return graph.summed(rows, self._order, self._places)


class Flight:
    """An exchange that one autograd function begins and the next waits for, forward and backward.

    What is unfinished cannot be the gradient itself, since autograd looks at its shape.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group.group_name  # a graph that holds a group aborts a process that ends before the graph
        self._finish: Callable[[], Tensor] | None = None

    def begin(self, x: Tensor, sizes: list[int], expected: list[int]) -> None:
        """Begins to send `sizes` rows of x to the ranks, and to receive `expected` from them."""
        self._finish = start_exchange(x, sizes, expected, self._group)

    def finish(self) -> Tensor:
        """Waits for the rows that arrive."""
        finish, self._finish = self._finish, None
        if finish is None:
            raise RuntimeError("an exchange of rows is awaited that has not begun; a bug of par-layers")
        return finish()

    def wait(self) -> Tensor:
        """Waits for the rows that arrive, which `finish` gives once more."""
        arrived = self.finish()
        self._finish = lambda: arrived
        return arrived

    def exchange(self, x: Tensor, sizes: list[int], expected: list[int]) -> Tensor:
        """Both at once: the rows that arrive."""
        self.begin(x, sizes, expected)
        return self.finish()


@dataclass(eq=False)
class Splits:
    """How many rows travel between which ranks.

    Args:
        sizes: Number of rows that this rank sends to each rank.
        expected: Number of rows that it receives of each rank.
        received: Number of rows that its experts have.
        counts: Number of rows of each of its experts, int64 [E / p].
        to_experts: Which arrived row comes at each place when they lie expert by expert; None where they do.
        to_sources: The inverse.
    """

    sizes: list[int]
    expected: list[int]
    received: int
    counts: Tensor
    to_experts: Tensor | None = None
    to_sources: Tensor | None = None


def exchange_counts(counts: Tensor, group: dist.ProcessGroup) -> Callable[[], Splits]:
    """Begins to tell every rank how many rows its experts are sent.

    Args:
        counts: Number of rows for each expert, int64 [p, E / p]; all negative where this rank's ids are out of range,
            which is how the others hear of that without another collective.
        group: The ranks.

    Returns:
        A function that waits, once, and reads the numbers of all splits together into the host's memory. On every rank
        it raises ValueError if a rank's ids are out of range.
    """
    experts = counts.numel()
    ones = [1] * len(counts)
    finish = start_exchange(counts, ones, ones, group.group_name)

    def settle() -> Splits:
        arriving = finish()
        leaving_rows, arriving_rows = torch.stack((counts, arriving)).tolist()
        wrong = [rank for rank, row in enumerate(arriving_rows) if min(row) < 0]
        if wrong:
            raise ValueError(out_of_range([dist.get_global_rank(group, rank) for rank in wrong], experts))
        expected = [sum(row) for row in arriving_rows]
        total = sum(expected)
        to_experts = by_expert(arriving, total)
        return Splits(
            [sum(row) for row in leaving_rows],
            expected,
            total,
            torch.tensor([sum(column) for column in zip(*arriving_rows, strict=True)], device="cpu"),
            to_experts,
            None if to_experts is None else inverse(to_experts),
        )

    return settle


class Route:
    """How the rows of one dispatch travel.

    Args:
        width: Features of a row, h.
        dtype: The dtype of gates.
        tokens: Which token is in each sent row, int64 [n]; M in an empty slot.
        order: Which row, counted over [M, k], is in each sent row, int64 [n]; M * k in an empty slot.
        places: Which sent row each row is, int64 [M, k]; n where it is dropped.
        settle: Gives the splits, for which it may have to wait.
        group: The ranks; None for one device.
        dropped: Number of dropped rows, int64 []; None where no row is dropped and no slot empty.
        own: Number of tokens that this rank says beside its rows that it has; None says nothing.
    """

    def __init__(
        self,
        width: int,
        dtype: torch.dtype,
        tokens: Tensor,
        order: Tensor,
        places: Tensor,
        *,
        settle: Callable[[], Splits],
        group: dist.ProcessGroup | None,
        dropped: Tensor | None = None,
        own: int | None = None,
    ) -> None:
        self.width, self.dtype, self.own = width, dtype, own
        self.tokens, self.order, self.places, self.dropped = tokens, order, places, dropped
        self._settle = settle
        if group is not None:
            self.flight = Flight(group)

    @cached_property
    def _bags(self) -> Tensor:
        """Where each token's rows begin in `places`, int64 [M]."""
        return torch.arange(0, self.places.numel(), self.places.shape[1], device=self.places.device)

    @cached_property
    def splits(self) -> Splits:
        """How many rows travel between which ranks; the first use may wait for other ranks."""
        return self._settle()

    def taken(self, x: Tensor) -> Tensor:
        """The sent rows [n, h] of tokens [M, h], zeros in empty slots."""
        return self._extended(x).index_select(0, self.tokens)

    def taken_gates(self, gates: Tensor) -> Tensor:
        """The gates [n] of sent rows, zero in empty slots."""
        return self._extended(gates.flatten()).take(self.order)

    def summed(self, rows: Tensor) -> Tensor:
        """For each token the sum of its rows, [M, h] of [n, h]; the inverse of a gather, and so without `index_add`."""
        if not self.places.numel():
            return rows.new_zeros(len(self.places), rows.shape[1])
        return sums_of_bags(self._extended(rows), self.places.flatten(), self._bags)

    def placed_gates(self, gates: Tensor) -> Tensor:
        """The gates' gradients [M, k] of those of sent rows [n]."""
        return self._extended(gates).take(self.places)

    def _extended(self, x: Tensor) -> Tensor:
        """With zeros at the end, which empty slots and dropped rows point to."""
        return x if self.dropped is None else extended(x)

    def pack(self, x: Tensor, gates: Tensor) -> Tensor:
        """The sent rows of tokens [M, h], with their gates of [M, k] beside them: [n, h + padding]."""
        packed = self._packed(self._extended(x), self.tokens, self.taken_gates(gates))
        if self.own is not None:
            said = torch.tensor([self.own], dtype=torch.int64, device="cpu").view(packed.dtype)
            packed[:, -len(said) :] = said
        return packed

    def heard(self) -> int:
        """The highest number of tokens that a rank says it has, as a row of each rank tells it; waits for them."""
        packed = self.flight.wait()
        of_ranks = packed[:: self.splits.expected[0], -(8 // packed.dtype.itemsize) :]
        return int(of_ranks.contiguous().view(torch.int64).max())

    def pack_back(self, rows: Tensor, gates: Tensor) -> Tensor:
        """What was received, rows [R, h] and gates [R], in the order of sources: [R, h + padding]."""
        index = self.splits.to_sources
        return self._packed(rows, index, gates if index is None else gates.index_select(0, index))

    def _packed(self, x: Tensor, index: Tensor | None, gates: Tensor) -> Tensor:
        number, size = gates.numel(), x.dtype.itemsize
        packed = x.new_empty(number, self.width + PADDING // size)
        if index is None:
            packed[:, : self.width] = x
        else:
            torch.index_select(x, 0, index, out=packed[:, : self.width])
        wide = gates.dtype.itemsize // size
        packed[:, self.width : self.width + wide] = gates.contiguous().view(x.dtype).view(number, wide)
        return packed

    def gates_of(self, packed: Tensor, index: Tensor | None) -> Tensor:
        """The gates [n] beside rows, in the order of an index."""
        wide = self.dtype.itemsize // packed.dtype.itemsize
        bits = packed[:, self.width : self.width + wide]
        bits = bits.contiguous() if index is None else bits.index_select(0, index)
        return bits.view(self.dtype).flatten()


class _Take(torch.autograd.Function):
    """The rows of one device, expert by expert."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Tensor, route: Route) -> tuple[Tensor, Tensor]:
        ctx.route = route
        return route.taken(x), route.taken_gates(gates)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, None]:
        return ctx.route.summed(rows), ctx.route.placed_gates(gates), None


class _Sum(torch.autograd.Function):
    """The sums of one device's outputs."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return route.summed(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.route.taken(gradient), None


class _Send(torch.autograd.Function):
    """Packs and begins; backward waits for gradients of rows and gates. The result stands for what is on its way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Tensor, route: Route) -> Tensor:
        ctx.route = route
        packed = route.pack(x, gates)
        splits = route.splits
        route.flight.begin(packed, splits.sizes, splits.expected)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor, Tensor, None]:
        del token
        route: Route = ctx.route
        packed = route.flight.finish()
        rows, gates = packed[:, : route.width], route.gates_of(packed, None)
        return route.summed(rows), route.placed_gates(gates), None


class _Receive(torch.autograd.Function):
    """Waits for rows and brings them into the order of experts; backward begins the way back of their gradients."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, route: Route) -> tuple[Tensor, Tensor]:
        del token
        ctx.route = route
        packed, index = route.flight.finish(), route.splits.to_experts
        rows = packed[:, : route.width]
        return rows.contiguous() if index is None else rows.index_select(0, index), route.gates_of(packed, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor, gates: Tensor) -> tuple[Tensor, None]:
        route: Route = ctx.route
        splits = route.splits
        route.flight.begin(route.pack_back(rows, gates), splits.expected, splits.sizes)
        return rows.new_zeros(0), None


class _Combine(torch.autograd.Function):
    """Sends outputs back and adds those of each token; backward sends its gradient to their experts."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route) -> Tensor:
        ctx.route = route
        splits = route.splits
        arranged = rows if splits.to_sources is None else rows.index_select(0, splits.to_sources)
        return route.summed(route.flight.exchange(arranged, splits.expected, splits.sizes))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        route: Route = ctx.route
        splits = route.splits
        arrived = route.flight.exchange(route.taken(gradient), splits.sizes, splits.expected)
        return arrived if splits.to_experts is None else arrived.index_select(0, splits.to_experts), None
