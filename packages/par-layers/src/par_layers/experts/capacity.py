"""A fixed number of rows for every expert and source: what each slot holds, and what is dropped. Pure."""

import math

import torch
from torch import Tensor


def slots(capacity: float, tokens: int, top_k: int, experts: int) -> int:
    """Number of rows that an expert takes of each rank.

    Args:
        capacity: The multiple of the mean number of rows.
        tokens: Number of tokens of each rank, M.
        top_k: Number of experts of each token, k.
        experts: Number of experts of all ranks, E.
    """
    return math.ceil(capacity * tokens * top_k / experts)


def assigned(ids: Tensor, priorities: Tensor, experts: int, each: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gives rows their slots; an expert with too many of them takes those with the highest priorities.

    Args:
        ids: The experts of each token, int64 [M, k], all in 0 .. experts - 1.
        priorities: By what they compete, [M, k].
        experts: Number of experts, E.
        each: Number of slots of each expert, C.

    Returns:
        Which row, counted over [M, k], is in each slot, int64 [E * C], M * k in an empty one; in which slot each row
        is, int64 [M, k], E * C where it is dropped; and the number of dropped rows, int64 [].
    """
    flat = ids.flatten()
    ranked = torch.argsort(priorities.flatten(), descending=True, stable=True)
    in_order, then = torch.sort(flat[ranked], stable=True)
    order = ranked[then]
    rows, room = len(order), experts * each
    edges = torch.searchsorted(in_order, torch.arange(experts, device=ids.device))
    place = torch.arange(rows, device=ids.device) - edges[in_order]
    slot = torch.where(place < each, in_order * each + place, room)
    held = torch.full((room + 1,), rows, dtype=torch.int64, device=ids.device).scatter_(0, slot, order)[:room]
    slot_of = torch.empty_like(order).scatter_(0, order, slot).view(ids.shape)
    return held, slot_of, (slot == room).sum()


def extended(x: Tensor) -> Tensor:
    """With zeros at the end of dim 0, which empty slots and dropped rows point to."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])
