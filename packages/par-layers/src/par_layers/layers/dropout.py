"""Dropout whose mask depends on the place in the whole activation, not on the rank.

Every call draws one key from torch's generator, which the ranks of a tensor group seed alike; so one device and any
mode drop the same elements, and recomputing a checkpointed region, which restores the generator, drops them again.
"""

import torch
from torch import Tensor, nn

from ..modes.grid import Axes, Grid
from ..modes.layout import Layout

_BITS = 24  # how many bits of the hash decide; 2**-24 is finer than any probability that matters


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
        key = int(torch.randint(2**31, (), device="cpu").item())  # the generator of the CPU: no wait for a device
        keep = hashed(self._places(x), key) >= int(self.p * 2**_BITS)
        return x * keep.to(x.dtype).mul_(1 / (1 - self.p))

    def _places(self, x: Tensor) -> Tensor:
        """The row-major number of each local element in the whole activation, int64."""
        axes: list[Axes] = [()] * x.dim()
        axes[0] = self._layout.batch
        if x.dim() > 2:
            axes[1] = self._layout.sequence
        axes[-1] = axes[-1] + self._layout.features
        places = torch.zeros((), dtype=torch.int64, device=x.device)
        for dim, length in enumerate(x.shape):
            first = self._grid.index(axes[dim]) * length
            along = torch.arange(first, first + length, device=x.device)
            places = places.unsqueeze(-1) * (length * self._grid.size(axes[dim])) + along
        return places

    def extra_repr(self) -> str:
        """The probability."""
        return f"p={self.p}"


def hashed(places: Tensor, key: int) -> Tensor:
    """24 random bits for every place: a function of place and key alone.

    Args:
        places: Any shape, int64.
        key: Less than 2**31.

    Source: the finaliser "lowbias32" of C. Wellons, on 32 bits that are kept in int64.
    """
    low = 0xFFFFFFFF  # the 32 bits that are kept
    x = places ^ ((places >> 32) * 0x9E3779B1)  # the high half of the place is folded into the low one
    x = (x + key * 0x85EBCA77) & low
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & low
    x = ((x ^ (x >> 15)) * 0x846CA68B) & low
    x = x ^ (x >> 16)
    return x >> (32 - _BITS)
