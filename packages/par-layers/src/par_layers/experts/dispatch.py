"""The token dispatcher: routed tokens travel to the ranks of their experts, and sums of outputs travel back.

    Send -> (your computation) -> Receive -> Experts -> Combine

Forward begins an all-to-all in Send and waits for it in Receive. Backward begins the all-to-all of the gradients in
Receive and waits in Send. Autograd runs nodes in reverse order of their creation, so the backward of your computation
also overlaps. Nothing can be computed while outputs return, so Combine begins and waits. A layer takes three
all-to-alls in forward (counts, rows, outputs) and two in backward.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling

from .._once import once_differentiable
from .._torch_private import apart, assert_async, is_any_autocast_enabled
from . import graph
from .route import Route, Splits, exchange_counts, out_of_range
from .rows import assigned, inverse, slots, sorted_by_expert


class TokenDispatcher:
    """Dispatcher of tokens to the experts of a group's ranks, which also combines their outputs.

    Args:
        num_experts: Number of experts on all ranks, E; rank r of p has E / p of them, from r * E / p on.
        group: Process group of the ranks; None for one device. Use a communicator that no other code uses, such as
            `groups.channels("expert_parallel", 1)[0]`, so that an exchange never meets another collective.
        capacity_factor: Capacity of an expert for each rank, as a multiple of the mean M * k / E. Routed tokens beyond
            it are dropped, those with the smallest gates first. Then all splits are equal: ranks exchange no counts,
            and the host does not synchronize with an accelerator, where all ranks must have the same number of tokens.
            On CPUs the highest number of tokens counts. None drops nothing.
        by_source: Whether handles count the rows of each expert from each rank, int64 [E / p, p] in place of [E / p].
            The rows of an expert are sorted by rank.

    Raises:
        ValueError: The experts do not divide by the ranks, or the capacity factor is not positive.

    Example:
        handle = dispatcher.dispatch(x, ids, gates)
        shared = shared_expert(x)  # overlaps with the exchange
        rows, gates, counts = handle.wait()
        y = handle.combine(experts(rows, gates, counts)) + shared
    """

    def __init__(
        self,
        num_experts: int,
        group: dist.ProcessGroup | None,
        *,
        capacity_factor: float | None = None,
        by_source: bool = False,
    ) -> None:
        self.num_experts, self.capacity_factor = num_experts, capacity_factor
        self._by_source = by_source
        self.ranks = 1 if group is None else group.size()
        self.group = None if self.ranks == 1 else group
        self._most = 1  # on CPUs, the highest number of tokens of any rank in the last dispatch; the same on all ranks
        if num_experts < 1 or num_experts % self.ranks:
            # Rank i holds the i-th block of experts, so all ranks need the same number.
            raise ValueError(
                f"num_experts={num_experts}: not a multiple of the {self.ranks} ranks of the group; pass a multiple of "
                f"{self.ranks}, or use fewer ranks"
            )
        if capacity_factor is not None and not capacity_factor > 0:
            raise ValueError(f"capacity_factor={capacity_factor}: it must be positive; pass None to drop no tokens")

    def __deepcopy__(self, memo: dict[int, Any]) -> "TokenDispatcher":
        """Return the dispatcher itself: copies of a model use the same ranks."""
        return self

    def dispatch(
        self, x: Tensor, ids: Tensor, gates: Tensor, *, tokens: int | None = None, priorities: Tensor | None = None
    ) -> "DispatchHandle":
        """Begin to send this rank's tokens to their experts. Every rank of the group must call it, also without tokens.

        Args:
            x: Tokens of this rank, [M, h].
            ids: Expert ids of each token, int64 [M, k].
            gates: Weights of the experts, [M, k]. Gates that are narrower than x are cast to its dtype.
            tokens: Number of tokens for the capacity, if ranks have different numbers; default: M. On accelerators it
                must be the same on all ranks.
            priorities: Priorities of the routed tokens for the slots of a capacity, [M, k]; default: the gates. Pass
                `Routing.priorities` under activation checkpointing, so that the recomputation drops the same tokens.

        Returns:
            Handle of the exchange. With a capacity, torch.compile traces the whole dispatch into one graph. Without
            one the graph breaks, because the number of rows depends on the routing.

        Raises:
            ValueError: Shapes do not fit. Or some rank has ids out of range, and then every rank raises.
        """
        if x.ndim != 2 or ids.ndim != 2 or ids.shape != gates.shape or ids.shape[0] != x.shape[0]:
            raise ValueError(
                f"x has shape {list(x.shape)}, ids {list(ids.shape)}, gates {list(gates.shape)}: they do not fit; pass "
                "[M, h], [M, k] and [M, k]"
            )
        if priorities is not None and priorities.shape != ids.shape:
            raise ValueError(f"priorities has shape {list(priorities.shape)}: ids has another; pass {list(ids.shape)}")
        # Gates travel as elements of the rows' dtype, so they must be at least as wide.
        if gates.dtype.itemsize < x.dtype.itemsize:
            gates = gates.to(x.dtype)
        if self.capacity_factor is not None:
            # All ranks must use the same number of slots, so the caller passes the highest number of tokens of any rank
            # if ranks may differ.
            most = len(x) if tokens is None else tokens
            ranked = gates if priorities is None else priorities
            if is_compiling():
                placed = self._placed(ids, ranked, self._each(ids, most))
                return _GraphDispatchHandle(x, gates, *placed, experts=self.num_experts, group=self.group)
            # On accelerators ranks trust `tokens`: comparing the numbers would make the host wait for the device. Fake
            # tensors have no numbers to compare.
            if self.group is None or x.device.type != "cpu" or type(x) is not Tensor:
                return self._handle(x, gates, self._slots(x, ids, gates, most, ranked))
            return self._dispatch_agreed(x, ids, gates, most, ranked)
        return apart(self._dispatch_all, x, ids, gates) if is_compiling() else self._dispatch_all(x, ids, gates)

    def _dispatch_all(self, x: Tensor, ids: Tensor, gates: Tensor) -> "DispatchHandle":
        """Dispatch every routed token, without a capacity."""
        return self._handle(x, gates, self._rows(x, ids, gates))

    def _dispatch_agreed(self, x: Tensor, ids: Tensor, gates: Tensor, own: int, priorities: Tensor) -> "DispatchHandle":
        """Dispatch with a capacity whose slots are a multiple of the highest number of tokens of any rank.

        Args:
            x: Tokens of this rank, [M, h].
            ids: Expert ids, [M, k].
            gates: Weights of the experts, [M, k].
            own: Number of tokens that this rank reports.
            priorities: Priorities for the slots, [M, k].
        """
        # gloo aborts the process when split sizes differ. So all ranks use the number of the last dispatch, and send
        # their own number with the rows. If the highest one has changed, every rank sees that and dispatches again.
        before = self._most
        # The slots follow the number of the last dispatch, and the message carries this rank's own number.
        handle = self._handle(x, gates, self._slots(x, ids, gates, before, priorities, max(own, 1)))

        def again(heard: int) -> DispatchHandle | None:
            if heard == before:
                return None
            self._most = heard
            return self._handle(x, gates, self._slots(x, ids, gates, heard, priorities))

        handle.again = again
        return handle

    def _each(self, ids: Tensor, most: int) -> int:
        """Return the number of slots of an expert for each rank, given the highest number of tokens of any rank."""
        return slots(self.capacity_factor or 0, most, ids.shape[1], self.num_experts)

    def _placed(self, ids: Tensor, priorities: Tensor, each: int) -> tuple[Tensor, Tensor, Tensor]:
        """Assign routed tokens to slots, as `capacity.assigned` does, after a check of the ids on the device."""
        assert_async(((ids >= 0) & (ids < self.num_experts)).all(), out_of_range([], self.num_experts))
        return assigned(ids, priorities.detach(), self.num_experts, each)

    def _slots(
        self, x: Tensor, ids: Tensor, gates: Tensor, most: int, priorities: Tensor, own: int | None = None
    ) -> Route:
        """Return the route of a dispatch with a capacity; `most` is the highest number of tokens of any rank."""
        top_k, local, each = ids.shape[1], self.num_experts // self.ranks, self._each(ids, most)
        order, places, dropped = self._placed(ids, priorities, each)
        sizes = [local * each] * self.ranks
        # With a capacity every expert receives the same number of rows, so no counts are exchanged and the host never
        # waits.
        counts = torch.full((local,), each * self.ranks, dtype=torch.int64, device="cpu")
        splits = Splits(sizes, sizes, sum(sizes), counts)
        # With one local expert or one rank, the order of arrival is the order of experts already.
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

    def _handle(self, x: Tensor, gates: Tensor, route: Route) -> "DispatchHandle":
        if self.group is None:
            return DispatchHandle(route, x, gates)
        return DispatchHandle(route, _Send.apply(x, gates, route))  # type: ignore[no-untyped-call]

    def _rows(self, x: Tensor, ids: Tensor, gates: Tensor) -> Route:
        """Return the route of a dispatch without a capacity, and begin the exchange of counts."""
        order, counts = sorted_by_expert(ids, self.num_experts)
        if self.group is not None:
            settle = exchange_counts(counts.view(self.ranks, -1), self.group, by_source=self._by_source)
        else:
            if ids.device.type != "cpu":
                assert_async(counts[0] >= 0, out_of_range([], self.num_experts))
            elif min(counts.tolist()) < 0:
                raise ValueError(out_of_range([dist.get_rank() if dist.is_initialized() else 0], self.num_experts))
            splits = Splits([], [], ids.numel(), counts)

            def settle() -> Splits:
                return splits

        # `places` is where the row of each token and each choice stands in the sorted order.
        places = inverse(order).view(ids.shape)
        return Route(x.shape[1], gates.dtype, order // ids.shape[1], order, places, settle=settle, group=self.group)


class DispatchHandle:
    """Handle of a dispatch: `wait` returns the tokens of this rank's experts, `combine` sends their outputs back.

    Args:
        route: Permutation and exchange of the routed tokens.
        x: Result of `_Send`, which links the handle into the autograd graph; the tokens themselves on one device.
        gates: Gates of the tokens on one device; else None.
    """

    def __init__(self, route: Route, x: Tensor, gates: Tensor | None = None) -> None:
        self._route, self._x, self._gates = route, x, gates
        self.again: Callable[[int], DispatchHandle | None] | None = None
        """Function that dispatches again if the highest number of tokens of any rank has changed."""

    @property
    def dropped(self) -> Tensor | None:
        """Number of this rank's dropped routed tokens, int64 []; None without a capacity. It may wait for the rows."""
        self._agree()
        return self._route.dropped

    def _agree(self) -> None:
        """Dispatch again, at most once, if the highest number of tokens of any rank has changed."""
        again, self.again = self.again, None
        # Every rank of the group hears the same number, so all of them dispatch again, or none.
        handle = None if again is None else again(self._route.heard())
        if handle is not None:
            self._route, self._x = handle._route, handle._x

    def wait(self) -> tuple[Tensor, Tensor, Tensor]:
        """Wait for the routed tokens of this rank's experts.

        Returns:
            Routed tokens [R, h], sorted by expert; their gates [R]; and the number of tokens of each expert of this
            rank, int64 [E / p] on the CPU (on one device: on the device of x). In a graph of torch.compile the counts
            are a list.
        """
        return apart(self._receive) if is_compiling() else self._receive()

    def _receive(self) -> tuple[Tensor, Tensor, Tensor]:
        self._agree()
        if self._gates is None:
            rows, gates = _Receive.apply(self._x, self._route)  # type: ignore[no-untyped-call]
        else:
            rows, gates = _LocalDispatch.apply(self._x, self._gates, self._route)  # type: ignore[no-untyped-call]
        return rows, gates, self._route.splits.counts

    def apply(self, experts: Callable[..., Tensor]) -> Tensor:
        """Return `combine(experts(*wait()))`, on one device in a single autograd function.

        Args:
            experts: `Experts` of this rank.
        """
        # Autocast casts rows inside the experts, but tokens must be summed in the wider dtype, as the pieces do.
        if self._gates is None or is_compiling() or is_any_autocast_enabled():
            return self.combine(experts(*self.wait()))
        return experts(self._x, self._gates, self._route.splits.counts, route=self._route)

    def combine(self, rows: Tensor) -> Tensor:
        """Send outputs back and sum those of each token, in the order of its ids.

        Args:
            rows: Outputs of the experts, multiplied by the gates, in the order of `wait`, [R, h].

        Returns:
            Sum of each token, [M, h]; zero for a token whose experts all dropped it.

        Raises:
            ValueError: The number of rows is not R.
        """
        return apart(self._combine, rows) if is_compiling() else self._combine(rows)

    def _combine(self, rows: Tensor) -> Tensor:
        route = self._route
        if rows.ndim != 2 or rows.shape[0] != route.splits.received:
            raise ValueError(
                f"rows has shape {list(rows.shape)}: {route.splits.received} tokens were received; pass "
                f"[{route.splits.received}, h]"
            )
        if self._gates is not None:
            summed: Tensor = _LocalCombine.apply(rows, route)  # type: ignore[no-untyped-call]
        else:
            summed = _Combine.apply(rows, route)  # type: ignore[no-untyped-call]
        return summed


