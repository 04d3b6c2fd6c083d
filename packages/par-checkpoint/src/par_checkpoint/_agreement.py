"""Options and state that ranks compare before they save or load."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice
from typing import ClassVar

from par_groups import GlobalTensor, Sharding

from .plan.claims import name_of, section_of
from .state.collect import (
    Content,
    EncodedState,
    Samples,
    StateSummary,
    check_replicas,
    extra_differs,
    extra_of,
    summary_of,
    united_state,
    united_ties,
    with_extra_of_ranks,
)
from .state.model import LayoutNames, Model, layout_names
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
        # Equal digests add up to `size` times one of them. Any difference changes a sum.
        if list(sums) == [ranks.size * word for word in self.words()]:
            return
        # Only on this error path do the values themselves travel, so that the error can name them.
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
        state: Summary of the state that is not stored as a tensor; None on a rank that has no part of the run.
        tied: Pairs of a name that is not stored and the stored name.
    """

    layout: LayoutNames
    samples: Samples
    state: StateSummary | None
    tied: Sequence[tuple[str, str]]

    @classmethod
    def of(cls, content: Content, layout: Mapping[str, Sharding] | None, model: Model | None) -> "Comparable":
        """Return what other ranks compare of a rank's content.

        Args:
            content: Content of the rank.
            layout: `Sharding` of local tensors by name, from the caller.
            model: Model of the rank.
        """
        return cls(
            layout=layout_names(layout, model),
            samples=content.samples,
            state=summary_of(content.state),
            tied=sorted(content.tied.items()),
        )

    def digests(self) -> dict[str, list[int]]:
        """Return integers that identify the value of each field."""
        return {field.name: words(repr(getattr(self, field.name)).encode()) for field in dataclasses.fields(self)}

    def differences(self, sums: Mapping[str, Sequence[int]], size: int) -> set[str]:
        """Return the fields in which ranks differ.

        Args:
            sums: Sum of `digests` over all ranks, by field.
            size: Number of ranks.
        """
        return {name for name, own in self.digests().items() if list(sums[name]) != [size * word for word in own]}


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
        return cls(**divided(integers, cls.SIZES))

    def integers(self) -> list[int]:
        """List all fields, in the order of `SIZES`."""
        return [integer for name in self.SIZES for integer in getattr(self, name)]


def divided(integers: Iterable[int], sizes: Mapping[str, int]) -> dict[str, list[int]]:
    """Divide integers that were sent one after the other into lists of given sizes, by name."""
    rest = iter(integers)
    return {name: [*islice(rest, size)] for name, size in sizes.items()}


def united_content(
    content: Content, same: Comparable, differs: Set[str], ranks: Ranks, tensors: Sequence[GlobalTensor]
) -> Content:
    """Return a rank's content with the state and the ties of all ranks. Collective if any of them differ.

    Args:
        content: Content of this rank.
        same: Parts of the content that the ranks compare.
        differs: Fields of `same` in which ranks differ.
        ranks: The ranks.
        tensors: Tensors of all ranks.

    Raises:
        ValueError: Replicas of a tensor differ, or state that must be the same on all ranks; on every rank.
    """
    names = [name_of(tensor.key) for tensor in tensors if section_of(tensor.key) == "model"]
    if "samples" in differs:
        check_replicas([(holders[0], samples) for holders, samples in ranks.distinct(same.samples)])
    if "state" in differs:
        content = replace(content, state=_united(content.state, same.state, ranks, names))
    if "tied" in differs:
        content = replace(content, tied=united_ties(ranks.distinct(same.tied), set(names)))
    return content


def _united(state: EncodedState, summary: StateSummary | None, ranks: Ranks, names: Sequence[str]) -> EncodedState:
    """Merge the state of all ranks. Collective.

    Args:
        state: State of this rank.
        summary: Summary of this rank's state; None if it has no part of the run.
        ranks: The ranks.
        names: Names of the tensors of all ranks' models, in order.
    """
    told = ranks.distinct(summary)
    present = [(holders, each) for holders, each in told if each is not None]
    if not present:
        return state
    summaries = [each for _, each in present]
    if extra_differs(summaries):
        mine = None if summary is None else extra_of(state)
        extra = {rank: each for holders, each in ranks.distinct(mine) if each is not None for rank in holders}
        # The values of ranks without a part of the run do not count, so the rank's number is that among the others.
        state = with_extra_of_ranks(state, [each for _, each in sorted(extra.items())])
        again = ranks.distinct(None if summary is None else summary_of(state))
        summaries = [each for _, each in again if each is not None]
    # Every rank merges, also one without a part of the run, because all ranks must raise if the state differs.
    state = united_state(state, summaries, {name: place for place, name in enumerate(names)})
    if len(present) == len(told):
        return state
    # The first rank that has a part of the run sends the merged state to the ranks without one.
    owner = present[0][0][0]
    return next(each for _, each in ranks.distinct(state if ranks.rank == owner else None) if each is not None)


def kinds_of(urls: Sequence[str]) -> list[str]:
    """Return the kind of each folder or URL. Ranks of one call agree on the kinds, even if their paths differ."""
    return [f"{url.partition('://')[0]}://..." if "://" in url else "a local folder" for url in urls]


def place_of(url: str) -> str:
    """Return the kind and the name of a checkpoint's folder, which ranks compare.

    Machines may mount the same folder at different paths. A different name is a different checkpoint: two threads have
    then begun their saves in a different order on some ranks.
    """
    return f"{kinds_of([url])[0]} named {url.rstrip('/').rpartition('/')[2]!r}"
