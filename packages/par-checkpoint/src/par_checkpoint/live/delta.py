"""Changed values: a piece of a new version, encoded relative to a version that the receiver has.

A piece of n elements of w bytes, of which k changed, travels in the shortest of three forms: all elements (n w bytes),
a bitmap and the changed elements (n / 8 + k w), or the indices and the changed elements (k (4 + w)). Both ends compute
the form from n, w and k, so a message has no header.
"""

import torch

from ..format.bytes import as_integers

_INDEX = torch.int32  # a message holds all elements of a piece, so their indices are small
_BITS = 8


def encoded_bytes(count: int, width: int, changed: int) -> int:
    """Return the bytes of a piece in its shortest form.

    Args:
        count: Number of elements.
        width: Bytes of an element.
        changed: Number of elements that changed.
    """
    return min(count * width, *_sizes(count, width, changed))


def changed_mask(base: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return which elements differ in any bit, as a flat tensor of booleans in row-major order."""
    # Bits are compared, because a NaN differs from itself, and -0 equals 0.
    return (as_integers(base) != as_integers(values)).flatten()


def encode_(buffer: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> None:
    """Write the changed elements of a piece, and their positions, to a buffer.

    Args:
        buffer: Bytes to fill, `encoded_bytes` of them.
        values: Elements of the piece, of at most 8 bytes each.
        mask: Result of `changed_mask`.
    """
    changed = values.flatten()[mask]
    positions, elements = _parts(buffer, mask.numel(), values.dtype, len(changed))
    as_integers(elements).copy_(as_integers(changed))
    if positions.dtype == _INDEX:
        positions.copy_(mask.nonzero()[:, 0])
    else:
        bits = torch.zeros(positions.numel() * _BITS, dtype=torch.uint8, device="cpu")
        bits[: mask.numel()] = mask
        shifts = torch.arange(_BITS, dtype=torch.uint8, device="cpu")
        # A byte holds eight elements, the first one in its lowest bit.
        positions.copy_((bits.view(-1, _BITS) << shifts).sum(1, dtype=torch.uint8))


def decode_(into: torch.Tensor, buffer: torch.Tensor, dtype: torch.dtype, changed: int) -> None:
    """Write the changed elements of a piece over the elements of the base.

    Args:
        into: The piece, with the elements of the base.
        buffer: Bytes from `encode_`.
        dtype: Dtype of the elements in the buffer.
        changed: Number of elements that changed.
    """
    positions, elements = _parts(buffer, into.numel(), dtype, changed)
    if positions.dtype == _INDEX:
        mask = torch.zeros(into.numel(), dtype=torch.bool, device="cpu")
        mask[positions] = True
    else:
        bits = positions[:, None] >> torch.arange(_BITS, dtype=torch.uint8, device="cpu") & 1
        mask = bits.flatten()[: into.numel()].bool()
    if dtype == into.dtype:
        as_integers(into)[mask.view(into.shape)] = as_integers(elements)
    else:
        into[mask.view(into.shape)] = elements.to(into.dtype)


def _sizes(count: int, width: int, changed: int) -> tuple[int, int]:
    """Return the bytes with a bitmap and the bytes with indices."""
    return -(-count // _BITS) + changed * width, changed * (_INDEX.itemsize + width)


def _parts(buffer: torch.Tensor, count: int, dtype: torch.dtype, changed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the views of a buffer for positions, which are indices or a bitmap, and for elements."""
    bitmap, indices = _sizes(count, dtype.itemsize, changed)
    has_indices = indices < bitmap
    # The part with the wider elements comes first, so that both parts are aligned.
    if has_indices and dtype.itemsize < _INDEX.itemsize:
        positions, elements = buffer.tensor_split([changed * _INDEX.itemsize])
    else:
        elements, positions = buffer.tensor_split([changed * dtype.itemsize])
    return positions.view(_INDEX) if has_indices else positions, elements.view(dtype)
