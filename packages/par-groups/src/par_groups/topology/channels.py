"""Private communicators, as a topology or `ProcessGroups` is asked for them."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Channels:
    """Declares private communicators, for point-to-point traffic that must not queue behind collectives.

    Args:
        axes: The axes that the communicators are over.
        count: The number of communicators.
    """

    axes: str | Sequence[str]
    count: int
