"""What each operation makes of the ranks' tensors."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .options import Sums

Shares = Sequence[Tensor]
"""One tensor of each member, flat, in the order of the group."""

_PAIRWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}

REDUCTIONS = frozenset(_PAIRWISE)


def reduced(shares: Shares, reduction: str, sums: Sums) -> Tensor:
    """The ranks' numbers combined, element by element; sums of 16-bit floats are rounded after each addition.

    For a mean NCCL divides floats before it adds them.
    """
    combine = _PAIRWISE[reduction]
    whole = not (shares[0].dtype.is_floating_point or shares[0].dtype.is_complex)
    if reduction == "avg" and not whole:
        shares = [share / len(shares) for share in shares]
    if shares[0].dtype == torch.bool:  # the sum of truths is whether there is one, as in gloo and NCCL
        combine = torch.logical_and if reduction in ("product", "min") else torch.logical_or
    total = _as_tree(shares, combine) if sums == "halves" else _in_order(shares, combine)
    return total // len(shares) if reduction == "avg" and whole else total


def part_of(whole: Tensor, member: int, members: int) -> Tensor:
    """A member's part of a flat tensor that is cut evenly."""
    return whole.chunk(members)[member] if len(whole) else whole


def exchanged(shares: Shares, sends: Sequence[Sequence[int]], member: int) -> Tensor:
    """What all members send to one.

    Args:
        shares: What each member sends, the elements for the first member first.
        sends: The elements that each member sends to each.
        member: Who receives.
    """
    parts = [share.split(list(sizes))[member] for share, sizes in zip(shares, sends, strict=True)]
    return torch.cat(parts)


def _in_order(shares: Shares, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    total = shares[0].clone()
    for share in shares[1:]:
        total = combine(total, share)
    return total


def _as_tree(shares: Shares, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    if len(shares) == 1:
        return shares[0].clone()
    half = len(shares) // 2
    return combine(_as_tree(shares[:half], combine), _as_tree(shares[half:], combine))
