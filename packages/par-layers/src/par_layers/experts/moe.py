"""A mixture of experts as a layer: router, exchange and experts, in the residual layout of a layer set."""

from torch import Tensor, nn

from ..layers.linear import ParallelLinear
from .dispatch import TokenDispatcher
from .entrance import Entrance
from .experts import Experts
from .router import Router
from .shared import SharedExperts


class MoE(nn.Module):
    """Sends each token to the experts that a router chooses, and adds their outputs up. `LayerSet.MoE` makes it.

    Args:
        gate: The router.
        experts: This rank's experts.
        dispatch: Brings tokens to the experts' ranks and outputs back.
        entrance: How the tokens of the tensor group reach the router and the experts.
        shared_experts: What every token goes to as well, or None.
        shared_expert_gate: Makes what its output is multiplied by, after a sigmoid; or None.
    """

    def __init__(
        self,
        gate: Router,
        experts: Experts,
        dispatch: TokenDispatcher,
        entrance: Entrance,
        shared_experts: SharedExperts | None = None,
        shared_expert_gate: ParallelLinear | None = None,
    ) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts
        self.shared_experts, self.shared_expert_gate = shared_experts, shared_expert_gate
        self._dispatch, self._entrance = dispatch, entrance

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The residual layout to the same. Every rank that exchanges tokens must call it, one without tokens too.

        Args:
            x: Activations [B, S, h], local; [M, h] where tokens are of no sequences.
            mask: False where a token is padding: it is routed as others are, but balance does not count it. Bool
                [B, S], of all tokens of the tensor group, as ids are. None: all count.

        Raises:
            ValueError: The activation or the mask has another shape; or on some rank a token chose no expert that there
                is, and then every rank raises.
        """
        entrance = self._entrance
        entrance.check(x, mask)
        routed, entering = entrance.enter(x)
        counted = None if mask is None else entrance.of_tokens(mask)
        routing = self.gate(routed, counted, sequences=entrance.sequences(x))
        gates, most = entrance.factors(routing.gates), entrance.most_tokens(x)
        try:
            sent = self._dispatch.send(entering, routing.ids, gates, tokens=most, priorities=routing.priorities)
        except ValueError as error:
            raise ValueError(f"{self.gate.title}: {error}") from None
        shared = self._shared(x, routed, entering)  # while rows travel
        if sent.dropped is not None:
            self.gate.count_dropped(sent.dropped)
        sums = sent.through(self.experts)
        if shared is None:
            return entrance.leave(sums, x)
        if entrance.sums_parts:
            return entrance.leave(sums + shared, x)
        return entrance.leave(sums, x) + shared

    def _shared(self, x: Tensor, routed: Tensor, entering: Tensor) -> Tensor | None:
        """What the shared experts give: parts of sums that join those of the others, or the whole in x's layout."""
        if self.shared_experts is None:
            return None
        entrance, gate = self._entrance, self.shared_expert_gate
        if entrance.sums_parts:
            parts: Tensor = self.shared_experts(entering)
            return parts if gate is None else parts * entrance.factors(gate(routed).sigmoid())
        whole = entrance.reduce(self.shared_experts(entrance.gather(x)))
        return whole if gate is None else whole * gate(x).sigmoid()
