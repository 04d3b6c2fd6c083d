"""A product that is added to a matrix in place: the weight gradient of a linear layer."""

import torch
from torch import Tensor

BLOCK = 128
"""Rows of the total that are worked on at a time."""


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Adds left.T @ right to the total, in blocks of the total's rows where that is quicker.

    A CPU reads and writes the whole total for few rows of operands. With 48 to 127 of them the one big product goes
    over it in an order that misses the cache and the table of pages all the time, once other work has been between:
    a batch of products, each with a block that fits, takes 0.65 to 0.85 of its time (float32 and float64, from
    131,072 elements on). With fewer or more rows, and in half precision, the big one is quicker.

    Args:
        total: [n, k].
        left: [rows, n], of the same dtype.
        right: [rows, k], of the same dtype.
    """
    rows, (n, k) = len(left), total.shape
    if not is_better_in_blocks(total, rows):
        total.addmm_(left.t(), right)
        return
    blocks = n // BLOCK
    total.unflatten(0, (blocks, BLOCK)).baddbmm_(left.t().unflatten(0, (blocks, BLOCK)), right.expand(blocks, rows, k))


def is_better_in_blocks(total: Tensor, rows: int) -> bool:
    """Whether a product of so many rows is quicker in blocks; on CPUs, by measurement."""
    return (
        48 <= rows < 128
        and total.numel() >= 1 << 17
        and len(total) % BLOCK == 0
        and total.dtype in (torch.float32, torch.float64)
        and total.device.type == "cpu"
    )
