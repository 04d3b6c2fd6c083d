"""Gradients rounded to multiples of 2**-50, whose fp64 sums are exact while they stay below 8."""

from torch import Tensor

_SHIFT = 6.0
"""Summand that rounds to the grid: fp64 numbers between 4 and 8 are multiples of 2**-50."""


def on_grid(gradient: Tensor) -> Tensor:
    """Return a gradient in fp64, each element rounded to a multiple of 2**-50.

    fp64 has 53 bits, so a sum of such multiples is exact as long as every partial sum is below 8. Then any order of
    ranks and of microbatches has the same sum. Of fp32 numbers, the rounding changes only those below 2**-27.

    Args:
        gradient: A gradient of one loss, of any shape, with elements below 2.
    """
    return gradient.double().add_(_SHIFT).sub_(_SHIFT)
