"""Rows of packed documents as a dataset: what a model of transformers trains on, for a DataLoader of torch's."""

import hashlib
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from .corpus import Corpus
from .packing import IGNORED, Ints, Packing, Pieces, pack

Row = dict[str, torch.Tensor]


class PackedRows(Dataset[Row]):
    """Rows of `context` tokens, in which documents that do not see each other follow one another.

    A row is a dict of int64 tensors [context]: `input_ids`; `position_ids`, which restart at each document; and
    `labels`, which are -100 at the first token of each document, where the text is nobody's target, and in the padding.
    There is no `attention_mask`: with one, models of transformers attend across documents without a word. They also do
    where they keep a cache, so call them with `use_cache=False`.

    Give the DataLoader `sampler=rows.sampler` and `drop_last=True`: rows differ from epoch to epoch. With
    `GlobalDataLoader`, or in a Strategy, the position is then the number of rows that all ranks have consumed, and a
    run that goes on under another topology sees the same rows.

    Args:
        corpus: The documents.
        context: The number of tokens in a row.
        documents: The numbers of the documents to take; None: all.
        packing: "whole": a document lies in one row, if it fits, and what is left of a row is padding. "stream": rows
            are filled exactly, and documents are cut wherever a row ends.
        seed: Seed of the order of documents.

    Attributes:
        context: The number of tokens in a row.

    Raises:
        ValueError: A context below 2, another packing, or documents that fill no row.
    """

    def __init__(
        self, corpus: Corpus, *, context: int, documents: Ints | None = None, packing: Packing = "whole", seed: int = 0
    ) -> None:
        if context < 2:
            raise ValueError(f"context is {context}; a row needs at least 2 tokens, one to see and one to predict")
        if packing not in ("whole", "stream"):
            raise ValueError(f"packing is {packing!r}; it can be 'whole' or 'stream'")
        self._corpus = corpus
        self._documents = np.arange(len(corpus)) if documents is None else np.asarray(documents)
        self._lengths = corpus.lengths[self._documents]
        self._packing: Packing = packing
        self.context, self._seed = context, seed
        self._pieces: tuple[int, Pieces] | None = None
        if self.count(0) == 0:
            raise ValueError(
                f"{len(self._documents)} documents of {int(self._lengths.sum())} tokens fill no row of {context}; give "
                "more text, a shorter context, or packing='whole'"
            )

    @property
    def digest(self) -> str:
        """Another one for other rows: of other documents, context, packing or seed."""
        digest = hashlib.sha256(repr((self.context, self._packing, self._seed, self._corpus.format)).encode())
        digest.update(self._lengths.tobytes() + self._corpus.hashes[self._documents].tobytes())
        return digest.hexdigest()[:32]

    @property
    def sampler(self) -> "RowSampler":
        """The rows of an epoch, one after the other."""
        return RowSampler(self)

    def count(self, epoch: int) -> int:
        """The number of rows in an epoch."""
        return self._of_epoch(epoch).rows

    def __getitem__(self, index: tuple[int, int]) -> Row:
        """One row, by epoch and number."""
        epoch, row = index
        pieces = self._of_epoch(epoch).of(row)
        tokens = np.full(self.context, self._corpus.padding, np.int64)
        positions = np.zeros(self.context, np.int64)
        labels = np.full(self.context, IGNORED, np.int64)
        at = 0
        for document, begin, length in zip(pieces.document, pieces.begin, pieces.length, strict=True):
            first = int(self._corpus.documents[self._documents[document]]) + int(begin)
            inside = slice(at, at + int(length))
            own = self._corpus.tokens[first : first + int(length)].astype(np.int64)
            tokens[inside] = own
            positions[inside] = np.arange(length)
            labels[inside] = np.where(self._corpus.targets(first, first + int(length)), own, IGNORED)
            labels[at] = IGNORED
            at += int(length)
        positions[at:] = np.arange(self.context - at)  # the padding is a document of its own
        row_of = {"input_ids": tokens, "position_ids": positions, "labels": labels}
        return {name: torch.from_numpy(values) for name, values in row_of.items()}

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_pieces": None}  # which a worker makes itself

    def _of_epoch(self, epoch: int) -> Pieces:
        if self._pieces is None or self._pieces[0] != epoch:
            made = pack(self._lengths, context=self.context, packing=self._packing, seed=self._seed, epoch=epoch)
            self._pieces = epoch, made
        return self._pieces[1]


class HasRows(Protocol):
    """A dataset of rows that differ from epoch to epoch."""

    def count(self, epoch: int) -> int:
        """The number of rows in an epoch."""


class RowSampler(Sampler[tuple[int, int]]):
    """The rows of an epoch, in order. It has no length: that of another epoch may be another.

    Args:
        rows: The dataset.
    """

    def __init__(self, rows: "HasRows") -> None:
        self._rows = rows
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Goes to an epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return ((self.epoch, row) for row in range(self._rows.count(self.epoch)))
