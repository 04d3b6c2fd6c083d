"""Sequences of several datasets in one order, each dataset as often as its weight says.

    weights 2 : 1        web 0   web 1   chat 0   web 2   web 3   chat 1   ...

Sequence j of a source has the time (j + 1/2) / weight, and sequences are sorted by time. So any range of sequences
holds each source's fraction, to within one or two sequences. Arithmetic finds the n-th sequence, so a run resumes
anywhere without reading earlier sequences. A source that ends starts its next epoch, in another order.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch.utils.data import Dataset

from .packed import PackedDataset, Sample, SequenceSampler
from .packing import Ints


class _MixtureIndex(NamedTuple):
    """For each sequence of an epoch: its source, and its epoch and number in that source, int64 [sequences] each."""

    source: Ints
    epoch: Ints
    number: Ints


class MixtureDataset(Dataset[Sample]):
    """Packed sequences of several datasets in one order, each dataset as often as its weight says.

    Use it like one `PackedDataset`: with `sampler=dataset.sampler` and `drop_last=True`. The length of an epoch is the
    number of sequences of all sources in their first epoch. With weights, a source that ends early starts its next
    epoch, and a source that does not end continues in the next epoch of the mixture.

    Args:
        sources: Datasets by name, all with the same `context`.
        weights: The weight of each source, relative to the sum of all weights. None: each sequence of each source
            occurs once per epoch.

    Attributes:
        context: Number of tokens in a sequence.

    Raises:
        ValueError: No source, a weight that is missing, unknown or not above 0, or sequences of different lengths.
    """

    def __init__(self, sources: Mapping[str, PackedDataset], weights: Mapping[str, float] | None = None) -> None:
        if not sources:
            raise ValueError(f"sources={sources!r}: there must be at least one; pass datasets by name")
        lengths = {name: source.context for name, source in sources.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"sources have sequences of {lengths} tokens: lengths must be equal; use one context")
        for name, weight in {} if weights is None else weights.items():
            if name not in sources:
                raise ValueError(f"weights has {name!r}, which is not a source; use the names {', '.join(sources)}")
            if not 0 < weight < math.inf:
                raise ValueError(f"weights[{name!r}]={weight}: it must be above 0; set another, or remove the source")
        missing = [name for name in sources if weights is not None and name not in weights]
        if missing:
            raise ValueError(
                f"weights has no {missing[0]!r}: every source needs a weight; set it, or pass weights=None"
            )
        self._sources = list(sources.values())
        self._weights = None if weights is None else [float(weights[name]) for name in sources]
        # For each source, its number of sequences before each of its epochs, computed as far as it was needed.
        self._ends = [[0] for _ in self._sources]
        self._index: tuple[int, _MixtureIndex] | None = None
        self.context = next(iter(lengths.values()))

    @property
    def digest(self) -> str:
        """A hash of the sequences of all sources and of the weights."""
        parts = self._weights, [source.digest for source in self._sources]
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]

    @property
    def sampler(self) -> SequenceSampler:
        """A sampler of the sequences of an epoch, in order."""
        return SequenceSampler(self)

    def count(self, epoch: int) -> int:
        """Return the number of sequences in an epoch."""
        # With weights, sources are in different epochs; the first one gives every epoch of the mixture one length.
        return sum(source.count(0 if self._weights else epoch) for source in self._sources)

    def counts(self, epoch: int) -> list[int]:
        """Return the number of sequences of each source in an epoch."""
        found: list[int] = np.bincount(self._of_epoch(epoch).source, minlength=len(self._sources)).tolist()
        return found

    def __getitem__(self, index: tuple[int, int]) -> Sample:
        """Return one sequence, by epoch and number."""
        epoch, number = index
        found = self._of_epoch(epoch)
        source = self._sources[int(found.source[number])]
        return source[int(found.epoch[number]), int(found.number[number])]

    def __getstate__(self) -> dict[str, object]:
        # The index of an epoch is as large as the epoch; a worker computes its own.
        return {**self.__dict__, "_index": None}

    def _of_epoch(self, epoch: int) -> _MixtureIndex:
        if self._index is None or self._index[0] != epoch:
            self._index = epoch, self._compute(epoch)
        return self._index[1]

    def _compute(self, epoch: int) -> _MixtureIndex:
        size = self.count(epoch)
        if self._weights is None:
            source, nth = interleave([source.count(epoch) for source in self._sources], 0, size)
            return _MixtureIndex(source, np.full(size, epoch), nth)
        source, nth = interleave(self._weights, epoch * size, size)
        epochs, numbers = np.empty(size, np.int64), np.empty(size, np.int64)
        for index in range(len(self._sources)):
            own = source == index
            if own.any():
                # Sequences of one source ascend, so the last one decides how many of its epochs are needed.
                ends, last = self._ends[index], int(nth[own][-1])
                while ends[-1] <= last:
                    ends.append(ends[-1] + self._sources[index].count(len(ends) - 1))
                begins = np.array(ends)
                epochs[own] = np.searchsorted(begins, nth[own], side="right") - 1
                numbers[own] = nth[own] - begins[epochs[own]]
        return _MixtureIndex(source, epochs, numbers)


def interleave(weights: Sequence[float], begin: int, number: int) -> tuple[Ints, Ints]:
    """Compute which sequence of which source is at each of some places of a mixture.

    Args:
        weights: Weight of each source, above 0.
        begin: The first place.
        number: Number of places.

    Returns:
        The source at each place, int64 [number], and the number of its sequences at earlier places, int64 [number].
    """
    part = np.asarray(weights, np.float64) / np.sum(weights)
    # The first n places hold n x part sequences of a source, to within one half and the shift of the end that the
    # halves of all sources cause. So a few candidates at both ends suffice, and no earlier place is computed.
    slack = len(part) + 1
    low = np.maximum(np.floor(begin * part).astype(np.int64) - slack, 0)
    high = np.ceil((begin + number) * part).astype(np.int64) + slack
    source = np.repeat(np.arange(len(part)), high - low)
    nth = np.concatenate([np.arange(a, b) for a, b in zip(low, high, strict=True)])
    # At equal times the source with the lower index is first, so that the order does not depend on the sort.
    order = np.lexsort((source, (nth + 0.5) / part[source]))
    order = order[begin - int(low.sum()) :][:number]
    return source[order], nth[order]
