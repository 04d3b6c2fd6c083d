"""A mixture of experts as a layer: router, token dispatcher and experts, in the residual layout of a layer set."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..layers.linear import ParallelLinear, check_divides
from ..layers.parameter import Init, Rows
from ..modes.grid import EXPERTS, Axes, Grid
from ..modes.lanes import check_lanes
from ..modes.layout import ActivationLayout
from ..modes.product_1d import local_product
from ..modes.rules import ModeRules, ParallelMatmul, WeightSharding
from .balance import LoadBalancing, TokenAxes
from .dispatch import TokenDispatcher
from .entrance import Entrance, LaneEntrance
from .experts import Experts
from .lanes import LaneExperts
from .products import activation_of
from .router import Router
from .selection import ExpertConfig, RouterConfig


class SharedExperts(nn.Module):
    """Feed-forward layer that is sharded over the tensor group. It does not communicate.

    Its input is the gathered activation, and its output is this rank's summand of the sum over the tensor group. With
    products of a mode, both are in the mode's residual layout, and the products communicate. The
    submodules are `gate_proj` (only for gated activations), `up_proj` and `down_proj`.

    Args:
        hidden_size: Features of a token, h.
        intermediate_size: Features of all shared experts together.
        config: Options of the routed experts, of which `activation` and `interleaved` are used.
        axes: Axes of the tensor group.
        grid: Coordinates of this rank.
        products: Matmuls into and out of the features of the layer; default: those of one device.
        init: Init rule of the weights; default: torch.nn.Linear's, uniform in +-1/sqrt(inputs).
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        config: ExpertConfig,
        axes: Axes,
        grid: Grid,
        products: tuple[ParallelMatmul, ParallelMatmul] = (local_product, local_product),
        init: Init | None = None,
    ) -> None:
        super().__init__()
        check_divides(intermediate_size, axes, grid, "the features of all shared experts")
        self.activation = activation_of(config.activation, interleaved=config.interleaved)
        self._is_swiglu, self._interleaved = config.activation == "swiglu", config.interleaved
        outside, inside = ActivationLayout(), ActivationLayout(features=axes)
        into, out_of = products
        linear = partial(ParallelLinear, bias=False, grid=grid, init=init)
        column = partial(
            linear,
            [Rows(length=intermediate_size, axes=axes)],
            hidden_size,
            cut=WeightSharding(rows=axes),
            product=into,
        )
        if self.activation.gated:
            self.gate_proj = column(takes=outside, out=inside)
        self.up_proj = column(takes=outside, out=inside)
        row = WeightSharding(columns=axes)
        rows = [Rows(length=hidden_size)]
        self.down_proj = linear(rows, intermediate_size, cut=row, takes=inside, out=outside, product=out_of)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's summand of the sum over the tensor group, [..., h], for tokens [..., h].

        With products of a mode, it is the sum.
        """
        inner = self.up_proj(x)
        if self._is_swiglu:
            inner = functional.silu(self.gate_proj(x)) * inner
        else:
            rows = inner.flatten(0, -2)
            if self.activation.gated:
                parts = (self.gate_proj(x).flatten(0, -2), rows)
                # The activation takes gate and up as the single first matmul of an expert gives them.
                rows = torch.stack(parts, -1).flatten(-2) if self._interleaved else torch.cat(parts, -1)
            inner = self.activation.forward(rows).view(inner.shape)
        summand: Tensor = self.down_proj(inner)
        return summand


def gate_of_shared(hidden_size: int, sum_over: Axes, grid: Grid, init: Init | None = None) -> ParallelLinear:
    """Return the linear layer whose sigmoid is the weight of the shared experts' output, [..., h] to [..., 1].

    Args:
        hidden_size: Features of a token, h.
        sum_over: Axes over which its gradient is a partial sum.
        grid: Coordinates of this rank.
        init: Init rule of its weight; default: torch.nn.Linear's.
    """
    return ParallelLinear(
        [Rows(length=1)],
        hidden_size,
        False,
        cut=WeightSharding(sum_over=sum_over),
        takes=ActivationLayout(),
        out=ActivationLayout(),
        product=local_product,
        grid=grid,
        init=init,
    )


class MoE(nn.Module):
    """Layer that routes each token to a few experts and sums their outputs. `LayerSet.MoE` makes it.

    Args:
        gate: Router.
        experts: Experts of this rank.
        dispatcher: Dispatcher between the ranks of the experts.
        entrance: Path of the tensor group's tokens to the experts and back.
        shared_experts: Experts that every token uses in addition, or None.
        shared_expert_gate: Linear layer whose sigmoid multiplies the output of the shared experts, or None.
    """

    def __init__(
        self,
        gate: Router,
        experts: Experts,
        dispatcher: TokenDispatcher,
        entrance: Entrance,
        shared_experts: SharedExperts | None = None,
        shared_expert_gate: ParallelLinear | None = None,
    ) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts
        self.shared_experts, self.shared_expert_gate = shared_experts, shared_expert_gate
        self._dispatcher, self._entrance = dispatcher, entrance

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the layer in the residual layout. Every rank of the expert group must call it, also without tokens.

        Args:
            x: Local activations, [B, S, h]; or [M, h] for tokens that belong to no sequences.
            mask: Mask of all tokens of the tensor group, bool [B, S], False for padding. Padding is routed, but load
                balancing does not count it. None counts every token.

        Raises:
            ValueError: A shape does not fit. Or a token on some rank has NaN scores, and then every rank raises.
        """
        entrance = self._entrance
        entrance.check(x, mask)
        routed, entering = entrance.enter(x)
        counted = None if mask is None else entrance.of_tokens(mask)
        routing = self.gate(routed, counted, sequences=entrance.sequences(x))
        gates, most = entrance.factors(routing.gates), entrance.most_tokens(x)
        try:
            ids, priorities = entrance.sent(routing.ids), entrance.sent(routing.priorities)
            handle = self._dispatcher.dispatch(entering, ids, gates, tokens=most, priorities=priorities)
        except ValueError as error:
            # Ids out of range come from a router, so the message names the one that produced them.
            raise ValueError(f"{self.gate.title}: {error}") from None
        # The shared experts run while the routed tokens travel, forward and, by autograd's order, backward.
        shared = self._shared(x, routed, entering)
        # The number of dropped tokens is read after that, since it may wait for the rows of the exchange.
        if handle.dropped is not None:
            self.gate.count_dropped(handle.dropped)
        sums = handle.apply(self.experts)
        if shared is None:
            return entrance.leave(sums, x)
        if entrance.sums_parts:
            return entrance.leave(sums + shared, x)
        return entrance.leave(sums, x) + shared

    def _shared(self, x: Tensor, routed: Tensor, entering: Tensor) -> Tensor | None:
        """Compute the shared experts: partial sums if the experts give partial sums, else full outputs like x."""
        if self.shared_experts is None:
            return None
        entrance, gate = self._entrance, self.shared_expert_gate
        if entrance.sums_parts:
            # Both partial sums are added before one reduction, instead of a reduction each.
            parts: Tensor = self.shared_experts(entering)
            return parts if gate is None else parts * entrance.factors(gate(routed).sigmoid())
        full = entrance.reduce(self.shared_experts(entrance.gather(x)))
        return full if gate is None else entrance.weigh(full, gate, x, routed)


