"""Positions of this rank's tokens in their sequences and documents, for layers that depend on positions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from par_groups import copy_to_device

from .._tensor_cache import tensor_cache
from .._torch_private import disable_dynamo
from ..context.tokens import Tokens
from ..modes.grid import Grid
from ..modes.layout import ActivationLayout, part


@dataclass(frozen=True, kw_only=True)
class Places:
    """Token positions of activations [b, s, ...] in one layout.

    Args:
        layout: The layout.
        grid: This rank's coordinates.
        static: Function from the number of tokens of a sequence rank to the split of sequences of one document; None
            without context parallelism.
    """

    layout: ActivationLayout
    grid: Grid
    static: Callable[[int], Tokens] | None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the object itself: copies of a model use the same ranks."""
        return self

    def are_told(self, tokens: Tokens | None) -> bool:
        """Return whether positions depend on more than the layout: on `tokens`, or on context parallelism."""
        return tokens is not None or self.static is not None

    def tokens_of(self, x: Tensor, tokens: Tokens | None, who: str) -> Tokens | None:
        """Return how an activation's batch is split: `tokens`, or else the static split; None for full sequences.

        Args:
            x: The activation, [b, s, ...].
            tokens: Split of its batch, if the model received one.
            who: Name of the layer, for the message.

        Raises:
            ValueError: The activation's shape does not match the batch.
        """
        length = x.shape[1] * self.grid.size(self.layout.sequence)
        if tokens is None:
            return None if self.static is None else self.static(length)
        check_tokens(tokens, self.grid.size(self.layout.context), length, who)
        rows = x.shape[0] * self.grid.size(self.layout.batch)
        if len(tokens.documents) not in (1, rows):
            raise ValueError(
                f"{who} was given tokens of {len(tokens.documents)} rows, but the batch has {rows}; give the tokens "
                "that the batch was cut to, of a microbatch their rows(start, stop)"
            )
        return tokens

    # torch.compile would otherwise compile a new graph for the documents of every batch.
    @disable_dynamo
    def in_row(self, x: Tensor, tokens: Tokens | None, who: str) -> tuple[Tensor, int]:
        """Return the positions of this rank's tokens in the full sequence.

        Args:
            x: The activation, [b, s, ...].
            tokens: Split of its batch; None is the split of sequences of one document.
            who: Name of the layer, for messages.

        Returns:
            Position of each token, int64 [s], past the end of the sequence for padding; and the sequence length.
        """
        known = self._known(x, tokens, who)
        places = _in_row(known, self.grid.index(self.layout.context), self._here(known), x.device)
        return places, known.length

    @disable_dynamo
    def in_document(self, x: Tensor, tokens: Tokens | None, who: str) -> tuple[Tensor, int]:
        """Return the positions of this rank's tokens in their documents.

        Args:
            x: The activation, [b, s, ...].
            tokens: Split of its batch; None is the split of sequences of one document.
            who: Name of the layer, for messages.

        Returns:
            Position of each token, int64 [b, s] (b is 1 if all sequences have the same documents), 0 for padding; and
            the length of the longest document.
        """
        known = self._known(x, tokens, who)
        rows = len(known.documents)
        # A single row of documents holds for the rows of all ranks.
        batch = part(rows, self.layout.batch, self.grid, "the batch") if rows > 1 else slice(0, 1)
        where = (batch.start, batch.stop)
        places = _in_document(known, self.grid.index(self.layout.context), where, self._here(known), x.device)
        return places, max(map(max, known.documents))

    def _known(self, x: Tensor, tokens: Tokens | None, who: str) -> Tokens:
        """Return how an activation's batch is split; without `tokens` or a static split, one document a sequence."""
        known = self.tokens_of(x, tokens, who)
        if known is not None:
            return known
        length = x.shape[1] * self.grid.size(self.layout.sequence)
        return Tokens(length, length, ((length,),), (((0, length),),))

    def _here(self, tokens: Tokens) -> tuple[int, int]:
        """Return the range of this rank's tokens among the tokens of its context-parallel rank."""
        here = part(tokens.local, self.layout.sequence, self.grid, "this rank's part of the sequence")
        return here.start, here.stop


def check_tokens(tokens: Tokens, ranks: int, length: int, who: str) -> None:
    """Raise ValueError unless `tokens` assign `length` tokens to each of `ranks` sequence ranks."""
    if tokens.ranks != ranks:
        raise ValueError(
            f"{who} was given tokens that are cut over {tokens.ranks} ranks, but the layers are of {ranks} sequence "
            "ranks; cut the batch with the context of these layers"
        )
    if tokens.local != length:
        raise ValueError(
            f"{who}: tokens are {tokens.local} a rank, the activation has {length}; cut the batch with the same tokens"
        )


# The first layer computes the positions of a batch and copies them to the device; later layers read the cache.
@tensor_cache(maxsize=64)
def _in_row(tokens: Tokens, rank: int, here: tuple[int, int], device: torch.device) -> Tensor:
    return copy_to_device(torch.from_numpy(tokens.index(rank)[slice(*here)]), device)


@tensor_cache(maxsize=64)
def _in_document(
    tokens: Tokens, rank: int, rows: tuple[int, int], here: tuple[int, int], device: torch.device
) -> Tensor:
    positions = tokens.positions(rank)[slice(*rows), slice(*here)].copy()
    return copy_to_device(torch.from_numpy(positions), device)
