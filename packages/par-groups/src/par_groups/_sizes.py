"""Bytes and seconds as people write and read them: one parser and one format, so that all packages agree."""

import math
import re
from decimal import Decimal

_FACTORS = {"": 1}
for _power, _prefix in enumerate("KMGTP", 1):
    _FACTORS |= {_prefix: 1000**_power, f"{_prefix}I": 1024**_power}
_SIZE = re.compile(r"\s*([0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?|\.[0-9]+)(E[+-]?[0-9]{1,3})?\s*([KMGTP]?I?)B?\s*")
_MOST = 1 << 63  # what torch and file systems count with
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def parse_size(size: str | int, *, name: str = "size", least: int = 0, example: str = "5GB") -> int:
    """Return a size in bytes, which may be given as a text.

    A text is a number and a unit in upper or lower case; the number may have a fraction or an exponent. "80GB", "80 gb"
    and "80G" are 80e9. "80GiB" and "80gi" are 80 * 2**30. "1e3", "100B" and "1_000" are bytes, and ".5GB" is 500e6.
    Fractions of a byte are dropped.

    Args:
        size: Number of bytes, or a text.
        name: Name of the argument, for errors.
        least: Smallest valid size in bytes. Default: 0.
        example: Valid text, for errors.

    Returns:
        The size in bytes.

    Raises:
        TypeError: Neither a text nor a whole number.
        ValueError: Another text, or a size below `least` or above 2**63.

    Example:
        >>> parse_size("1.5MB")
        1500000
    """
    # True is an int in Python, and would count as a size of one byte.
    if isinstance(size, bool) or not isinstance(size, str | int):
        raise TypeError(f"{name}={size!r}: a size is bytes or a text; pass a number such as 5_000_000, or {example!r}")
    if isinstance(size, int):
        count = size
    else:
        # `upper` turns some letters outside of ASCII into ASCII, such as a dotless i, so these are excluded before.
        match = _SIZE.fullmatch(size.upper()) if size.isascii() else None
        if match is None or match[3] not in _FACTORS:
            raise ValueError(
                f"{name}={size!r}: a size is a number and one of B, KB, MB, GB, TB, PB (powers of 1000) or KiB, MiB, "
                f"GiB, TiB, PiB (powers of 1024); pass for example {example!r}"
            )
        number = Decimal(match[1] + (match[2] or "")) * _FACTORS[match[3]]
        # A number with a large exponent is never expanded into an int: at the limit, the check below raises.
        count = int(number) if number < _MOST else _MOST
    if not least <= count < _MOST:
        raise ValueError(f"{name}={size!r}: a size is from {least} to 2**63 - 1 bytes; pass for example {example!r}")
    return count


def format_bytes(count: float) -> str:
    """Return a number of bytes as text with at least two digits and a decimal unit, such as "12.5 GB" or "980 kB".

    Args:
        count: Number of bytes, 0 or more.
    """
    power = min(5, max(0, int(math.log10(max(1, count)) // 3)))
    value = count / 1000**power
    return f"{value:,.{0 if value >= 100 or not power else 1}f} {_UNITS[power]}"


def format_seconds(seconds: float) -> str:
    """Return a duration as text, such as "7.34 s", "12.5 ms" or "3.0 us".

    Args:
        seconds: Duration in seconds, 0 or more.
    """
    if seconds >= 1:
        return f"{seconds:,.{0 if seconds >= 1000 else 2}f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
