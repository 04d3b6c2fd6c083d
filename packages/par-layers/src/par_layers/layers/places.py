"""Where this rank's tokens stand in their rows, for layers whose numbers depend on it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from .._tensor_cache import tensor_cache
from .._torch_private import disable_dynamo
from ..context.tokens import Tokens
from ..modes.grid import Grid
from ..modes.layout import ActivationLayout, part


@dataclass(frozen=True, kw_only=True)
class Places:
    """The places of activations [b, s, ...] that lie in one layout.

    Args:
        layout: The layout.
        grid: This rank's place.
        static: From the number of a sequence rank's tokens to the cut of rows of one document; None where nothing cut
            the sequence before the layers saw it.
    """

    layout: ActivationLayout
    grid: Grid
    static: Callable[[int], Tokens] | None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: copies of a model work on the same ranks."""
        return self

    def are_told(self, tokens: Tokens | None) -> bool:
        """Whether tokens stand elsewhere than the layout alone says: they were given, or cut before."""
        return tokens is not None or self.static is not None

    def tokens_of(self, x: Tensor, tokens: Tokens | None, who: str) -> Tokens | None:
        """The cut of an activation, as it was given; else the static one, or None on ranks that have whole rows.

        Args:
            x: The activation, [b, s, ...].
            tokens: The cut of its batch, if the model was given one.
            who: The layer, for the message.

        Raises:
            ValueError: The activation is no part of such a batch.
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

    @disable_dynamo  # a graph would be made anew for every batch's documents
    def in_row(self, x: Tensor, tokens: Tokens | None, who: str) -> tuple[Tensor, int]:
        """Where this rank's tokens of an activation stand in the whole row.

        Args:
            x: The activation, [b, s, ...].
            tokens: The cut of its batch; None is that of rows of one document.
            who: The layer, for messages.

        Returns:
            The place of each token, int64 [s], that of padding behind the row; and the number of tokens of a row.
        """
        known = self._known(x, tokens, who)
        places = _in_row(known, self.grid.index(self.layout.context), self._here(known), x.device)
        return places, known.length

    @disable_dynamo
    def in_document(self, x: Tensor, tokens: Tokens | None, who: str) -> tuple[Tensor, int]:
        """Where this rank's tokens of an activation stand inside their documents.

        Args:
            x: The activation, [b, s, ...].
            tokens: The cut of its batch; None is that of rows of one document.
            who: The layer, for messages.

        Returns:
            The place of each token, int64 [b, s], b being 1 if all rows are alike, 0 for padding; and the number of
            tokens of the longest document.
        """
        known = self._known(x, tokens, who)
        rows = len(known.documents)
        batch = part(rows, self.layout.batch, self.grid, "the batch") if rows > 1 else slice(0, 1)
        where = (batch.start, batch.stop)
        places = _in_document(known, self.grid.index(self.layout.context), where, self._here(known), x.device)
        return places, max(map(max, known.documents))

    def _known(self, x: Tensor, tokens: Tokens | None, who: str) -> Tokens:
        """The cut of an activation; on ranks that have whole rows, and were told nothing, rows of one document."""
        known = self.tokens_of(x, tokens, who)
        if known is not None:
            return known
        length = x.shape[1] * self.grid.size(self.layout.sequence)
        return Tokens(length, length, ((length,),), (((0, length),),))

    def _here(self, tokens: Tokens) -> tuple[int, int]:
        """This rank's tokens among those of its sequence rank."""
        here = part(tokens.local, self.layout.sequence, self.grid, "this rank's part of the sequence")
        return here.start, here.stop


def check_tokens(tokens: Tokens, ranks: int, length: int, who: str) -> None:
    """Raises ValueError unless rows that were cut so have `length` tokens on each of `ranks` sequence ranks."""
    if tokens.ranks != ranks:
        raise ValueError(
            f"{who} was given tokens that are cut over {tokens.ranks} ranks, but the layers are of {ranks} sequence "
            "ranks; cut the batch with the context of these layers"
        )
    if tokens.local != length:
        raise ValueError(
            f"{who}: tokens are {tokens.local} a rank, the activation has {length}; cut the batch with the same tokens"
        )


@tensor_cache(maxsize=64)  # a batch's first layer computes it, and copies it to the device; the others find it
def _in_row(tokens: Tokens, rank: int, here: tuple[int, int], device: torch.device) -> Tensor:
    return torch.from_numpy(tokens.index(rank)[slice(*here)]).to(device)


@tensor_cache(maxsize=64)
def _in_document(
    tokens: Tokens, rank: int, rows: tuple[int, int], here: tuple[int, int], device: torch.device
) -> Tensor:
    return torch.from_numpy(tokens.positions(rank)[slice(*rows), slice(*here)].copy()).to(device)
