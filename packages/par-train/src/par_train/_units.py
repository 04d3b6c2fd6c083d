"""Bytes and seconds in words, and sizes back from words."""

import math

from par_groups import parse_size

_POWERS = ("B", "kB", "MB", "GB", "TB", "PB")


def format_bytes(count: float) -> str:
    """A number of bytes as a person writes it, such as "12.5 GB"; three digits or more."""
    power = min(5, max(0, int(math.log10(max(1, count)) // 3)))
    value = count / 1000**power
    return f"{value:,.{0 if value >= 100 or not power else 1}f} {_POWERS[power]}"


def bytes_of_unit(unit: str) -> float:
    """Bytes of a unit that `format_bytes` writes, such as "GB"."""
    return 1000.0 ** _POWERS.index(unit)


def format_seconds(seconds: float) -> str:
    """A number of seconds as a person writes it, such as "7.34 s", "12.5 ms" or "3.0 us"."""
    if seconds >= 1:
        return f"{seconds:,.{0 if seconds >= 1000 else 2}f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def parse_rate(text: str) -> float:
    """Bytes, or bytes per second, from text: what `par_groups.parse_size` reads, and "400GB/s".

    Raises:
        ValueError: The text is no size.
    """
    return float(parse_size(text.strip().removesuffix("/s"), example="80GB"))
