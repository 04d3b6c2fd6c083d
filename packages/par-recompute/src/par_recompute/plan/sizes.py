"""Sizes as people write them, and as people read them."""

import re

_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]+)")


def bytes_of(text: str) -> int:
    """The number of bytes that a text such as "6GB" or "512 MiB" says.

    Raises:
        ValueError: The text is not a number and a unit.
    """
    match = _SIZE.fullmatch(text)
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"size {text!r} is not a number and one of {', '.join(_UNITS)}; write it as '6GB'")
    return int(float(match[1]) * _UNITS[match[2]])


def readable(size: int) -> str:
    """A number of bytes with three digits or so: "6.3 MB"."""
    for unit in ("TB", "GB", "MB", "KB"):
        if size >= _UNITS[unit]:
            return f"{size / _UNITS[unit]:.1f} {unit}"
    return f"{size} B"