@dataclass(frozen=True, kw_only=True)
class MoEOptions:
    """Options of a mixture of experts other than its sizes.

    Args:
        router: Options of the router.
        expert: Options of the experts.
        num_shared_experts: Number of experts that every token uses.
        shared_expert_gate: Whether a gate multiplies the output of the shared experts.
        capacity_factor: Capacity of an expert, or None.
        balance: Load balancing; None for none.
        init: Init rule of the weights; None for torch.nn.Linear's.
    """

    router: RouterConfig
    expert: ExpertConfig
    num_shared_experts: int
    shared_expert_gate: bool
    capacity_factor: float | None
    balance: LoadBalancing | None
    init: Init | None


def make_moe(
    hidden_size: int,
    intermediate_size: int,
    num_experts: int,
    top_k: int,
    *,
    options: MoEOptions,
    rules: ModeRules,
    grid: Grid,
) -> MoE:
    """Make the MoE layer of a layer set whose mode is "1d" or one device.

    Args:
        hidden_size: Features of the residual stream, h.
        intermediate_size: Features of an expert's activation, f.
        num_experts: Number of experts on all ranks, E.
        top_k: Number of experts per token, k.
        options: Options of router, experts and shared experts.
        rules: Rules of the mode.
        grid: Coordinates of this rank.
    """
    router, expert, init = options.router, options.expert, options.init
    num_shared_experts, shared_expert_gate = options.num_shared_experts, options.shared_expert_gate
    residual, axes = rules.residual, rules.inner.features
    experts_grid = Grid(grid.groups, view=EXPERTS)
    unsplit = () if grid.topology is None else tuple(grid.topology.axes)
    products = () if grid.topology is None else tuple(grid.topology.products)
    if not axes and "tensor" in unsplit + products and grid.size(("tensor",)) > 1:
        raise ValueError(
            f"the layers have no tensor mode: the topology has {grid.size(('tensor',))} tensor ranks, and experts need "
            "layers that are sharded over them; use layer_set('1d', groups)"
        )
    if num_shared_experts < 0 or (shared_expert_gate and not num_shared_experts):
        raise ValueError(
            f"num_shared_experts={num_shared_experts}: it does not fit shared_expert_gate={shared_expert_gate}; pass a "
            "positive number"
        )
    # With one rank on `expert_tensor`, a rank holds full experts, and each token enters on one tensor rank. With more,
    # every expert is sharded over the tensor group, and each token enters on all its ranks.
    entrance = (Entrance if rules.expert_lanes is None else LaneEntrance)(
        group=grid.group(axes) if axes else None,
        sequence=bool(residual.sequence),
        whole=experts_grid.size(("expert_tensor",)) == 1,
    )
    same_sequences = {*axes, *residual.context, "pipeline"}
    token_axes = TokenAxes(
        context=residual.context,
        partial=axes if entrance.cuts_tokens else (),
        replicas=grid.larger([axis for axis in unsplit if axis not in same_sequences]),
    )
    # The dispatcher gets a communicator of its own. On a shared one, an all-to-all could meet a reduction of ZeRO when
    # ranks differ in which parameters they use.
    exchanges = grid.groups is not None and experts_grid.size(("expert_parallel",)) > 1
    private = grid.groups.channels("expert_parallel", 1)[0] if grid.groups is not None and exchanges else None
    make_experts = Experts if rules.expert_lanes is None else partial(LaneExperts, lanes=rules.expert_lanes)
    matmuls: tuple[ParallelMatmul, ParallelMatmul] = (local_product, local_product)
    if rules.lanes.in_layers:
        matmuls = (rules.column_product, rules.row_product)
    shared, shared_gate = None, None
    if num_shared_experts:
        features = num_shared_experts * intermediate_size
        check_lanes(features, rules.lanes, "the number of features of all shared experts")
        shared = SharedExperts(hidden_size, features, config=expert, axes=axes, grid=grid, products=matmuls, init=init)
    if shared_expert_gate:
        # Then each tensor rank computes the gate for its own tokens only.
        sum_over = axes if entrance.sequence and entrance.cuts_tokens else ()
        shared_gate = gate_of_shared(hidden_size, sum_over, grid, init)
    return MoE(
        Router(
            hidden_size,
            num_experts,
            top_k,
            config=router,
            balance=options.balance,
            grid=grid,
            token_axes=token_axes,
            init=init,
        ),
        make_experts(num_experts, hidden_size, intermediate_size, config=expert, grid=experts_grid, init=init),
        TokenDispatcher(
            num_experts, private, capacity_factor=options.capacity_factor, by_source=rules.expert_lanes is not None
        ),
        entrance,
        shared,
        shared_gate,
    )
