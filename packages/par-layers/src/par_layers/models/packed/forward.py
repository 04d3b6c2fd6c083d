"""The forward of packed experts whose rows travel: in the place of the one that the model's class has."""

from functools import cached_property
from typing import Any

from torch import Tensor, nn

from par_groups import attributes

from ..._collectives import copy_to, reduce_from
from ...experts.dispatch import TokenDispatcher
from ...experts.entrance import cut_rows, join_rows
from ...experts.experts import Experts
from ...experts.lanes import LaneExperts
from ...experts.replay import in_backward
from ...modes.grid import Axes, Grid
from .routed import RoutedForward


class DealtForward:
    """Forward that sends tokens to the ranks of their experts, computes this rank's experts, and returns the sums.

    The ranks of a tensor group hold the same tokens. If a rank holds full experts, each rank of the tensor group sends
    its part of the tokens. If the group shards experts, each rank sends all tokens, and outputs are partial sums, but
    for experts in lanes.

    Args:
        module: Module whose parameters are this rank's part.
        experts: Experts with the module's activation that use the module's own parameters.
        grid: Coordinates of this rank in the view "experts".
        axes: Axes of the tensor group with several ranks.
        name: Name of the module in the model, for messages.
        block: Forward of the block around the module; None if it is unknown.
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
        # A process group cannot be copied; the copy makes its own dispatcher when it first runs.
        return {key: value for key, value in self.__dict__.items() if key != "dispatcher"}

    @cached_property
    def dispatcher(self) -> TokenDispatcher:
        """Dispatcher that sends rows to the ranks of their experts and back, over its own communicator."""
        groups = self.grid.groups
        is_dealt = groups is not None and self.grid.size(("expert_parallel",)) > 1
        channel = groups.channels("expert_parallel", 1)[0] if groups is not None and is_dealt else None
        return TokenDispatcher(self.experts.num_experts, channel, by_source=isinstance(self.experts, LaneExperts))

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Run packed experts with the arguments of transformers' experts. Collective, also for a rank without tokens.

        Args:
            hidden_states: Tokens [M, h], equal on the ranks of a tensor group.
            top_k_index: Experts of each token, int64 [M, k].
            top_k_weights: Routing weights, [M, k].

        Returns:
            The weighted sums of the experts' outputs, [M, h].

        Raises:
            ValueError: A weight is NaN, or an expert id is out of range, on some rank. Every rank raises.
        """
        x, gates, tokens = hidden_states, top_k_weights, len(hidden_states)
        group = self.grid.group(self.axes) if self.axes else None
        is_whole = self.grid.size(("expert_tensor",)) == 1
        in_lanes = isinstance(self.experts, LaneExperts)  # whose outputs and gradients are complete
        ids = top_k_index if self.block is None else self.block.confirmed(top_k_index)
        # An id beyond the last expert makes the dispatch raise on every rank, with the name of the rank that has NaN.
        ids = ids.masked_fill(gates.detach().isnan(), self.experts.num_experts)
        if group is not None and is_whole:
            x, ids, gates = cut_rows(x, group), cut_rows(ids, group), cut_rows(gates, group)
        elif group is not None and not in_lanes:
            x, gates = copy_to(x, group), copy_to(gates, group)
        try:
            handle = self.dispatcher.dispatch(x, ids, gates)
        except ValueError as error:
            raise ValueError(f"{self.name!r}: {error}{_OTHERS if in_backward() else ''}") from None
        y = handle.combine(self._computed(*handle.wait()))
        if group is not None and is_whole:
            y = join_rows(y, tokens, group)
        elif group is not None and not in_lanes:
            y = reduce_from(y, group)
        return y

    def _computed(self, rows: Tensor, gates: Tensor, counts: Tensor) -> Tensor:
        """Return the outputs of this rank's experts, multiplied by their gates."""
        module: Any = self.module
        self.experts.activation, self.experts.weight_grad_hook = self.activation, module.weight_grad_hook
        if not module.has_post_expert_norm:
            outputs: Tensor = self.experts(rows, gates, counts)
            return outputs
        # The norm comes before the gates, and is not linear, so the experts are run with gates of one.
        normed: Tensor = module.post_expert_norm(self.experts(rows, gates.new_ones(gates.shape), counts))
        return (normed * gates.unsqueeze(-1)).to(rows.dtype)


_OTHERS = (
    "; or, as this runs again in backward, it chose experts that are not those of its forward; choose by torch.topk, "
    "which then gives the same ones"
)


def deal_(dealt: DealtForward) -> None:
    """Turn a module's experts into this rank's experts, in place; its parameters are this rank's part already.

    Args:
        dealt: New forward of the module, with the experts from `experts_like`, which get the module's parameters.
    """
    module, experts = dealt.module, dealt.experts
    for name in experts._parameters.keys() - module._parameters.keys():  # biases that there are none of
        module.register_parameter(name, None)
    experts.__dict__["_parameters"] = module._parameters
    module.__dict__["weight_grad_hook"] = None
    module.__dict__["forward"] = dealt
    attributes.EXACT_GRADIENTS.set(module, isinstance(experts, LaneExperts))
