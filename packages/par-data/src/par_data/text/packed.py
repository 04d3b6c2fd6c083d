"""Packed sequences as a dataset for torch's DataLoader, in the form that Hugging Face models train on."""

import hashlib
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from .corpus import Corpus
from .packing import IGNORE_INDEX, Ints, PackedLayout, Packing, pack

Sample = dict[str, torch.Tensor]


class PackedDataset(Dataset[Sample]):
    """Sequences of `context` tokens, packed from documents that do not attend to each other.

    A sample is a dict of int64 tensors [context]: `input_ids`, `position_ids` and `labels`. Positions restart at each
    document. Labels are -100 at the first token of each document, at tokens that are not targets, and in the padding.
    There is no `attention_mask`, because with one Hugging Face models silently attend across documents. They also do so
    with a cache, so call them with `use_cache=False`.

    Pass the DataLoader `sampler=dataset.sampler` and `drop_last=True`: the sequences differ from epoch to epoch. With a
    `ShardedDataLoader`, the position is the number of sequences that all ranks have consumed, and a run that resumes on
    another number of ranks sees the same sequences.

    Args:
        corpus: The documents.
        context: Number of tokens in a sequence, at least 2.
        documents: Indices of the documents to use, int64 [n]. None: all.
        packing: "whole" keeps a document in one sequence if it fits, and pads the rest of a sequence. "stream" fills
            every sequence, and splits documents where a sequence ends.
        seed: Seed of the order of documents.

    Attributes:
        context: Number of tokens in a sequence.

    Raises:
        ValueError: A context below 2, an unknown packing, or documents that do not fill a sequence.
    """

    def __init__(
        self, corpus: Corpus, *, context: int, documents: Ints | None = None, packing: Packing = "whole", seed: int = 0
    ) -> None:
        if context < 2:
            raise ValueError(f"context={context}: a sequence needs an input and a target; use at least 2 tokens")
        if packing not in ("whole", "stream"):
            raise ValueError(f"packing={packing!r} is unknown; use 'whole' or 'stream'")
        self._corpus = corpus
        self._documents = np.arange(len(corpus)) if documents is None else np.asarray(documents)
        self._lengths = corpus.lengths[self._documents]
        self._packing: Packing = packing
        self.context, self._seed = context, seed
        self._layout: tuple[int, PackedLayout] | None = None
        if self.count(0) == 0:
            raise ValueError(
                f"{len(self._documents)} documents of {int(self._lengths.sum())} tokens do not fill a sequence of "
                f"context={context}; add text, use a shorter context, or packing='whole'"
            )

    @property
    def digest(self) -> str:
        """A hash of the documents, context, packing and seed, which a saved position is compared with."""
        digest = hashlib.sha256(repr((self.context, self._packing, self._seed, self._corpus.format)).encode())
        digest.update(self._lengths.tobytes() + self._corpus.hashes[self._documents].tobytes())
        return digest.hexdigest()[:32]

    @property
    def sampler(self) -> "SequenceSampler":
        """A sampler of the sequences of an epoch, in order. The order of documents is already shuffled."""
        return SequenceSampler(self)

    def count(self, epoch: int) -> int:
        """Return the number of sequences in an epoch."""
        return len(self._of_epoch(epoch))

    def __getitem__(self, index: tuple[int, int]) -> Sample:
        """Return one sequence, by epoch and number."""
        epoch, number = index
        layout = self._of_epoch(epoch).sequence(number)
        tokens = np.full(self.context, self._corpus.padding, np.int64)
        positions = np.zeros(self.context, np.int64)
        labels = np.full(self.context, IGNORE_INDEX, np.int64)
        at = 0
        for document, begin, length in zip(layout.document, layout.begin, layout.length, strict=True):
            first = int(self._corpus.documents[self._documents[document]]) + int(begin)
            inside = slice(at, at + int(length))
            own = self._corpus.tokens[first : first + int(length)].astype(np.int64)
            tokens[inside] = own
            positions[inside] = np.arange(length)
            labels[inside] = np.where(self._corpus.targets(first, first + int(length)), own, IGNORE_INDEX)
            # The model would predict a document's first token from the document before it.
            labels[at] = IGNORE_INDEX
            at += int(length)
        # Restarted positions make the padding a document of its own, so that no document attends to it.
        positions[at:] = np.arange(self.context - at)
        sample = {"input_ids": tokens, "position_ids": positions, "labels": labels}
        return {name: torch.from_numpy(values) for name, values in sample.items()}

    def __getstate__(self) -> dict[str, object]:
        # The layout of an epoch is as large as the epoch; a worker computes its own.
        return {**self.__dict__, "_layout": None}

    def _of_epoch(self, epoch: int) -> PackedLayout:
        if self._layout is None or self._layout[0] != epoch:
            made = pack(self._lengths, context=self.context, packing=self._packing, seed=self._seed, epoch=epoch)
            self._layout = epoch, made
        return self._layout[1]


class EpochSized(Protocol):
    """A dataset whose number of samples depends on the epoch."""

    def count(self, epoch: int) -> int:
        """Return the number of samples in an epoch."""


class SequenceSampler(Sampler[tuple[int, int]]):
    """A sampler of all samples of an epoch, in order. It yields indices (epoch, number of the sample).

    The sampler has no length, because epochs differ in their number of samples.

    Args:
        dataset: The dataset. Its `count(epoch)` is the number of samples in an epoch.
    """

    def __init__(self, dataset: EpochSized) -> None:
        self._dataset = dataset
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((self.epoch, number) for number in range(self._dataset.count(self.epoch)))
