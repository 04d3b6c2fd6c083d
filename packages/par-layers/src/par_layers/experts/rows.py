"""The order of routed tokens: sorted by expert, or in a fixed number of slots for each expert. Pure arithmetic.

A routed token is one token for one of its selected experts, so M tokens with k experts each make M * k routed tokens.
The code calls them rows, because each is a row of a matrix.
"""

import math

import torch
from torch import Tensor

PADDING = 16
"""Bytes beside a row on its way to an expert: its gate is there, and `grouped_mm` finds rows aligned."""


def sorted_by_expert(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Sorts rows by expert; those of one expert stay in the order of tokens.

    Args:
        ids: The experts of each token, int64 [M, k].
        experts: Number of experts, E.

    Returns:
        Which row, counted over [M, k], comes at each place, int64 [M * k]; and the number of rows of each expert,
        int64 [E], all -1 if an id is none of 0 .. E - 1.
    """
    rows = ids.numel()
    in_order, order = torch.sort(ids.flatten(), stable=True)
    if ids.device.type == "cpu":  # where the host may look, and `bincount` is quicker
        if rows and in_order[0].item() < 0:
            return order, torch.full((experts,), -1)
        counts = torch.bincount(in_order, minlength=experts)
        return order, counts if counts.numel() == experts else torch.full((experts,), -1)
    counts = torch.searchsorted(in_order, torch.arange(experts + 1, device=ids.device)).diff()
    # Ids out of range are missing in the sum. The counts say so to the other ranks, which would otherwise wait for this
    # one to raise.
    return order, torch.where(counts.sum() == rows, counts, -1)


def inverse(order: Tensor) -> Tensor:
    """Return the inverse of a permutation: for each row, its index in the permuted order, int64 [n]."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))


def by_expert(counts: Tensor, total: int) -> Tensor | None:
    """Return the order that sorts arrived rows by expert.

    Rows arrive sorted by source, and by expert within each source. The computation needs them sorted by expert, and by
    source within each expert.

    Args:
        counts: Number of rows from each source for each local expert, int64 [sources, experts].
        total: Sum of the counts.

    Returns:
        Index of the arrived row at each position, int64 [total]; None if the two orders are equal.
    """
    sources, experts = counts.shape
    if sources == 1 or experts == 1:
        return None
    arrived, sizes = counts.flatten(), counts.t().flatten()
    starts = (arrived.cumsum(0) - arrived).view(sources, experts).t().flatten()  # of each block, as it arrives
    shift = starts - (sizes.cumsum(0) - sizes)
    return torch.repeat_interleave(shift, sizes, output_size=total) + torch.arange(total, device=counts.device)


def slots(capacity: float, tokens: int, top_k: int, experts: int) -> int:
    """Return the number of rows that an expert accepts from each rank.

    Args:
        capacity: The multiple of the mean number of rows.
        tokens: Number of tokens of each rank, M.
        top_k: Number of experts of each token, k.
        experts: Number of experts of all ranks, E.
    """
    return math.ceil(capacity * tokens * top_k / experts)


def assigned(ids: Tensor, priorities: Tensor, experts: int, each: int) -> tuple[Tensor, Tensor, Tensor]:
    """Assign slots to rows; an expert with too many rows takes those with the highest priorities.

    Args:
        ids: Experts of each token, int64 [M, k], all in 0 .. experts - 1.
        priorities: Priority of each row, [M, k].
        experts: Number of experts, E.
        each: Number of slots of each expert, C.

    Returns:
        - Row in each slot, counted over [M, k], int64 [E * C]; M * k in an empty slot.
        - Slot of each row, int64 [M, k]; E * C for a dropped row.
        - Number of dropped rows, int64 [].
    """
    flat = ids.flatten()
    # Two stable sorts: first by priority and then by expert, so each expert's rows are in order of priority.
    ranked = torch.argsort(priorities.flatten(), descending=True, stable=True)
    in_order, then = torch.sort(flat[ranked], stable=True)
    order = ranked[then]
    rows, room = len(order), experts * each
    edges = torch.searchsorted(in_order, torch.arange(experts, device=ids.device))
    place = torch.arange(rows, device=ids.device) - edges[in_order]
    # Rows beyond the capacity all go to the slot behind the last one, which is cut off below.
    slot = torch.where(place < each, in_order * each + place, room)
    held = torch.full((room + 1,), rows, dtype=torch.int64, device=ids.device).scatter_(0, slot, order)[:room]
    slot_of = torch.empty_like(order).scatter_(0, order, slot).view(ids.shape)
    return held, slot_of, (slot == room).sum()


def extended(x: Tensor) -> Tensor:
    """Append one zero row to dim 0. Empty slots and dropped rows index it."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])
