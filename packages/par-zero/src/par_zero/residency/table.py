"""A table of bytes by tier and kind, which prints as text."""

from collections.abc import Mapping
from dataclasses import dataclass

from par_groups import format_bytes

from .._tiers import TIERS

KINDS = ("parameters", "units", "gradients", "optimizer", "copies", "buffers")
"""Kinds of bytes, in the order in which they are printed."""


@dataclass(frozen=True, kw_only=True)
class Residency:
    """The bytes of one rank, by tier ("device", "host", "disk") and by kind.

    The kinds are:
        "parameters": Parameters that the module keeps between passes, and its buffers, such as a norm's statistics.
        "units": Full parameters that are gathered at stage 3.
        "gradients": Gradients that are kept, and gradients that arrive in a chunk.
        "optimizer": The optimizer's state. On a disk, the bytes of its part of the file.
        "copies": The optimizer's own copies of parameters, which have another dtype or are flattened for it.
        "buffers": Buffers of reductions, and on the host the staging buffers for a disk.

    Args:
        now: Bytes at the time of the call.
        fullest: Bytes at the peak of the latest step, or since `shard` before the first step. Units, gradients and
            buffers are counted at the peak. All other kinds are counted at the time of the call.
    """

    now: Mapping[str, Mapping[str, int]]
    fullest: Mapping[str, Mapping[str, int]]

    def total(self, tier: str = "device", *, fullest: bool = False) -> int:
        """Return the bytes of all kinds in a tier.

        Args:
            tier: Tier "device" (default), "host" or "disk".
            fullest: Whether to return the bytes at the peak instead of now. Default: False.

        Raises:
            ValueError: The tier is unknown.
        """
        if tier not in TIERS:
            raise ValueError(f"tier is {tier!r}; it can be one of {', '.join(TIERS)}")
        return sum((self.fullest if fullest else self.now)[tier].values())

    def __str__(self) -> str:
        """Return a table: a row per kind, a column per used tier, and a column for its peak if the peak differs."""
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
