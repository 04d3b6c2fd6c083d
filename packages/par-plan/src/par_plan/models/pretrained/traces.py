"""Traces of a model's saved activations, each made once."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ...inputs import NumberWidths
from .kept import SavedActivations, trace_saved
from .recording import RecordingContext
from .structure import Structure


@dataclass(frozen=True)
class SavedTrace:
    """Saved activations of the layers of a model.

    Args:
        tokens: Number of tokens of each row in the trace.
        layers: Saved activations by layer, as `trace_saved` returns them.
    """

    tokens: int
    layers: Mapping[int, SavedActivations]


class Traces:
    """Traces of one model, by the widths of numbers and the tokens of a rank.

    Args:
        structure: The model.
        context: Number of tokens in a row.
        packed: Whether rows have positions of their own.
        masked: Whether attention receives a mask on one rank. Over sequence ranks, attention saves no mask.
    """

    def __init__(self, structure: Structure, context: int, *, packed: bool, masked: bool) -> None:
        self._structure, self._context = structure, context
        self._packed, self._masked = packed, masked
        self._known: dict[tuple[NumberWidths, int], SavedTrace] = {}

    def alone(self, numbers: NumberWidths) -> SavedTrace:
        """Return the trace on one rank of the sequence."""
        if (numbers, 0) not in self._known:
            layers = self._layers(self._structure.model, self._context, numbers, None)
            self._known[numbers, 0] = SavedTrace(self._context, layers)
        return self._known[numbers, 0]

    def any_over_ranks(self) -> SavedTrace:
        """Return a trace as `over_ranks` does, of any widths and tokens."""
        known = next((trace for (_, tokens), trace in self._known.items() if tokens), None)
        return self.over_ranks(NumberWidths(), self._context) if known is None else known

    def over_ranks(self, numbers: NumberWidths, local: int) -> SavedTrace:
        """Return the trace of a rank that holds a part of each row.

        Args:
            numbers: Widths of numbers.
            local: Number of tokens of a row on a rank.

        Raises:
            ValueError: The sequence cannot be split.
        """
        model, context = self._attending
        # Attention saves as many bytes for each token in rows of any length. A recurrent layer also saves states, and
        # some compute in chunks of tokens, of which the last one is filled up.
        tokens = local if context.has_links else self._context
        if (numbers, tokens) not in self._known:
            context.place = 0
            layers = self._layers(model, tokens, numbers, context)
            if context.has_links:  # the trace of rank 0 has shown the shapes of the states that rank 1 receives
                context.place = 1
                layers = self._layers(model, tokens, numbers, context)
            self._known[numbers, tokens] = SavedTrace(tokens, layers)
        return self._known[numbers, tokens]

    @property
    def pass_states(self) -> bool:
        """Whether recurrent layers pass states from each sequence rank to the next."""
        try:
            return self._attending[1].has_links
        except ValueError:  # the sequence cannot be split
            return False

    @cached_property
    def _attending(self) -> tuple[Any, RecordingContext]:
        """The model with a recording context. The trial of its layers computes on the CPU, so it runs once."""
        model, context = copy.deepcopy(self._structure.model), RecordingContext()
        context.transformers_(model)
        return model, context

    def _layers(
        self, model: Any, tokens: int, numbers: NumberWidths, context: RecordingContext | None
    ) -> Mapping[int, SavedActivations]:
        return trace_saved(
            model,
            self._structure.roles,
            tokens,
            numbers,
            self._structure.experts_per_token,
            packed=self._packed,
            masked=self._masked and context is None,
            over_ranks=context,
        )
