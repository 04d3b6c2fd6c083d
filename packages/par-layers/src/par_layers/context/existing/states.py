"""States of recurrent layers: the parts of documents that a rank holds, and a cache for the states between them."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..tokens import Tokens

StateKey = tuple[str, int]
"""Kind of a state ("conv", "recurrent" or "linear"), and its index among the states of a layer."""

States = dict[StateKey, Tensor]


@dataclass(frozen=True)
class DocumentPart:
    """Consecutive tokens of one document on one rank. A recurrent layer computes them in one call.

    Args:
        rows: First row of the batch, and one more than the last.
        start: First token, counted on the rank.
        stop: One more than the last token.
        continues: Whether the document begins on an earlier rank, whose state the part starts from.
        goes_on: Whether the document continues on the next rank, which needs the state.
    """

    rows: tuple[int, int]
    start: int
    stop: int
    continues: bool
    goes_on: bool


def document_parts(tokens: Tokens, rank: int, rows: int) -> list[DocumentPart]:
    """Return the parts of documents on a rank, in the order in which the rank computes them.

    A part that needs no state of an earlier rank comes before one that waits for it, so that the next rank waits
    only if a document covers this rank completely. Messages have no names, so both ends of an edge use one order: the
    documents that began on the nearest rank first, then by row.

    Args:
        tokens: Split of the batch.
        rank: Index of the rank on the axis of the sequence.
        rows: Number of rows of the batch.

    Raises:
        ValueError: The ranks do not hold consecutive tokens.
    """
    local = tokens.local
    if any(runs != ((each * local, (each + 1) * local),) for each, runs in enumerate(tokens.runs)):
        raise ValueError(
            "split: a recurrent layer passes its state from each rank to the next, so each rank must hold consecutive "
            "tokens; use split='contiguous'"
        )
    first, last = rank * local, (rank + 1) * local
    found: list[tuple[tuple[int, bool, int], DocumentPart]] = []
    for row, documents in enumerate(tokens.documents):
        of_rows = (0, rows) if len(tokens.documents) == 1 else (row, row + 1)
        # The padding at the end is one more document, so that it reads no state of a real one.
        edges = list(dict.fromkeys([0, *accumulate(documents), tokens.padded]))
        for begin, end in pairwise(edges):
            if begin < last and end > first:
                inside = (max(begin, first) - first, min(end, last) - first)
                continues, goes_on = begin < first, end > last
                order = (-(begin // local), not (continues or goes_on), row)
                found.append((order, DocumentPart(of_rows, *inside, continues, goes_on)))
    return [span for _, span in sorted(found, key=lambda each: each[0])]


class StateCache:
    """Cache of one layer, in the protocol of Hugging Face Transformers, which starts from given states.

    A recurrent layer reads its states from a cache, continues from them, and writes the new states. Unlike the caches
    of Transformers, this one keeps the graph of autograd.

    Args:
        before: States after the earlier tokens; empty at the begin of a document.
    """

    def __init__(self, before: Mapping[StateKey, Tensor]) -> None:
        # Code for a single token changes a state in place, and autograd allows that for a copy.
        self._before = {key: state.clone() for key, state in before.items()}
        self._after: States = {}

    def states(self) -> States:
        """Return the states after the tokens of the call."""
        return {**self._before, **self._after}

    def has_previous_state(self, layer_idx: int = 0, state_idx: int = 0) -> bool:
        """Return whether there are states of earlier tokens."""
        del layer_idx, state_idx
        return bool(self._before)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return True: layers then compute a single token as they compute several, and change no state in place."""
        del layer_idx
        return True

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last inputs of a convolution, [B, channels, width - 1]."""
        del layer_idx
        return self._before.get(("conv", state_idx))

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int = 0,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Store the last inputs of a convolution, and return all inputs with the earlier ones in front.

        Args:
            conv_states: Inputs of the call, [B, channels, tokens].
            layer_idx: Index of the layer; not used.
            state_idx: Index of the convolution in the layer.
            conv_kernel_size: Width of the convolution. Default: the number of tokens.
        """
        del layer_idx
        before = self._before.get(("conv", state_idx))
        joined = conv_states if before is None else torch.cat([before, conv_states], -1)
        kept = (conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size) - 1
        # Zeros in front are what a convolution itself reads before the first token.
        padded = functional.pad(joined, (max(0, kept - joined.shape[-1]), 0))
        self._after["conv", state_idx] = padded[..., padded.shape[-1] - kept :]
        return joined

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the state of a recurrence, [B, ...]."""
        del layer_idx
        return self._before.get(("recurrent", state_idx))

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int = 0, state_idx: int = 0, **_: Any
    ) -> Tensor:
        """Store the state of a recurrence, [B, ...], and return it."""
        del layer_idx
        self._after["recurrent", state_idx] = recurrent_states
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """Return the state of lightning attention, [B, heads, D, D]."""
        del layer_idx
        return self._before.get(("linear", 0))

    def set_linear_cache(self, layer_idx: int, state: Tensor) -> None:
        """Store the state of lightning attention, [B, heads, D, D]."""
        del layer_idx
        self._after["linear", 0] = state
