"""Bytes by tier and kind, and how they are printed."""

from collections.abc import Mapping
from dataclasses import dataclass

from par_groups import format_bytes

from .._tiers import TIERS

KINDS = ("parameters", "units", "gradients", "optimizer", "copies", "buffers")
"""What bytes are of, in the order in which they are printed."""


@dataclass(frozen=True, kw_only=True)
class Residency:
    """Bytes of one rank, by tier ("device", "host", "disk") and by kind.

    The kinds are:
        "parameters": Parameters as the module keeps them between passes, and its buffers, such as a norm's statistics.
        "units": Whole parameters that are gathered at stage 3.
        "gradients": Gradients that are kept, and those that arrive in a chunk.
        "optimizer": The optimizer's state. On a disk that is its room in the file.
        "copies": The optimizer's own copies of parameters that are used in another dtype, or put together for it.
        "buffers": What reductions work in, and on the host what passes through to a disk.

    Args:
        now: Bytes when this was asked.
        fullest: Bytes at the fullest moment of the latest step, or since `shard` before the first one. Units, gradients
            and buffers are those of that moment, all else is as it is now.
    """

    now: Mapping[str, Mapping[str, int]]
    fullest: Mapping[str, Mapping[str, int]]

    def total(self, tier: str = "device", *, fullest: bool = False) -> int:
        """Bytes of all kinds in a tier.

        Args:
            tier: "device", "host" or "disk".
            fullest: Whether at the fullest moment instead of now.

        Raises:
            ValueError: Another tier.
        """
        if tier not in TIERS:
            raise ValueError(f"tier is {tier!r}; it can be one of {', '.join(TIERS)}")
        return sum((self.fullest if fullest else self.now)[tier].values())

    def __str__(self) -> str:
        """A row for each kind; a column for each tier in use, and one for it at its fullest, if that differs."""
        columns = []
        for tier in TIERS:
            if any((*self.now[tier].values(), *self.fullest[tier].values())):
                columns.append((tier, self.now[tier]))
            if self.fullest[tier] != self.now[tier]:
                columns.append((f"{tier} at fullest", self.fullest[tier]))
        rows = [["", *(name for name, _ in columns)]]
        rows += [[kind, *(format_bytes(held[kind]) for _, held in columns)] for kind in KINDS]
        rows.append(["all together", *(format_bytes(sum(held.values())) for _, held in columns)])
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        )
