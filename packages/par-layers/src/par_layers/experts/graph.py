"""A dispatch with a capacity as a graph of torch.compile holds it: tensors alone, no state, and no number for the host.

All splits are equal there, so that what travels has one shape on both sides: an unfinished exchange can be the result
of one autograd function and the gradient of the next, and needs no object that both know. Once traced, forward takes
two collectives and backward two; the compiler may move what is independent between their begins and waits.
"""

from typing import Any

import torch
from torch import Tensor

from .._collectives import finish
from .._once import once_differentiable
from .._torch_private import functional_collectives, sums_of_bags
from .rows import PADDING, extended


def filled(x: Tensor, gates: Tensor, order: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """The rows and gates of all slots.

    Args:
        x: Tokens, [M, h].
        gates: Their weights, [M, k].
        order: Which row, counted over [M, k], is in each slot, int64 [n]; M * k in an empty one.
        places: In which slot each row is, int64 [M, k]; n where it is dropped.

    Returns:
        [n, h] and [n]; zeros in empty slots.
    """
    rows, of_rows = _FillSlots.apply(x, gates, order, places)  # type: ignore[no-untyped-call]
    return rows, of_rows


def summed(rows: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """The sum of each token's rows, [M, h], of those of all slots, [n, h]; `order` and `places` as in `filled`."""
    sums: Tensor = _SumSlots.apply(rows, order, places)  # type: ignore[no-untyped-call]
    return sums


def begin(rows: Tensor, gates: Tensor, ranks: int, group: str) -> Tensor:
    """Begins to send as many rows [n, h] with their gates [n] to each rank of a named group; for `arrive`."""
    started: Tensor = _BeginDispatch.apply(rows, gates, ranks, group)  # type: ignore[no-untyped-call]
    return started


def arrive(started: Tensor, width: int, dtype: torch.dtype, ranks: int, group: str) -> tuple[Tensor, Tensor]:
    """Waits for the rows [n, width] and gates [n], of this dtype, that arrive."""
    rows, gates = _FinishDispatch.apply(started, width, dtype, ranks, group)  # type: ignore[no-untyped-call]
    return rows, gates


def back(rows: Tensor, ranks: int, group: str) -> Tensor:
    """Sends outputs [n, h] back, as many to each rank, and waits for those that come."""
    arrived: Tensor = _ReturnOutputs.apply(rows, ranks, group)  # type: ignore[no-untyped-call]
    return arrived


class _FillSlots(torch.autograd.Function):
    """The rows and gates of all slots; backward: the sums of each token's rows, and the gates' places."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gates: Tensor, order: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(places)
        return _taken(x, order, places), extended(gates.flatten()).take(order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor, gates: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (places,) = ctx.saved_tensors
        return _sums(rows, places), extended(gates).take(places), None, None


class _SumSlots(torch.autograd.Function):
    """The sum of each token's rows; backward: its gradient in all their slots."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(order, places)
        return _sums(rows, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _taken(gradient, *ctx.saved_tensors), None, None


def _taken(x: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """The rows of all slots, of tokens [M, h]."""
    return extended(x).index_select(0, order // places.shape[1])


def _sums(rows: Tensor, places: Tensor) -> Tensor:
    """The sums of each token's rows, of those of all slots."""
    if not places.numel():
        return rows.new_zeros(len(places), rows.shape[1])
    starts = torch.arange(0, places.numel(), places.shape[1], device=places.device)
    return sums_of_bags(extended(rows), places.flatten(), starts)


class _BeginDispatch(torch.autograd.Function):
    """Begins to send rows with their gates; backward waits for their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gates: Tensor, ranks: int, group: str) -> Tensor:
        ctx.width, ctx.dtype = rows.shape[1], gates.dtype
        return _begun(_packed(rows, gates), ranks, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, started: Tensor) -> tuple[Tensor | None, ...]:
        return *_unpacked(finish(started), ctx.width, ctx.dtype), None, None


class _FinishDispatch(torch.autograd.Function):
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


class _ReturnOutputs(torch.autograd.Function):
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