class _GraphDispatchHandle(DispatchHandle):
    """Handle of a dispatch with a capacity in a graph of torch.compile.

    Args:
        x: Tokens of this rank, [M, h].
        gates: Weights of the experts, [M, k].
        order: Index in the flattened [M, k] of each slot, int64 [E * C]; M * k for an empty slot.
        places: Slot of each routed token, int64 [M, k]; E * C if it is dropped.
        dropped: Number of dropped routed tokens, int64 [].
        experts: Number of experts on all ranks, E.
        group: Process group; None for one device.
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

    def wait(self) -> tuple[Tensor, Tensor, list[int]]:  # type: ignore[override]  # a graph holds no host tensor
        rows, gates = self._filled
        if self._started is not None:
            rows, gates = graph.arrive(self._started, self._width, self._dtype, self._ranks, self._name)
            # Slots arrive by source and then by expert; a transpose sorts them, because all groups have the same size.
            rows = rows.view(self._ranks, self._local, self._each, self._width).transpose(0, 1).flatten(0, 2)
            gates = gates.view(self._ranks, self._local, self._each).transpose(0, 1).flatten()
        return rows, gates, [self._ranks * self._each] * self._local

    def apply(self, experts: Callable[..., Tensor]) -> Tensor:
        return self.combine(experts(*self.wait()))

    def combine(self, rows: Tensor) -> Tensor:
        if self._ranks > 1:
            by_source = rows.view(self._local, self._ranks, self._each, self._width).transpose(0, 1).flatten(0, 2)
            rows = graph.back(by_source, self._ranks, self._name)
        return graph.summed(rows, self._order, self._places)


class _LocalDispatch(torch.autograd.Function):
    """Sort tokens by expert on one device; backward sums the gradients of each token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Tensor, route: Route) -> tuple[Tensor, Tensor]:
        ctx.route = route
        return route.taken(x), route.taken_gates(gates)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, None]:
        return ctx.route.summed(rows), ctx.route.placed_gates(gates), None


