"""Which tensor goes into which file, and what the files are called: as transformers does it."""

import re
from collections.abc import Sequence

_UNITS = {
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


def parse_size(size: str | int) -> int:
    """A size in bytes.

    Args:
        size: Bytes, or a text such as "5GB" (decimal) or "5GiB" (binary).

    Raises:
        ValueError: Another text, or nothing above 0.
        TypeError: Neither a text nor a whole number.
    """
    if isinstance(size, bool) or not isinstance(size, str | int):
        raise TypeError(f"size {size!r} is neither a text nor bytes; write it as '5GB' or 5_000_000_000")
    count = size
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match is None or match[2] not in _UNITS:
            raise ValueError(f"size {size!r} is not a number and one of {', '.join(_UNITS)}; write it as '5GB'")
        number, unit = match[1], _UNITS[match[2]]
        count = int(float(number) * unit) if "." in number else int(number) * unit
    if int(count) < 1:
        raise ValueError(f"size {size!r} is less than a byte; give at least 1")
    return int(count)


def fill(sizes: Sequence[tuple[str, int]], limit: int) -> list[list[str]]:
    """Deals tensors out to files, greedily and in their order.

    A tensor over the limit gets a file of its own, which comes before the one that is being filled.

    Args:
        sizes: Name and bytes of each tensor.
        limit: Bytes of tensors in a file.

    Returns:
        The names in each file.

    Raises:
        ValueError: A limit below 1.
    """
    if limit < 1:
        raise ValueError(f"limit {limit} leaves no room in a file; give at least 1 byte")
    shards: list[list[str]] = []
    current: list[str] = []
    used = 0
    for name, size in sizes:
        if size > limit:
            shards.append([name])
            continue
        if used + size > limit:
            shards.append(current)
            current, used = [], 0
        current.append(name)
        used += size
    return [*shards, current] if current else shards


def shard_names(count: int, stem: str = "model", *, always_numbered: bool = False) -> list[str]:
    """The names of that many files.

    Args:
        count: How many.
        stem: What the names begin with.
        always_numbered: Number a single file, too.
    """
    if count == 1 and not always_numbered:
        return [f"{stem}.safetensors"]
    return [f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
