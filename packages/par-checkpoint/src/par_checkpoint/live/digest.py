"""Digest of a tensor's values that does not depend on how ranks shard it.

Each element adds a hash of its global index and its bits to a sum; all NaN count as one value. Ranks add up the sums of
their elements, so senders and receivers can be compared, whatever boxes they hold. The sum shows lost, swapped, stale
and flipped elements.
"""

from collections.abc import Sequence

import torch

from ..format.bytes import as_integers
from ..plan.coverage import row_major
from ..state.quantised import is_float8

MODULUS = 1 << 40
"""Sums of digests are taken modulo this number, so that thousands of ranks can add them up in 64 bits."""

# Odd numbers with about as many ones as zeros: a product with them spreads each bit over the higher ones, and the shift
# between the products brings these back to the lower bits.
_INDEX, _FIRST, _SECOND = 0x1000193, 0x5851F42D4C957F2D, 0x14057B7EF767814F


def digest_of_box(values: torch.Tensor, start: Sequence[int], shape: Sequence[int]) -> int:
    """Return the sum of the hashes of a box's elements, modulo `MODULUS`.

    Args:
        values: Elements of the box.
        start: Global index of its first element.
        shape: Shape of the full tensor.
    """
    if values.dtype == torch.complex128:  # two elements of 64 bits
        values, start, shape = torch.view_as_real(values), (*start, 0), (*shape, 2)
    values = values.contiguous().cpu()
    # Elements are cast to integers of 64 bits only after the copy to a dense tensor of their own width.
    bits = as_integers(values).to(torch.int64)
    if is_float8(values.dtype) or values.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        # A cast of NaN and the cast back may give other bits, and so may torch's vector code and its scalar code.
        bits.masked_fill_((values.float() if is_float8(values.dtype) else values).isnan(), -1)
    index = torch.zeros((), dtype=torch.int64, device="cpu")
    for low, size, stride in zip(start, values.shape, row_major(shape), strict=True):
        index = index[..., None] + torch.arange(low, low + size, device="cpu") * stride
    mixed = (index * _INDEX + bits) * _FIRST  # wraps around
    mixed ^= mixed >> 31
    mixed *= _SECOND
    # The upper bits of a product depend on all bits of its factors, the lower ones do not.
    return int((mixed >> 24).remainder(MODULUS).sum()) % MODULUS