class _LocalCombine(torch.autograd.Function):
    """Sum the outputs of each token on one device; backward copies its gradient to its rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route) -> Tensor:
        ctx.route = route
        return route.summed(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.route.taken(gradient), None


class _Send(torch.autograd.Function):
    """Begin the all-to-all of rows and gates; backward waits for their gradients. The result is a placeholder."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Tensor, route: Route) -> Tensor:
        ctx.route = route
        packed = route.pack(x, gates)
        splits = route.splits
        route.pending.begin(packed, splits.sizes, splits.expected)
        # The placeholder links Send to Receive in the graph, so that their backwards run in the opposite order.
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, token: Tensor) -> tuple[Tensor, Tensor, None]:
        del token
        route: Route = ctx.route
        # The backward of Receive has begun this exchange.
        packed = route.pending.finish()
        rows, gates = packed[:, : route.width], route.gates_of(packed, None)
        return route.summed(rows), route.placed_gates(gates), None


class _Receive(torch.autograd.Function):
    """Wait for rows and gates and sort them by expert; backward begins the all-to-all of their gradients."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, route: Route) -> tuple[Tensor, Tensor]:
        del token
        ctx.route = route
        packed, index = route.pending.finish(), route.splits.to_experts
        rows = packed[:, : route.width]
        return rows.contiguous() if index is None else rows.index_select(0, index), route.gates_of(packed, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor, gates: Tensor) -> tuple[Tensor, None]:
        route: Route = ctx.route
        splits = route.splits
        # The gradient travels the other way: this rank sends what it received, and receives what it sent.
        route.pending.begin(route.pack_back(rows, gates), splits.expected, splits.sizes)
        return rows.new_zeros(0), None


class _Combine(torch.autograd.Function):
    """All-to-all of outputs, and the sum of each token; backward is the same all-to-all in the other direction."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route) -> Tensor:
        ctx.route = route
        splits = route.splits
        # Outputs are sent back in the order in which their rows arrived.
        arranged = rows if splits.to_sources is None else rows.index_select(0, splits.to_sources)
        return route.summed(route.pending.exchange(arranged, splits.expected, splits.sizes))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        route: Route = ctx.route
        splits = route.splits
        arrived = route.pending.exchange(route.taken(gradient), splits.sizes, splits.expected)
        return arrived if splits.to_experts is None else arrived.index_select(0, splits.to_experts), None
