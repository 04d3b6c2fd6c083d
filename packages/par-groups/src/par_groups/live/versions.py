"""The versions of these packages on a rank, which all ranks must have alike."""

import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version

DISTRIBUTIONS = (
    "par-groups",
    "par-layers",
    "par-pipeline",
    "par-zero",
    "par-precision",
    "par-recompute",
    "par-checkpoint",
    "par-data",
    "par-diagnosis",
    "par-plan",
    "par-train",
)
"""Names of these packages on an index; a package is imported with underscores."""


def versions() -> dict[str, str]:
    """Return the version of each of these packages that is imported, or else installed, on this rank."""
    found = {}
    for name in DISTRIBUTIONS:
        imported = getattr(sys.modules.get(name.replace("-", "_")), "__version__", None)
        if (here := imported or _installed(name)) is not None:
            found[name] = here
    return found


@cache
def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def clash(by_rank: Sequence[Mapping[str, str]]) -> str | None:
    """Return an error message if ranks have different versions of a package, else None. Pure.

    Ranks without the package do not count.

    Args:
        by_rank: Versions by package, for each rank.
    """
    for name in DISTRIBUTIONS:
        holders: dict[str, list[int]] = {}
        for rank, theirs in enumerate(by_rank):
            if name in theirs:
                holders.setdefault(theirs[name], []).append(rank)
        if len(holders) > 1:
            parts = [f"{here} on ranks {ranks[:4]}{'...' if len(ranks) > 4 else ''}" for here, ranks in holders.items()]
            return f"the ranks have different versions of {name}: {', '.join(parts)}; install the same one everywhere"
    return None
