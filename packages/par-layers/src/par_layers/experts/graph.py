"""Dispatch with a fixed capacity for graphs of torch.compile: it needs only tensors, no state and no host value.

With a capacity every rank sends the same number of rows to each rank, so a message has the same shape on both sides. An
unfinished exchange can then be the result of one autograd function and the gradient of the next one, without an object
that both share. A traced graph has two collectives in forward and two in backward. The compiler may move independent
operations between the start of a collective and its wait.
"""

from typing import Any

import torch
from torch import Tensor

from .._collectives import finish
from .._once import once_differentiable
from .._torch_private import functional_collectives, sums_of_bags
from .rows import PADDING, extended


def filled(x: Tensor, gates: Tensor, order: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Fill all slots with routed tokens and their routing weights.

    Args:
        x: Tokens, [M, h].
        gates: Routing weights, [M, k].
        order: Row of each slot, an index into [M, k], int64 [n]; M * k for an empty slot.
        places: Slot of each row, int64 [M, k]; n for a dropped row.

    Returns:
        Rows [n, h] and routing weights [n]; zeros in empty slots.
    """
    rows, of_rows = _FillSlots.apply(x, gates, order, places)  # type: ignore[no-untyped-call]
    return rows, of_rows


def summed(rows: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """Sum the rows of each token, [M, h], from the rows of all slots, [n, h]; `order` and `places` as in `filled`."""
    sums: Tensor = _SumSlots.apply(rows, order, places)  # type: ignore[no-untyped-call]
    return sums


def begin(rows: Tensor, gates: Tensor, ranks: int, group: str) -> Tensor:
    """Start an all-to-all of rows [n, h] with their routing weights [n], in equal parts; `arrive` waits for it."""
    started: Tensor = _BeginDispatch.apply(rows, gates, ranks, group)  # type: ignore[no-untyped-call]
    return started


def arrive(started: Tensor, width: int, dtype: torch.dtype, ranks: int, group: str) -> tuple[Tensor, Tensor]:
    """Wait for an exchange by `begin`, and return the received rows [n, width] and routing weights [n] of a dtype."""
    rows, gates = _FinishDispatch.apply(started, width, dtype, ranks, group)  # type: ignore[no-untyped-call]
    return rows, gates


def back(rows: Tensor, ranks: int, group: str) -> Tensor:
    """Send outputs [n, h] back in equal parts by an all-to-all, and wait for the received outputs."""
    arrived: Tensor = _ReturnOutputs.apply(rows, ranks, group)  # type: ignore[no-untyped-call]
    return arrived


class _FillSlots(torch.autograd.Function):
    """Rows and routing weights of all slots; backward: the sum over each token's rows, and a gather of the weights."""

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
    """Sum over each token's rows; backward: a copy of the token's gradient in each of its slots."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(order, places)
        return _sums(rows, places)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _taken(gradient, *ctx.saved_tensors), None, None


def _taken(x: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """Return the rows of all slots from tokens [M, h]."""
    # An empty slot has the index behind the last routed token, which divides to the index of the appended zero row.
    return extended(x).index_select(0, order // places.shape[1])


def _sums(rows: Tensor, places: Tensor) -> Tensor:
    """Sum the rows of each token, from the rows of all slots."""
    if not places.numel():
        return rows.new_zeros(len(places), rows.shape[1])
    # Each token's entries are adjacent in `places`, so they form one bag of the embedding-bag kernel.
    starts = torch.arange(0, places.numel(), places.shape[1], device=places.device)
    return sums_of_bags(extended(rows), places.flatten(), starts)


class _BeginDispatch(torch.autograd.Function):
    """Start of an exchange of rows and routing weights; backward: wait for their gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gates: Tensor, ranks: int, group: str) -> Tensor:
        ctx.width, ctx.dtype = rows.shape[1], gates.dtype
        return _begun(_packed(rows, gates), ranks, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, started: Tensor) -> tuple[Tensor | None, ...]:
        return *_unpacked(finish(started), ctx.width, ctx.dtype), None, None


class _FinishDispatch(torch.autograd.Function):
    """Wait for rows and routing weights; backward: start of the exchange of their gradients."""

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
    """Pack rows [n, h] and their gates [n] into one tensor, [n, h + padding]."""
    # The gates travel as bits in the dtype of the rows, so that one message has both, and fp32 gates lose nothing.
    bits = gates.contiguous().view(rows.dtype).view(len(gates), gates.itemsize // rows.itemsize)
    return torch.cat([rows, bits, rows.new_zeros(rows.shape[0], PADDING // rows.itemsize - bits.shape[1])], 1)


def _unpacked(packed: Tensor, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Unpack the rows and the gates of `_packed`."""
    wide = dtype.itemsize // packed.itemsize
    return packed[:, :width].contiguous(), packed[:, width : width + wide].contiguous().view(dtype).flatten()
