"""The state of our sources, by which tools keep results: a run that was interrupted continues while it is the same."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parent.parent


def state_of(releases: str, tests: Iterable[Path]) -> str:
    """Return a hash of everything that a result depends on.

    Args:
        releases: Versions of the libraries that decide the result.
        tests: Files that make the result, beside all sources of the packages.
    """
    digest = hashlib.sha256(releases.encode())
    for file in sorted([*ROOT.glob("packages/*/src/**/*.py"), *tests]):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
