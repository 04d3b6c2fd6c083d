"""The ranks that can read each block, if no rank sees all of a checkpoint."""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256


@dataclass(frozen=True)
class Homes:
    """The parts that a checkpoint's blocks are in, and the ranks that see each part.

    Args:
        parts: By name of a file: for each of its blocks, the part that it is in.
        ranks: By part: the ranks that can read it, in order.
    """

    parts: Mapping[str, Sequence[int]]
    ranks: Sequence[tuple[int, ...]]

    def digest(self) -> bytes:
        """32 bytes that stand for all of it."""
        parts = [(name, array("H", of_file).tobytes()) for name, of_file in sorted(self.parts.items())]
        return sha256(repr((parts, list(self.ranks))).encode()).digest()

    def runs(self, name: str, first: int, stop: int) -> list[tuple[int, int, tuple[int, ...]]]:
        """The blocks first .. stop - 1 of a file in runs that the same ranks see: first, one past the last, ranks."""
        found: list[tuple[int, int, tuple[int, ...]]] = []
        parts = self.parts[name]
        for number in range(first, stop):
            ranks = self.ranks[parts[number]]
            if found and found[-1][2] == ranks:
                found[-1] = (found[-1][0], number + 1, ranks)
            else:
                found.append((number, number + 1, ranks))
        return found
