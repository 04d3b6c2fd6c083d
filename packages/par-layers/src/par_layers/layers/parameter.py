"""Parameters that hold one rank's part: on the meta device with a record and an init rule, until they are filled."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from par_groups import Box, Sharding, set_sharding

from .._tensor_cache import tensor_cache
from ..modes.grid import Axes, Grid

Init = Callable[[Tensor, torch.Generator], object]
"""Fills a whole parameter in place; it never sees how the parameter is cut. It can be compared, copied and pickled."""


Bits = Callable[[], tuple[Tensor, Tensor, Tensor, Tensor]]
"""Makes 32 random bits for each element of a part, int32; beside them room for three tensors like it."""


@runtime_checkable
class ByPlace(Protocol):
    """An init rule that knows each element by itself, so that a rank draws no more than its part."""

    def __call__(self, whole: Tensor, generator: torch.Generator) -> object:
        """Fill a full weight like any init rule; `initialize` calls `fill` instead."""

    def fill(self, part: Tensor, rows: Tensor, bits: Bits) -> None:
        """Fill a part of the whole parameter in place.

        Args:
            part: The part, of two dims, fp32.
            rows: The numbers of its rows (dim 0 of the whole parameter), int64 [rows, 1].
            bits: Makes 32 random bits for each of the part's elements.
        """


@dataclass(frozen=True)
class EachExpert:
    """Initialization rule for packed expert weights, [E, ...], which fills one expert at a time.

    A rank draws only its own experts, and a rule that depends on the shape receives the shape of one expert.

    Args:
        init: Rule for the weight of one expert. The expert's index is a part of its generator's seed.
    """

    init: Init

    def __call__(self, whole: Tensor, generator: torch.Generator) -> None:
        """Fill all of them from one generator, as one who knows nothing of experts would; `initialize` does not."""
        for expert in whole:
            self.init(expert, generator)


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Run of rows (dim 0) that is sharded separately, such as q, k and v in one fused weight.

    Args:
        length: Number of rows in the full tensor.
        axes: Axes that shard the rows.
        padded: Length with padding at the end, which the ranks divide; None without padding. The padding is not a part
            of the full tensor.
        sum_over: Additional axes over which the gradient of these rows is partial.
    """

    length: int
    axes: Axes = ()
    padded: int | None = None
    sum_over: Axes = ()


