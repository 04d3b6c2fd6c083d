"""The checksum of a block from those of its parts, so that several ranks can write parts of it by themselves.

A CRC is a polynomial over GF(2), highest power in the lowest bit, modulo a fixed one. Bytes that follow multiply what
came before by x to the eighth for each of them, and are added.
"""

from functools import lru_cache

Crc = tuple[int, int, int, int]
"""File number, first byte, number of bytes, and crc32c of a block or of a part of one."""

_MODULUS = 0x82F63B78  # Castagnoli's polynomial, its x^32 left out
_ONE = 1 << 31
_BYTE = 1 << 23  # x^8


def joined(first: int, second: int, size: int) -> int:
    """The crc32c of two runs of bytes, one after the other.

    Args:
        first: crc32c of the first run.
        second: crc32c of the second run.
        size: Number of bytes of the second run.
    """
    return _product(_power(size), first) ^ second if first else second


@lru_cache(maxsize=4096)
def _power(count: int) -> int:
    """x^(8 count), by squaring."""
    power, square = _ONE, _BYTE
    while count:
        if count & 1:
            power = _product(power, square)
        square = _product(square, square)
        count >>= 1
    return power


def _product(a: int, b: int) -> int:
    total = 0
    while a:
        if a & _ONE:
            total ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ _MODULUS if b & 1 else b >> 1
    return total
