"""Counts to permutations: in which order the rows of a dispatch lie. Pure.

A row is one token for one of the experts that were chosen for it; M tokens with k experts each have M * k of them.
"""

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
    return order, torch.where(counts.sum() == rows, counts, -1)


def inverse(order: Tensor) -> Tensor:
    """The inverse of a permutation: at which place each row comes, int64 [n]."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=order.device))


def by_expert(counts: Tensor, total: int) -> Tensor | None:
    """The order that brings rows from the order in which they arrive to that of experts.

    Rows arrive source by source, and expert by expert from each. Computation wants them expert by expert, and source by
    source for each.

    Args:
        counts: Number of rows from each source for each local expert, int64 [sources, experts].
        total: Their sum.

    Returns:
        Which arrived row comes at each place, int64 [total]; None where the two orders are the same.
    """
    sources, experts = counts.shape
    if sources == 1 or experts == 1:
        return None
    arrived, sizes = counts.flatten(), counts.t().flatten()
    starts = (arrived.cumsum(0) - arrived).view(sources, experts).t().flatten()  # of each block, as it arrives
    shift = starts - (sizes.cumsum(0) - sizes)
    return torch.repeat_interleave(shift, sizes, output_size=total) + torch.arange(total, device=counts.device)
