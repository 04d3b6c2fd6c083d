"""Memory, work and traffic of layers of experts on one rank, by `par_layers.moe_cost`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from par_layers import ExpertSplit, MoECost, MoEShape, moe_cost

from .mixture import Load, Mixture, imbalance_of
from .spread import ExpertPlacement


class ExpertWidths(Protocol):
    """Bytes of a number, as `NumberWidths` has them."""

    @property
    def residual(self) -> int:
        """Bytes per element of the residual stream."""

    @property
    def product(self) -> int:
        """Bytes per element of a matmul's operand."""


BESIDE = 16
"""Bytes that travel beside a row on its way to an expert: its gate, and what keeps rows aligned."""


@dataclass(frozen=True, kw_only=True)
class ExpertWork:
    """Cost of layers of experts on the rank that receives most tokens.

    Args:
        imbalance: Number of tokens that this rank receives, divided by the mean over the ranks.
        layers: Number of layers of experts on the rank.
        flops: Floating-point operations of one layer for a microbatch, including router and shared experts.
        kept: Bytes that one layer saves for backward of a microbatch.
        host_syncs: Number of times per step that the host waits for token counts from the device.
    """

    imbalance: float
    layers: int
    flops: float
    kept: float
    host_syncs: int


@lru_cache(maxsize=4096)
def layer_cost(
    mixture: Mixture, spread: ExpertPlacement, tokens: int, element: int, load: Load = 1.0, *, joins: bool = True
) -> MoECost:
    """Return the cost of one layer on a rank for one microbatch.

    Args:
        mixture: Layer of experts.
        spread: Placement of the experts on ranks.
        tokens: Number of tokens in the microbatch, on all ranks of the tensor group together.
        element: Size of an element of an activation, in bytes.
        load: Relative load of the experts. Default: 1.0.
        joins: Whether the layer all-gathers the tokens that tensor ranks split; it does not under sequence parallelism.
            Default: True.
    """
    shape = MoEShape(
        tokens=routed_tokens(spread, tokens),
        hidden_size=mixture.hidden,
        intermediate_size=mixture.intermediate,
        num_experts=mixture.experts,
        top_k=mixture.top_k,
        num_shared_experts=mixture.shared,
        gated=mixture.gated,
        element_size=element,
    )
    # Tensor ranks that do not shard the experts each route a part of the tokens, and gather the outputs.
    joined = spread.group if spread.tensor == 1 and joins else 1
    split = ExpertSplit(parallel=spread.parallel, tensor=spread.tensor, joined=joined)
    return moe_cost(shape, split, imbalance=imbalance_of(load, spread.parallel))


def routed_tokens(spread: ExpertPlacement, tokens: int) -> int:
    """Return the number of tokens that a rank routes; tensor ranks route equal parts if experts are unsharded."""
    return math.ceil(tokens / spread.group) if spread.tensor == 1 else tokens


def saved_mixture(mixture: Mixture, spread: ExpertPlacement, numbers: ExpertWidths, tokens: int, load: Load) -> float:
    """Return the bytes that autograd saves of a `LayerSet.MoE` for one microbatch.

    Args:
        mixture: Layer of experts.
        spread: Placement of the experts on ranks.
        numbers: Widths of numbers.
        tokens: Number of tokens in the microbatch, on all ranks of the tensor group together.
        load: Relative load of the experts.
    """
    routed, width = routed_tokens(spread, tokens), mixture.hidden * numbers.residual
    router = routed * (width + 4 * mixture.experts + mixture.top_k * (8 + 4) + 4)  # scores, ids, gates and their sum
    shared = 0.0
    if mixture.shared:
        inner = mixture.shared * mixture.intermediate / spread.group * (4 if mixture.gated else 2)
        # Shared experts run on whole tokens. Their input is kept once more only where the router sees a part of it.
        shared = tokens * inner * numbers.product + (0 if routed == tokens else tokens * width)
    return router + shared + float(layer_cost(mixture, spread, tokens, numbers.product, load).saved)


