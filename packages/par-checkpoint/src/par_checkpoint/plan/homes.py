"""The ranks that can read each block, if no rank sees all of a checkpoint."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256


@dataclass(frozen=True)
class Homes:
    """Location of a checkpoint's blocks in parts, and the ranks that can read each part.

    Args:
        parts: Part of each block, by name of the file.
        ranks: Ranks that can read each part, in order.
    """

    parts: Mapping[str, Sequence[int]]
    ranks: Sequence[tuple[int, ...]]

    def digest(self) -> bytes:
        """Return 32 bytes that identify the content."""
        parts = [(name, array("H", of_file).tobytes()) for name, of_file in sorted(self.parts.items())]
        return sha256(repr((parts, list(self.ranks))).encode()).digest()

    def runs(self, name: str, first: int, stop: int) -> list[tuple[int, int, tuple[int, ...]]]:
        """Return runs of the blocks first .. stop - 1 that the same ranks can read: first, last plus one, ranks."""
        found: list[tuple[int, int, tuple[int, ...]]] = []
        parts = self.parts[name]
        for number in range(first, stop):
            ranks = self.ranks[parts[number]]
            if found and found[-1][2] == ranks:
                found[-1] = (found[-1][0], number + 1, ranks)
            else:
                found.append((number, number + 1, ranks))
        return found
