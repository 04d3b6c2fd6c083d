"""Cost of a layer of experts for a rank: traffic, saved bytes and operations; uniform or as routed. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

COUNT, GATE, PADDING = 8, 4, 16
"""Bytes of a number of rows, of a gate at least, and of what travels beside a row on its way to an expert."""

Routing = Sequence[Sequence[int]]
"""Number of rows of each rank for each expert, p lists of E."""


@dataclass(frozen=True, kw_only=True)
class MoEShape:
    """One layer of experts.

    Args:
        tokens: Number of tokens that each rank sends, M.
        hidden_size: Features of a token, h.
        intermediate_size: Features of an expert's activation, f.
        num_experts: Number of experts on all ranks, E.
        top_k: Number of experts per token, k.
        num_shared_experts: Number of experts that every token uses in addition.
        gated: Whether the first matmul returns a gate and an up part, 2 f features.
        element_size: Bytes of an activation element, b.
        capacity_factor: Capacity of an expert, as in `TokenDispatcher`; None drops no token.

    Raises:
        ValueError: `top_k` exceeds the number of experts.
    """

    tokens: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    num_shared_experts: int = 0
    gated: bool = True
    element_size: int = 2
    capacity_factor: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"top_k={self.top_k}: there are {self.num_experts} experts; pass 1 to {self.num_experts}")

    @property
    def slots(self) -> int | None:
        """Number of routed tokens that an expert takes from each rank; None without a capacity."""
        if self.capacity_factor is None:
            return None
        return math.ceil(self.capacity_factor * self.tokens * self.top_k / self.num_experts)


@dataclass(frozen=True, kw_only=True)
class ExpertSplit:
    """Distribution of experts over ranks.

    Args:
        parallel: Number of ranks that partition the experts, p.
        tensor: Number of ranks that shard each expert: 1, or the size of the tensor group.
        joined: Number of tensor ranks that split tokens before the router and gather them after the experts. This
            applies if experts are not sharded and activations between layers are full.

    Raises:
        ValueError: `joined` and `tensor` are both larger than 1: sharded experts receive all tokens of their tensor
            group.
    """

    parallel: int = 1
    tensor: int = 1
    joined: int = 1

    def __post_init__(self) -> None:
        if self.tensor > 1 and self.joined > 1:
            raise ValueError(
                f"tensor is {self.tensor} and joined is {self.joined}: sharded experts receive all tokens; set "
                "one of them to 1"
            )


@dataclass(frozen=True)
class MoECost:
    """Cost of one layer for one rank, in a forward and a backward pass.

    Args:
        send: Bytes sent to other ranks in exchanges between experts.
        receive: Bytes received in these exchanges.
        dispatch: Bytes received in one exchange of routed tokens with their gates.
        combine: Bytes received in one exchange of outputs.
        tensor: Bytes received over the tensor group.
        flops: Floating-point operations of the router and the experts.
        saved: Bytes that experts save for backward.
        imbalance: Routed tokens of the rank with the most tokens, relative to the mean.
        collectives: Number of exchanges between experts.
        host_syncs: Number of times that the host waits for the device.
    """

    send: Fraction
    receive: Fraction
    dispatch: Fraction
    combine: Fraction
    tensor: Fraction
    flops: Fraction
    saved: Fraction
    imbalance: Fraction
    collectives: int
    host_syncs: int


def moe_cost(
    shape: MoEShape,
    split: ExpertSplit,
    routing: Literal["uniform"] | Routing = "uniform",
    *,
    imbalance: float = 1.0,
    rank: int | None = None,
) -> MoECost:
    """Compute the cost of a layer of experts.

    Args:
        shape: Sizes of the layer.
        split: Distribution of the experts over ranks.
        routing: "uniform", or the number of routed tokens of each rank for each expert, p lists of E numbers. With a
            capacity all experts have the same number of tokens, and `routing` has no effect.
        imbalance: Routed tokens of the counted rank relative to the mean, for uniform routing. Default: 1.0.
        rank: Counted rank, 0 .. p - 1. Default: the rank with the most routed tokens.

    Raises:
        ValueError: Sizes do not divide, or the routing is for a different number of ranks or experts.
    """
    p, experts = split.parallel, shape.num_experts
    if experts % p or shape.intermediate_size % split.tensor:
        raise ValueError(
            f"{experts} experts of {shape.intermediate_size} features do not divide by {p} and {split.tensor} ranks; "
            "change the sizes"
        )
    sent = _sent(shape, p, routing, imbalance)
    # One list stands for all ranks when all send the same.
    totals = [p // len(sent) * sum(column) for column in zip(*sent, strict=True)]
    if rank is None:
        rank = max(range(p), key=totals.__getitem__)
    rows, mine = totals[rank], sent[rank % len(sent)]
    away, arriving = sum(mine) - mine[rank], rows - mine[rank]
    with_gates, plain = shape.hidden_size * shape.element_size + PADDING, shape.hidden_size * shape.element_size
    counts = Fraction(0) if shape.slots is not None else Fraction(experts * COUNT * (p - 1), p)
    first = shape.intermediate_size * (2 if shape.gated else 1) // split.tensor
    second = shape.intermediate_size // split.tensor
    # Each token passes every shared expert, without a dispatch.
    products = rows + shape.tokens * shape.num_shared_experts
    return MoECost(
        send=counts + away * with_gates + arriving * plain + away * plain + arriving * with_gates,
        receive=counts + arriving * with_gates + away * plain + arriving * plain + away * with_gates,
        dispatch=arriving * with_gates,
        combine=away * plain,
        tensor=_over_tensor(shape, split),
        flops=6 * shape.hidden_size * (shape.tokens * experts + products * (first + second)),
        saved=rows * ((shape.hidden_size + first) * shape.element_size + max(GATE, shape.element_size)),
        imbalance=p * max(totals) / sum(totals) if any(totals) else Fraction(1),
        # Counts, rows and outputs in forward, and two in backward; a capacity makes the counts known.
        collectives=0 if p == 1 else 5 - (shape.slots is not None),
        # Without a capacity, the host reads the exchanged counts once.
        host_syncs=int(p > 1 and shape.slots is None),
    )


def _sent(shape: MoEShape, p: int, routing: Literal["uniform"] | Routing, imbalance: float) -> list[list[Fraction]]:
    """Return the number of rows to each of p ranks from each rank, p lists; one list if all ranks send the same."""
    if shape.slots is not None:
        return [[Fraction(shape.num_experts // p * shape.slots)] * p]
    if isinstance(routing, str):
        if not 1 <= imbalance <= p:
            raise ValueError(
                f"imbalance={imbalance}: the busiest of {p} ranks has 1 to {p} times the mean; pass a number in between"
            )
        # One rank is the busiest, and the rest divide what is left.
        most = Fraction(imbalance) * shape.tokens * shape.top_k / p
        rest = (Fraction(shape.tokens * shape.top_k) - most) / max(p - 1, 1)
        return [[most, *[rest] * (p - 1)]]
    if len(routing) != p or any(len(row) != shape.num_experts for row in routing):
        raise ValueError(
            f"the routing has {len(routing)} rows of {sorted({len(row) for row in routing})} numbers; give one of each "
            f"of {p} ranks, with a number for each of {shape.num_experts} experts"
        )
    local = shape.num_experts // p
    return [[Fraction(sum(row[to * local : (to + 1) * local])) for to in range(p)] for row in routing]


def _over_tensor(shape: MoEShape, split: ExpertSplit) -> Fraction:
    """Return the bytes that a rank receives over its tensor group, forward and backward."""
    tokens = shape.tokens * shape.hidden_size * shape.element_size
    if split.joined > 1:  # an all-gather of outputs, and in backward one of gradients
        return Fraction(2 * (split.joined - 1) * tokens)
    gates = shape.tokens * shape.top_k * max(GATE, shape.element_size)
    return Fraction(2 * (split.tensor - 1), split.tensor) * (2 * tokens + gates)  # all-reduces
