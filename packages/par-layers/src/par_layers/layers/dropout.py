"""Dropout whose mask depends on the position in the full activation, not on the rank.

Each call draws one key from torch's generator, which all ranks of a tensor group must seed identically. One device and
any mode then drop the same elements. Activation checkpointing restores the generator, so a recomputation drops the same
elements again.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from .._random_bits import random_bits
from ..context.tokens import Tokens
from ..modes.grid import Axes, Grid
from ..modes.layout import ActivationLayout
from .places import Places


class ParallelDropout(nn.Module):
    """Dropout for sharded activations: in training it zeroes elements with probability p and scales by 1 / (1 - p).

    Args:
        p: Probability that an element is dropped, 0 <= p < 1.
        places: Token positions of the activations.

    Raises:
        ValueError: The probability is out of range.
    """

    masks_by_position = True
    """Whether the mask is the same function of positions on every rank."""

    def __init__(self, p: float, places: Places) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ValueError(f"p is {p}; a probability of dropping is at least 0 and below 1")
        self.p = p
        self._places = places

    def forward(self, x: Tensor, tokens: Tokens | None = None) -> Tensor:
        """Return the activation with elements dropped in training.

        Args:
            x: Activation [b, ..., features] in the layer's layout. If it has three or more dims, the second has tokens.
            tokens: Split of its batch along the sequence; None for sequences of one document without padding.

        Raises:
            ValueError: The activation's shape does not match the batch.
        """
        if not self.training or self.p == 0.0:
            return x
        places = self._places
        numbers = places.in_row(x, tokens, "Dropout") if x.dim() > 2 and places.are_told(tokens) else None
        return dropped(x, self.p, places.layout, places.grid, numbers)

    def extra_repr(self) -> str:
        """Return the probability."""
        return f"p={self.p}"


def dropped(
    x: Tensor, p: float, layout: ActivationLayout, grid: Grid, in_row: tuple[Tensor, int] | None = None
) -> Tensor:
    """Zeroes elements with probability p and scales the rest by 1 / (1 - p).

    Args:
        x: Activations [b, ..., features].
        p: Probability that an element is dropped, 0 <= p < 1.
        layout: Their layout.
        grid: This rank's place.
        in_row: The numbers of this rank's tokens in the whole row, int64 [s], and the number of tokens of a row; None
            counts them by the layout.
    """
    bits = random_bits(*_places(x, layout, grid, in_row), draw_key())
    # The bits are a uniform int32, and comparing them rounds nothing, so that every device keeps the same elements.
    keep = bits >= int(p * 2**32) - 2**31
    return x * keep.to(x.dtype).mul_(1 / (1 - p))


def _places(
    x: Tensor, layout: ActivationLayout, grid: Grid, in_row: tuple[Tensor, int] | None
) -> tuple[Tensor, Tensor]:
    """Return each local element's position in the full activation: the row-major number of its row, and its column."""
    axes: list[Axes] = [()] * x.dim()
    axes[0] = layout.batch
    if x.dim() > 2:
        axes[1] = layout.sequence
    axes[-1] = axes[-1] + layout.features
    rows = torch.zeros((), dtype=torch.int64, device=x.device)
    for dim, (along, length) in enumerate(zip(axes[:-1], x.shape, strict=False)):
        # A batch that was cut for load balance holds its tokens in another order than that of the ranks.
        if dim == 1 and in_row is not None:
            numbers, whole = in_row
        else:
            numbers, whole = _along(along, length, x.device, grid), length * grid.size(along)
        rows = rows.unsqueeze(-1) * whole + numbers
    return rows.unsqueeze(-1), _along(axes[-1], x.shape[-1], x.device, grid)


def _along(axes: Axes, length: int, device: torch.device, grid: Grid) -> Tensor:
    """Return the indices of this rank's part of a dim."""
    first = grid.index(axes) * length
    return torch.arange(first, first + length, device=device)


def active_dropouts(model: nn.Module, *, by_rank: bool = False) -> dict[str, str]:
    """Return the dropout setting of each module that drops activations in training, by name, such as "p=0.1".

    The dropout modules of torch store their rate in `p`. Other modules, such as the attention of a Transformers model,
    call a function; their rate is in an attribute with "drop" in its name, such as `attention_dropout`.

    Args:
        model: Any module.
        by_rank: Whether to return only those whose mask depends on the rank, rather than on positions alone.
    """
    found = {}
    for name, module in model.named_modules():
        if by_rank and getattr(module, "masks_by_position", False):
            continue
        rates = {"p": module.p} if isinstance(module, ParallelDropout | _DropoutNd) else vars(module)
        for key, rate in rates.items():
            if (key == "p" or "drop" in key) and isinstance(rate, float) and rate > 0.0:
                found[name] = f"{key}={rate}"
    return found


def draw_key() -> Tensor:
    """Draw 64 random bits from torch's generator of the CPU, which does not wait for a device."""
    return torch.randint(-(2**63), 2**63 - 1, (), device="cpu")


@contextmanager
def numbers_of_rank(device: torch.device, grid: Grid) -> Iterator[None]:
    """Give torch's generator for a device different numbers on each rank of the tensor group, inside the context.

    Its state is a function of the rank and of a key that is drawn from the generator of the CPU. So recomputing a
    checkpointed region draws the same numbers again. Afterwards the generator goes on as if nothing had been drawn.

    Args:
        device: The device on which random numbers are drawn inside.
        grid: This rank's place.
    """
    text = f"{draw_key().item()}/{grid.index(grid.tensor_axes)}"
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1
    on_cpu = device.type == "cpu"
    with torch.random.fork_rng([] if on_cpu else [device.index], device_type=device.type):
        if on_cpu:
            torch.default_generator.manual_seed(seed)  # torch.manual_seed goes through all kinds of devices
        else:
            torch.get_device_module(device).manual_seed(seed)
        yield
