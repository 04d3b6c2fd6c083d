"""Options and state that ranks compare before they save or load."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from .state.collect import Samples, StateSummary
from .state.model import LayoutNames
from .storage.sharing import Sharing
from .transfer.ranks import Ranks, words
from .transfer.roll import named_ranks


@dataclass(frozen=True)
class SameOptions:
    """Options that must have the same value on every rank, because a rank of its own mind would end in a hang.

    Ranks compare a digest that travels with integers which they add up anyway. So the comparison costs no message.

    Args:
        values: Value of each option by name. Two values differ if their texts do.
    """

    values: Mapping[str, object]

    def words(self) -> list[int]:
        """Return eight integers that identify all values."""
        return words(repr(self.values).encode())

    def check(self, sums: Sequence[int], ranks: Ranks) -> None:
        """Raise on every rank if an option differs. Collective only where one does.

        Args:
            sums: Sums of `words` over all ranks.
            ranks: The ranks of the call.

        Raises:
            ValueError: An option differs; the message lists its values and their ranks.
        """
        if list(sums) == [ranks.size * word for word in self.words()]:
            return
        of_ranks = ranks.distinct(self.values)
        for name in self.values:
            given: dict[str, list[int]] = {}
            for holders, values in of_ranks:
                given.setdefault(repr(values[name]), []).extend(holders)
            if len(given) > 1:
                each = [f"{value} on {named_ranks(holders)}" for value, holders in given.items()]
                raise ValueError(f"{name} is {', and '.join(each)}; give the same on all ranks")


@dataclass(frozen=True, kw_only=True)
class Comparable:
    """State that is usually the same on every rank. Ranks exchange it only if its digests differ.

    Args:
        layout: Names in `layout` that the rank lacks, and names that it has.
        samples: First elements of tensors without sharding metadata.
        state: Summary of the state that is not stored as a tensor.
        tied: Pairs of a name that is not stored and the stored name.
    """

    layout: LayoutNames
    samples: Samples
    state: StateSummary
    tied: Sequence[tuple[str, str]]

    def digests(self) -> dict[str, list[int]]:
        """Return integers that identify the value of each field."""
        return {field.name: words(repr(getattr(self, field.name)).encode()) for field in dataclasses.fields(self)}

    def differences(self, sums: "SaveSummary", size: int) -> set[str]:
        """Return the fields in which ranks differ.

        Args:
            sums: Sum of the summaries of all ranks.
            size: Number of ranks.
        """
        own = self.digests()
        return {name for name in own if list(getattr(sums, name)) != [size * word for word in own[name]]}


@dataclass(frozen=True, kw_only=True)
class SaveSummary:
    """The integers that ranks add up at the beginning of a save, all in one message.

    Args:
        nonce: Random number of the first rank, zero on all others, so that the sum is its number.
        sharing: One for the kind of the target's file system, zero for the other kinds.
        claims: Digest of the elements that a rank holds.
        options: Digest of `SameOptions`.
        layout: Digest of the field of `Comparable`, as are the following ones.
        samples: Digest.
        state: Digest.
        tied: Digest.
    """

    nonce: Sequence[int]
    sharing: Sequence[int]
    claims: Sequence[int]
    options: Sequence[int]
    layout: Sequence[int]
    samples: Sequence[int]
    state: Sequence[int]
    tied: Sequence[int]

    SIZES: ClassVar[Mapping[str, int]] = {
        "nonce": 1,
        "sharing": len(Sharing),
        **dict.fromkeys(("claims", "options", "layout", "samples", "state", "tied"), len(words(b""))),
    }
    COUNT: ClassVar[int] = sum(SIZES.values())

    @classmethod
    def from_integers(cls, integers: Sequence[int]) -> "SaveSummary":
        """Return the summary that `integers` listed, or the sum of several."""
        values, begin = {}, 0
        for name, size in cls.SIZES.items():
            values[name] = integers[begin : begin + size]
            begin += size
        return cls(**values)

    def integers(self) -> list[int]:
        """List all fields, in the order of `SIZES`."""
        return [integer for name in self.SIZES for integer in getattr(self, name)]


def kinds_of(urls: Sequence[str]) -> list[str]:
    """Return the kind of each folder or URL. Ranks of one call agree on the kinds, even if their paths differ."""
    return [f"{url.partition('://')[0]}://..." if "://" in url else "a local folder" for url in urls]


def place_of(url: str) -> str:
    """Return the kind and the name of a checkpoint's folder, which ranks compare.

    Machines may mount the same folder at different paths. A different name is a different checkpoint: two threads have
    then begun their saves in a different order on some ranks.
    """
    return f"{kinds_of([url])[0]} named {url.rstrip('/').rpartition('/')[2]!r}"
