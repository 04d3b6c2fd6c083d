"""Dropout whose mask depends on the place in the whole activation, not on the rank.

Every call draws one key from torch's generator, which the ranks of a tensor group seed alike; so one device and any
mode drop the same elements, and recomputing a checkpointed region, which restores the generator, drops them again.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .._random_bits import random_bits
from ..modes.grid import Axes, Grid
from ..modes.layout import Layout


class ParallelDropout(nn.Module):
    """Zeroes elements with probability p and scales the rest by 1 / (1 - p), in training.

    Args:
        p: Probability that an element is dropped, 0 <= p < 1.
        layout: The layout of the activations on which it is used.
        grid: This rank's place.

    Raises:
        ValueError: The probability is out of range.
    """

    def __init__(self, p: float, layout: Layout, grid: Grid) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"p is {p}; a probability of dropping is at least 0 and below 1")
        self.p = p
        self._layout, self._grid = layout, grid

    def forward(self, x: Tensor) -> Tensor:
        """[b, ..., features] in the layer's layout, with elements dropped in training."""
        if not self.training or self.p == 0.0:
            return x
        return dropped(x, self.p, self._layout, self._grid)

    def extra_repr(self) -> str:
        """The probability."""
        return f"p={self.p}"


def dropped(x: Tensor, p: float, layout: Layout, grid: Grid) -> Tensor:
    """Zeroes elements with probability p and scales the rest by 1 / (1 - p).

    Args:
        x: Activations [b, ..., features].
        p: Probability that an element is dropped, 0 <= p < 1.
        layout: Their layout.
        grid: This rank's place.
    """
    bits = random_bits(*_places(x, layout, grid), draw_key())
    keep = bits >= int(p * 2**32) - 2**31
    return x * keep.to(x.dtype).mul_(1 / (1 - p))


def _places(x: Tensor, layout: Layout, grid: Grid) -> tuple[Tensor, Tensor]:
    """The place of each local element in the whole activation: a row-major number of its row, and its column."""
    axes: list[Axes] = [()] * x.dim()
    axes[0] = layout.batch
    if x.dim() > 2:
        axes[1] = layout.sequence
    axes[-1] = axes[-1] + layout.features
    rows = torch.zeros((), dtype=torch.int64, device=x.device)
    for along, length in zip(axes[:-1], x.shape, strict=False):
        rows = rows.unsqueeze(-1) * (length * grid.size(along)) + _along(along, length, x.device, grid)
    return rows.unsqueeze(-1), _along(axes[-1], x.shape[-1], x.device, grid)


def _along(axes: Axes, length: int, device: torch.device, grid: Grid) -> Tensor:
    """The numbers of this rank's part of a dim in the whole one."""
    first = grid.index(axes) * length
    return torch.arange(first, first + length, device=device)


def draw_key() -> Tensor:
    """64 random bits from torch's generator of the CPU, where to draw waits for no device."""
    return torch.randint(-(2**63), 2**63 - 1, (), device="cpu")


@contextmanager
def numbers_of_rank(device: torch.device, grid: Grid) -> Iterator[None]:
    """A context: inside, torch's generator for a device has other numbers on each rank of the tensor group.

    Its state is a function of the rank and of a key that is drawn from the generator of the CPU. So recomputing a
    checkpointed region draws the same numbers again. Afterwards the generator goes on as if nothing had been drawn.

    Args:
        device: The device on which random numbers are drawn inside.
        grid: This rank's place.
    """
    text = f"{draw_key().item()}/{grid.index(grid.tensor_axes)}"
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
    on_cpu = device.type == "cpu"
    with torch.random.fork_rng([] if on_cpu else [device.index], device_type="cuda" if on_cpu else device.type):
        if on_cpu:
            torch.default_generator.manual_seed(seed)  # torch.manual_seed goes through all kinds of devices
        else:
            torch.get_device_module(device).manual_seed(seed)
        yield
