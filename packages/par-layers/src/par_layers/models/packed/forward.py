"""The forward of packed experts whose rows travel: in the place of the one that the model's class has."""

from functools import cached_property
from typing import Any

from torch import Tensor, nn

from ..._collectives import copy_to, reduce_from
from ...experts.dispatch import TokenDispatcher
from ...experts.entrance import cut_rows, join_rows
from ...experts.experts import Experts
from ...experts.replay import in_backward
from ...modes.grid import Axes, Grid
from .routed import RoutedForward


class DealtForward:
    """Sends tokens to the ranks that have their experts, computes this rank's experts, and brings the sums back.

    The tokens of a tensor group are alike on all its ranks. Where an expert is whole on a rank, each of them sends its
    share of the tokens; where it is cut over the group, each sends all, and outputs are partial sums.

    Args:
        module: The module, whose parameters are this rank's part.
        experts: Experts that compute what the module's do, with the very parameters of the module.
        grid: This rank's place, in the view "experts".
        axes: The axes of the tensor group that have several ranks.
        name: The name of the module in the model, for messages.
        block: What the block around it computes; None where nobody knows it.
    """

    def __init__(
        self,
        module: nn.Module,
        experts: Experts,
        grid: Grid,
        axes: Axes,
        name: str = "experts",
        block: RoutedForward | None = None,
    ) -> None:
        self.module, self.experts, self.grid, self.axes = module, experts, grid, axes
        self.name, self.block = name, block
        self.activation = experts.activation  # which may be a method of the module: a copy has that of its own

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "dispatcher"}

    @cached_property
    def dispatcher(self) -> TokenDispatcher:
        """What brings rows to the ranks of their experts and back, over a communicator of its own."""
        groups = self.grid.groups
        is_dealt = groups is not None and self.grid.size(("expert_parallel",)) > 1
        channel = groups.channels("expert_parallel", 1)[0] if groups is not None and is_dealt else None
        return TokenDispatcher(self.experts.num_experts, channel)

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """As packed experts of transformers are called. Every rank must call it, one without tokens too.

        Args:
            hidden_states: Tokens [M, h], alike on the ranks of a tensor group.
            top_k_index: The experts of each token, int64 [M, k].
            top_k_weights: Their weights, [M, k].

        Returns:
            The weighted sums of the experts' outputs, [M, h].

        Raises:
            ValueError: A weight is NaN on some rank, or a token has none of the experts, and then every rank raises.
        """
        x, gates, tokens = hidden_states, top_k_weights, len(hidden_states)
        group = self.grid.group(self.axes) if self.axes else None
        is_whole = self.grid.size(("expert_tensor",)) == 1
        ids = top_k_index if self.block is None else self.block.confirmed(top_k_index)
        ids = ids.masked_fill(gates.detach().isnan(), self.experts.num_experts)
        if group is not None and is_whole:
            x, ids, gates = cut_rows(x, group), cut_rows(ids, group), cut_rows(gates, group)
        elif group is not None:
            x, gates = copy_to(x, group), copy_to(gates, group)
        try:
            handle = self.dispatcher.dispatch(x, ids, gates)
        except ValueError as error:
            raise ValueError(f"{self.name!r}: {error}{_OTHERS if in_backward() else ''}") from None
        y = handle.combine(self._computed(*handle.wait()))
        if group is not None:
            y = join_rows(y, tokens, group) if is_whole else reduce_from(y, group)
        return y

    def _computed(self, rows: Tensor, gates: Tensor, counts: Tensor) -> Tensor:
        """The outputs of this rank's experts, multiplied by their gates."""
        module: Any = self.module
        self.experts.activation, self.experts.weight_grad_hook = self.activation, module.weight_grad_hook
        if not module.has_post_expert_norm:
            outputs: Tensor = self.experts(rows, gates, counts)
            return outputs
        normed: Tensor = module.post_expert_norm(self.experts(rows, gates.new_ones(gates.shape), counts))
        return (normed * gates.unsqueeze(-1)).to(rows.dtype)


_OTHERS = (
    "; or, as this runs again in backward, it chose experts that are not those of its forward; choose by torch.topk, "
    "which then gives the same ones"
)


def deal_(dealt: DealtForward) -> None:
    """Makes a module's experts those of this rank, in place; its parameters are this rank's part already.

    Args:
        dealt: What the module computes from now on, with what `experts_like` gave for it, which gets its parameters.
    """
    module, experts = dealt.module, dealt.experts
    for name in experts._parameters.keys() - module._parameters.keys():  # biases that there are none of
        module.register_parameter(name, None)
    experts.__dict__["_parameters"] = module._parameters
    module.__dict__["weight_grad_hook"] = None
    module.__dict__["forward"] = dealt
