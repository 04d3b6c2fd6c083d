"""A split sequence in a trace: a context that records attention and passed states, and sends nothing."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from par_layers import Context, Mask, Tokens

from ...costs.sequence import CAUSAL

SHOWN = 3
"""Ranks of the sequence in a trace. The middle rank of three continues from states and passes states on."""


class RecordingContext(Context):
    """Replacement of a sequence context, which computes nothing.

    Attributes:
        attend: Function that returns the output of attention from queries, keys, values and mask.
        note: Function that receives the states that a recurrent layer passes on.
        has_links: Whether the model has recurrent layers.
        place: Rank whose part of a row runs. States have unknown shapes until rank 0 has run.
    """

    def __init__(self) -> None:
        super().__init__(None)
        self.attend: Callable[[Tensor, Tensor, Tensor, Mask], Tensor]
        self.note: Callable[[Mapping[Any, Tensor]], None]
        self.has_links = False
        self.place = 0

    def of_three(self, local: int) -> Tokens:
        """Return the split of a row over three ranks.

        Args:
            local: Number of tokens on each rank.
        """
        runs = tuple(((rank * local, (rank + 1) * local),) for rank in range(SHOWN))
        return Tokens(SHOWN * local, SHOWN * local, ((SHOWN * local,),), runs)

    def state_link(self) -> Any:
        """Return a connection of a recurrent layer."""
        self.has_links = True
        return RecordedLink(self)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tokens: Tokens | None = None,
        *,
        mask: Mask = CAUSAL,
        scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Return the output of attention, by its shape."""
        del tokens, scale, sinks
        return self.attend(q, k, v, mask)


class RecordedLink:
    """Connection of a recurrent layer in a trace: the states that it passes on are those that it receives.

    Args:
        context: Context of the trace.
    """

    def __init__(self, context: RecordingContext) -> None:
        self._context = context
        self._states: dict[Any, Tensor] = {}

    @property
    def rank(self) -> int:
        """Rank whose part of a row runs."""
        return self._context.place

    def receive(self, x: Tensor, *, with_gradient: bool) -> tuple[Tensor, dict[Any, Tensor]]:
        """Return the input, and states like those of the last forward."""
        return x, {key: torch.empty_like(state, requires_grad=with_gradient) for key, state in self._states.items()}

    def send(self, x: Tensor, out: Tensor, states: Mapping[Any, Tensor], *, with_gradient: bool) -> Tensor:
        """Record the states, and return the output."""
        del x, with_gradient
        self._states = dict(states)  # with their graph, which the message to the next rank keeps
        self._context.note(states)
        return out

    def __deepcopy__(self, memo: dict[int, Any]) -> "RecordedLink":
        """Return the connection itself: the copies of a model share what they show."""
        return self
