"""Bytes and seconds in words, and sizes back from words."""

import math
import re

_POWERS = ("B", "kB", "MB", "GB", "TB", "PB")
_SIZE = re.compile(r"([0-9.]+(?:e[0-9]+)?)\s*([KMGTP]?)(i?)B?(?:/s)?", re.IGNORECASE)


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


def parse_bytes(text: str) -> float:
    """Bytes from text: "80GB" and "80 GB/s" are 80e9, "80GiB" is 80 * 2**30, "1000" is 1000.

    Raises:
        ValueError: The text is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        raise ValueError(f"{text!r} is no size; write a number and a unit, such as 80GB or 80GiB")
    number, unit, binary = match.groups()
    power = ("", "K", "M", "G", "T", "P").index(unit.upper())
    return float(number) * (1024.0 if binary else 1000.0) ** power
