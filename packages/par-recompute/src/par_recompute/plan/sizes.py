"""Sizes as people read them."""

_UNITS = {"TB": 10**12, "GB": 10**9, "MB": 10**6, "KB": 10**3}


def readable(size: int) -> str:
    """A number of bytes with three digits or so: "6.3 MB"."""
    for unit, factor in _UNITS.items():
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"
