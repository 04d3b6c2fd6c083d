"""A dispatch with a capacity as a graph of torch.compile holds it: tensors alone, no state, and no number for the host.

All splits are equal there, so that what travels has one shape on both sides: an unfinished exchange can be the result
of one autograd function and the gradient of the next, and needs no object that both know. Once traced, forward takes
two collectives and backward two; the compiler may move what is independent between their begins and waits.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._collectives import finish
from .._once import once_differentiable
from .._torch_private import functional_collectives, sums_of_bags
from .capacity import extended
from .rows import PADDING


class SentInGraph:
    """Rows on their way, as `Sent`.

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
        self.dropped = dropped
        self._ranks = 1 if group is None else group.size()
        self._name = "" if group is None else group.group_name
        self._local, self._each = experts // self._ranks, order.shape[0] // experts
        self._order, self._places = order, places
        self._width, self._dtype = x.shape[1], gates.dtype
        self._rows, self._gates = _Rows.apply(x, gates, order, places)  # type: ignore[no-untyped-call]
        if self._ranks > 1:
            self._rows = _Begin.apply(self._rows, self._gates, self._ranks, self._name)  # type: ignore[no-untyped-call]

    def receive(self) -> tuple[Tensor, Tensor, list[int]]:
        """As `Sent.receive`; but the numbers of rows, which are known, are a list."""
        rows, gates = self._rows, self._gates
        if self._ranks > 1:
            rows, gates = _Arrive.apply(rows, self._width, self._dtype, self._ranks, self._name)  # type: ignore[no-untyped-call]
            rows = rows.view(self._ranks, self._local, self._each, self._width).transpose(0, 1).flatten(0, 2)
            gates = gates.view(self._ranks, self._local, self._each).transpose(0, 1).flatten()
        return rows, gates, [self._ranks * self._each] * self._local

    def through(self, experts: Callable[..., Tensor]) -> Tensor:
        """As `Sent.through`."""
        return self.combine(experts(*self.receive()))

    def combine(self, rows: Tensor) -> Tensor:
        """As `Sent.combine`."""
        if self._ranks > 1:
            by_source = rows.view(self._local, self._ranks, self._each, self._width).transpose(0, 1).flatten(0, 2)
            rows = _Back.apply(by_source, self._ranks, self._name)  # type: ignore[no-untyped-call]
        summed: Tensor = _Sums.apply(rows, self._order, self._places)  # type: ignore[no-untyped-call]
        return summed


class _Rows(torch.autograd.Function):
    """The rows and gates of all slots; backward: the sums of each token's rows, and the gates' places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Tensor, order: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(places)
        return _taken(x, order, places), extended(gates.flatten()).take(order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return _summed(rows, places), extended(gates).take(places), None, None


class _Sums(torch.autograd.Function):
    """The sum of each token's rows; backward: its gradient in all their slots."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(order, places)
        return _summed(rows, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _taken(gradient, *ctx.saved_tensors), None, None


def _taken(x: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """The rows of all slots, of tokens [M, h]."""
    return extended(x).index_select(0, order // places.shape[1])


def _summed(rows: Tensor, places: Tensor) -> Tensor:
    """The sums of each token's rows, of those of all slots."""
    if not places.numel():
        return rows.new_zeros(len(places), rows.shape[1])
    starts = torch.arange(0, places.numel(), places.shape[1], device=places.device)
    return sums_of_bags(extended(rows), places.flatten(), starts)


class _Begin(torch.autograd.Function):
    """Begins to send rows with their gates; backward waits for their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gates: Tensor, ranks: int, group: str) -> Tensor:
        ctx.width, ctx.dtype = rows.shape[1], gates.dtype
        return _begun(_packed(rows, gates), ranks, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, started: Tensor) -> tuple[Tensor | None, ...]:
        return *_unpacked(finish(started), ctx.width, ctx.dtype), None, None


class _Arrive(torch.autograd.Function):
    """Waits for rows with their gates; backward begins the way back of their gradients."""

    @staticmethod
    def forward(
        ctx: Any, started: Tensor, width: int, dtype: torch.dtype, ranks: int, group: str
    ) -> tuple[Tensor, Tensor]:
        ctx.ranks, ctx.group = ranks, group
        return _unpacked(finish(started), width, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor, gates: Tensor) -> tuple[Tensor | None, ...]:
        return _begun(_packed(rows, gates), ctx.ranks, ctx.group), None, None, None, None


class _Back(torch.autograd.Function):
    """Sends outputs back; backward: their gradients, the same way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: int, group: str) -> Tensor:
        ctx.ranks, ctx.group = ranks, group
        return finish(_begun(rows, ranks, group))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return finish(_begun(gradient, ctx.ranks, ctx.group)), None, None


def _begun(x: Tensor, ranks: int, group: str) -> Tensor:
    sizes = [x.shape[0] // ranks] * ranks
    started: Tensor = functional_collectives.all_to_all_single.default(x.contiguous(), sizes, sizes, group)
    return started


def _packed(rows: Tensor, gates: Tensor) -> Tensor:
    """Rows [n, h] with their gates [n] beside them, [n, h + padding]."""
    bits = gates.contiguous().view(rows.dtype).view(len(gates), gates.itemsize // rows.itemsize)
    return torch.cat([rows, bits, rows.new_zeros(rows.shape[0], PADDING // rows.itemsize - bits.shape[1])], 1)


def _unpacked(packed: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The inverse."""
    wide = dtype.itemsize // packed.itemsize
    return packed[:, :width].contiguous(), packed[:, width : width + wide].contiguous().view(dtype).flatten()