def tensor_bytes(mixture: Mixture, spread: ExpertPlacement, numbers: ExpertWidths, tokens: int) -> float:
    """Return the bytes over the tensor axis for a `LayerSet.MoE` and one microbatch."""
    if spread.group == 1:
        return 0.0
    # Under sequence parallelism the block's own gather and scatter move the tokens, so the layer joins none.
    received = float(layer_cost(mixture, spread, tokens, numbers.residual, joins=not spread.sequence).tensor)
    if mixture.shared and spread.tensor == 1:  # else they join the sums of the others
        received += 2 * all_reduced(spread.group, tokens * mixture.hidden) * numbers.residual
    return received


def tensor_operations(mixture: Mixture, spread: ExpertPlacement) -> int:
    """Return the number of collectives over the tensor axis for a `LayerSet.MoE` and one microbatch."""
    if spread.tensor > 1:
        return 5 if spread.sequence else 3
    return (4 if spread.sequence else 2) * (mixture.shared > 0) + (0 if spread.sequence else 2)


def partial_elements(mixture: Mixture, spread: ExpertPlacement) -> float:
    """Return the elements that a rank receives per step to sum the router's partial gradients."""
    # Ranks that route different tokens each have a part of the router's gradient; else they have the same one.
    return all_reduced(spread.group, mixture.router) if spread.tensor == 1 and spread.group > 1 else 0.0


@dataclass(frozen=True)
class RoutedTraffic:
    """Bytes that a rank receives of the ranks that experts are dealt out over, in forward and backward of one layer.

    Args:
        dispatch: Rows on their way to experts, with gates, and their gradients.
        combine: Outputs on their way back, and their gradients.
        counts: Numbers of rows.
    """

    dispatch: float
    combine: float
    counts: float


def routed_traffic(
    mixture: Mixture, spread: ExpertPlacement, numbers: ExpertWidths, tokens: int, load: Load
) -> RoutedTraffic:
    """Return the bytes that the busiest rank receives for one microbatch.

    Args:
        mixture: Layer of experts.
        spread: Placement of the experts on ranks.
        numbers: Widths of numbers.
        tokens: Number of tokens in the microbatch, on all ranks of the tensor group together.
        load: Relative load of the experts.
    """
    cost, row = layer_cost(mixture, spread, tokens, numbers.residual, load), mixture.hidden * numbers.residual
    rows = float(cost.dispatch) / (row + BESIDE) + float(cost.combine) / row  # in backward what left comes again
    return RoutedTraffic(rows * (row + BESIDE), rows * row, float(cost.receive) - rows * (2 * row + BESIDE))


def all_reduced(ranks: int, elements: float) -> float:
    """Return the elements that a rank receives in an all-reduce."""
    return 2 * (ranks - 1) / ranks * elements


def expert_work(
    mixture: Mixture | None,
    spread: ExpertPlacement,
    numbers: ExpertWidths,
    layers: int,
    microbatches: Mapping[int, int],
    load: Load,
) -> ExpertWork | None:
    """Return the cost of layers of experts on the busiest rank; None without experts.

    Args:
        mixture: Layer of experts; None: the model has no experts.
        spread: Placement of the experts on ranks.
        numbers: Widths of numbers.
        layers: Number of layers with experts that the rank has.
        microbatches: Number of microbatches by their number of tokens on all ranks of the tensor group together.
        load: Relative load of the experts.
    """
    if mixture is None or not layers:
        return None
    # Memory and time are those of the largest microbatch; the host waits in every one.
    cost = layer_cost(mixture, spread, max(microbatches), numbers.product, load)
    return ExpertWork(
        imbalance=float(cost.imbalance),
        layers=layers,
        flops=float(cost.flops),
        kept=float(cost.saved),
        host_syncs=cost.host_syncs * layers * sum(microbatches.values()),
    )
