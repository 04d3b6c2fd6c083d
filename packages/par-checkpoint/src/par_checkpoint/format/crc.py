"""Checksums of blocks, joined from the checksums of parts that several ranks write separately.

A CRC is a polynomial over GF(2), highest power in the lowest bit, modulo a fixed one. Bytes that follow multiply what
came before by x to the eighth for each of them, and are added.
"""

import zlib
from collections.abc import Iterable
from functools import lru_cache

import torch

from par_groups import bytes_of

Crc = tuple[int, int, int, int]
"""File number, first byte, number of bytes, and crc32c of a block or of a part of one."""

_MODULUS = 0x82F63B78  # Castagnoli's polynomial, its x^32 left out
_ONE = 1 << 31
_BYTE = 1 << 23  # x^8


def joined(first: int, second: int, size: int) -> int:
    """Return the crc32c of two concatenated runs of bytes.

    Args:
        first: crc32c of the first run.
        second: crc32c of the second run.
        size: Number of bytes of the second run.
    """
    # The bytes that follow move the first checksum up by their bits; then the two are added.
    return _product(_power(size), first) ^ second if first else second


def encode_crcs(crcs: Iterable[Crc]) -> bytes:
    """Return checksums as bytes: little more than four bytes for each, because blocks have even distances."""
    rows = torch.tensor(sorted(crcs), dtype=torch.int64, device="cpu").view(-1, 4)
    steps = torch.diff(rows[:, :3], dim=0, prepend=rows.new_zeros(1, 3)).T.contiguous()
    places = zlib.compress(bytes_of(steps), 1)
    return len(rows).to_bytes(8) + len(places).to_bytes(8) + places + bytes(bytes_of(rows[:, 3].to(torch.uint32)))


def decode_crcs(data: bytes | memoryview) -> torch.Tensor:
    """Return the checksums in bytes from `encode_crcs`: int64 (checksums, 4), the fields of `Crc`, sorted."""
    count, size = int.from_bytes(data[:8]), int.from_bytes(data[8:16])
    rows = torch.empty(count, 4, dtype=torch.int64, device="cpu")
    if count:
        steps = torch.frombuffer(bytearray(zlib.decompress(data[16 : 16 + size])), dtype=torch.int64)
        rows[:, :3] = steps.view(3, count).cumsum(1).T
        rows[:, 3] = torch.frombuffer(bytearray(data[16 + size :]), dtype=torch.uint32)
    return rows


@lru_cache(maxsize=4096)
def _power(count: int) -> int:
    """Return x^(8 count), by squaring."""
    power, square = _ONE, _BYTE
    while count:
        if count & 1:
            power = _product(power, square)
        square = _product(square, square)
        count >>= 1
    return power


def _product(a: int, b: int) -> int:
    total = 0
    # The highest bit of a is the power 0: b is added for each power in a, and b is multiplied by x for the next one.
    while a:
        if a & _ONE:
            total ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ _MODULUS if b & 1 else b >> 1
    return total
