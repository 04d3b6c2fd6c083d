"""Gradients rounded to multiples of 2**-50, whose fp64 sums are exact while they stay below 8."""

from collections.abc import Sequence

import torch
from torch import Tensor

EXACT_LIMIT = 8.0
"""Absolute value that no partial sum of rounded gradients may reach."""

_SHIFT = 6.0
"""Summand that rounds to the grid: fp64 numbers between 4 and 8 are multiples of 2**-50."""

_STACKED = 16_384
"""Elements from which parts are added one by one. For fewer, a call costs more than their bytes."""


def on_grid(gradient: Tensor) -> Tensor:
    """Return a gradient in fp64, each element rounded to a multiple of 2**-50.

    fp64 has 53 bits, so a sum of such multiples is exact as long as every partial sum is below 8. Then any order of
    ranks and of microbatches has the same sum. The rounding changes only fp32 numbers below 2**-27.

    Args:
        gradient: A gradient of one loss, of any shape, with elements below 2.
    """
    return gradient.double().add_(_SHIFT).sub_(_SHIFT)


def exact_sum(gradients: Sequence[Tensor]) -> Tensor:
    """Return the fp64 sum of gradients that are rounded one by one, so that their order does not matter.

    Args:
        gradients: Parts of a gradient, of one shape. If their largest absolute values add up to 8 or more, so large is
            every element of the result. The check of a step then raises, although the sum may be small again.
    """
    first = gradients[0]
    if first.numel() < _STACKED:
        every = torch.stack(tuple(gradients))
        total, bound = on_grid(every).sum(0), every.abs().flatten(1).amax(1).double().sum()
    else:
        # Memory for all parts at once would cost more than the additions.
        total, bound = on_grid(first), first.abs().amax().double()
        for each in gradients[1:]:
            total += on_grid(each)
            bound = bound + each.abs().amax()
    # On the device, so that the host does not wait. No element is below -bound.
    return total.add_(torch.where(bound < EXACT_LIMIT, 0.0, 2 * bound))