def make_parameter(
    rows: Sequence[Rows], others: Sequence[tuple[int, Axes]], grid: Grid, init: Init, sum_over: Axes = ()
) -> nn.Parameter:
    """Return a parameter on the meta device with this rank's shape, sharding metadata and initialization rule.

    Args:
        rows: Consecutive runs of dim 0.
        others: Length of each further dim, with the axes that shard it and divide its length.
        grid: This rank's coordinates.
        init: Initialization rule of the full tensor.
        sum_over: Axes over which the gradient is partial after backward. Axes of size 1 are ignored.
    """
    shape = (sum(run.length for run in rows), *(length for length, _ in others))
    counts = [(run.padded or run.length) // grid.size(run.axes) for run in rows]
    rest = tuple(length // grid.size(axes) for length, axes in others)
    corner = tuple(grid.index(axes) * length for (_, axes), length in zip(others, rest, strict=True))
    stride = tuple(math.prod(rest[dim:]) for dim in range(len(rest) + 1))
    other_axes = tuple(axis for _, axes in others for axis in axes)
    boxes, first, local = [], 0, 0  # `first` and `local` are where the run begins in the whole and in the local tensor
    for run, count in zip(rows, counts, strict=True):
        start = grid.index(run.axes) * count
        real = min(count, run.length - start)  # less than count where the rest is padding
        # A rank that holds only padding has no element of the full tensor, so it has no box.
        if real > 0 and all(rest):
            boxes.append(
                Box(
                    start=(first + start, *corner),
                    size=(real, *rest),
                    offset=local * math.prod(rest),
                    stride=stride,
                    copies=grid.copies(run.axes + other_axes),
                    sum_over=grid.larger(sum_over + run.sum_over),
                )
            )
        first, local = first + run.length, local + count
    parameter = nn.Parameter(torch.empty(sum(counts), *rest, device="meta"))
    set_sharding(parameter, Sharding(shape, tuple(boxes)))
    parameter.par_init = init  # type: ignore[attr-defined]  # a tensor takes attributes
    return parameter


def normal(std: float) -> Init:
    """Return an init rule: normally distributed around 0.

    Args:
        std: The standard deviation.
    """
    return _Normal(std)


def uniform(bound: float) -> Init:
    """Return an init rule: uniformly distributed in -bound .. bound.

    Args:
        bound: The largest absolute value.
    """
    return _Uniform(bound)


def constant(value: float) -> Init:
    """Return an init rule: the same number everywhere.

    Args:
        value: The number.
    """
    return _Constant(value)


@dataclass(frozen=True)
class _Normal:
    std: float

    def __call__(self, whole: Tensor, generator: torch.Generator) -> None:
        whole.normal_(0.0, self.std, generator=generator)

    def fill(self, part: Tensor, rows: Tensor, bits: Bits) -> None:
        """Fill with normal numbers: a sign bit, and a probability whose absolute value comes from a table.

        Only additions and multiplications are used. Their rounding does not depend on the position of an element in
        memory.
        """
        del rows
        drawn, bins, words, more_words = bits()
        values, found = words.view(torch.float32), more_words.view(torch.float32)
        # The 1 keeps the probability above 0, whose normal number would be infinite.
        values.copy_(torch.bitwise_and(drawn, 0x7FFFFFFF, out=bins)).add_(1.0)  # the probability times 2**31
        # The bits of the float, shifted, are the number of its bin: the exponent and the leading bits of the
        # mantissa.
        torch.bitwise_right_shift(words, _BIN_SHIFT, out=bins).sub_(_FIRST_BIN)
        offset, slope = half_normal()
        torch.index_select(slope, 0, bins.flatten(), out=found.view(-1))
        values.mul_(found)
        torch.index_select(offset, 0, bins.flatten(), out=found.view(-1))
        values.add_(found).mul_(self.std)
        # The first random bit becomes the sign bit of the float, which rounds nothing.
        words.bitwise_xor_(drawn.bitwise_and_(-(2**31)))
        part.copy_(values)


@dataclass(frozen=True)
class _Uniform:
    bound: float

    def __call__(self, whole: Tensor, generator: torch.Generator) -> None:
        whole.uniform_(-self.bound, self.bound, generator=generator)

    def fill(self, part: Tensor, rows: Tensor, bits: Bits) -> None:
        """Fill with uniform numbers: the bits are a number from -2**31 to 2**31 - 1."""
        del rows
        part.copy_(bits()[0]).mul_(self.bound / 2**31)


@dataclass(frozen=True)
class _Constant:
    value: float

    def __call__(self, whole: Tensor, _: torch.Generator) -> None:
        whole.fill_(self.value)

    def fill(self, part: Tensor, rows: Tensor, bits: Bits) -> None:
        """Fill with the constant, without random bits."""
        del rows, bits
        part.fill_(self.value)


_BIN_SHIFT = 15
"""A bin of the table has all floats that agree in their exponent and the first 23 - 15 bits of their mantissa."""

_FIRST_BIN = 127 << (23 - _BIN_SHIFT)
"""The bin of 1.0."""


@tensor_cache(maxsize=1)
def half_normal() -> tuple[Tensor, Tensor]:
    """Return a table of the absolute value of a normal number by its probability: a line's offset and slope per bin.

    The table is kept until `half_normal.cache_clear()`.

    The bins become narrower with the probability itself, so the tail, out to 6.3 standard deviations, is as exact as
    the middle: the lines are less than 3e-6 off.
    """
    # The table is cached, so the default device of whoever comes first, such as meta, must not apply to it.
    with torch.device("cpu"):
        # Each power of two from 1 to 2**31 has 256 bins of equal width.
        edges = (torch.arange(32 << (23 - _BIN_SHIFT), dtype=torch.int32) + _FIRST_BIN) << _BIN_SHIFT
        below = edges.view(torch.float32).double()  # probability times 2**31
        above = below.roll(-1)
        # `roll` has put the first edge here, where the upper edge of the last bin belongs.
        above[-1] = 2.0**32
        # Half of a probability is on either side of 0. Past 2**31 only that number itself is drawn, and it maps to 0.
        left, right = (-torch.special.ndtri((edge / 2**32).clamp(max=0.5)) for edge in (below, above))
        slope = (right - left) / (above - below)
        return (left - slope * below).float(), slope.float()
