"""Random bits that are a function of a key and a place alone, whichever part of a tensor a rank makes, and wherever."""

import torch
from torch import Tensor


def random_bits(
    rows: Tensor, columns: Tensor, key: int | Tensor, room: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
) -> Tensor:
    """Return 32 random bits for every pair of a row and a column.

    A row's number is mixed with the key into 64 bits, which are two words of the row's own. An element's column meets
    the first word before the first of two rounds, and the second one between them. So the sequences of two keys, or of
    two rows, are no shifts of each other, as they would be if a key were only added to a place.

    Args:
        rows: Numbers of rows, int64.
        columns: Numbers of columns below 2**31, in a shape that broadcasts with that of the rows.
        key: 64 bits, as a signed number, or as a tensor of one on the CPU.
        room: Two int32 tensors of the result's shape, the first of which becomes the result; else they are made.

    Returns:
        int32, of which any value is as likely as any other, in the shape of rows and columns together.

    Source: the rounds are those of the finaliser "lowbias32" of C. Wellons; constants of 64 bits are of SplitMix64.
    """
    # The constants of SplitMix64, written as negative numbers, because they do not fit int64 otherwise.
    words = _folded(rows * -0x61C8864680B583EB) ^ key
    for factor in (-0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15):
        words = _folded(words * factor)
    # Two rounds of the mixer lowbias32. The masks make torch's arithmetic shifts logical.
    x = torch.bitwise_xor(words.to(torch.int32), columns.to(torch.int32), out=room[0])
    shifted = torch.bitwise_right_shift(x, 16, out=room[1])
    x.bitwise_xor_(shifted.bitwise_and_(0xFFFF)).mul_(0x7FEB352D)
    shifted = torch.bitwise_right_shift(x, 15, out=room[1])
    x.bitwise_xor_(shifted.bitwise_and_(0x1FFFF)).bitwise_xor_((words >> 32).to(torch.int32))
    return x.mul_(0x846CA68B - 2**32)


def _folded(x: Tensor) -> Tensor:
    """Return 64-bit numbers whose high half is folded into the low half."""
    return x ^ (x >> 32).bitwise_and_(0xFFFFFFFF)
