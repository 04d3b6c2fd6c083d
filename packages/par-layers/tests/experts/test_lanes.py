"""Experts in lanes: those of this package, with bits that do not depend on the number of ranks that hold them."""

import pytest
import torch
import torch.distributed as dist

from par_groups import LaneCounts, ProcessGroups, Topology
from par_layers import ExpertConfig, initialize, layer_set
from par_layers.experts.dispatch import TokenDispatcher
from par_layers.experts.experts import Experts
from par_layers.experts.lanes import LaneExperts
from par_layers.models.packed.look import experts_like
from par_layers.modes.grid import Grid

from ..models.test_packed_experts import Kind

EXPERTS, HIDDEN, INNER, TOKENS, TOP_K = 4, 12, 10, 17, 2
CONFIGS = [
    ExpertConfig(),
    ExpertConfig(activation="gelu", bias=True),
    ExpertConfig(activation="clamped_swiglu", bias=True, interleaved=True, transposed=True),
]


def numbers(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def filled(kind, config, grid=None, dtype=torch.float32):
    experts = kind(EXPERTS, HIDDEN, INNER, config=config, grid=grid)
    initialize(experts, 0)
    for name, parameter in experts.named_parameters():
        if name.endswith("bias"):  # which start at zero
            first = 0 if grid is None else grid.index(("expert_parallel",)) * len(parameter)
            parameter.data = numbers(EXPERTS, parameter.shape[1], seed=9)[first : first + len(parameter)]
    return experts.to(dtype)


def outcome(experts, dispatcher, lane, dtype=torch.float32):
    """The output of a lane's tokens, their gradient and those of the gates and of this rank's parameters."""
    x, gates = numbers(TOKENS, HIDDEN, seed=lane, dtype=dtype), numbers(TOKENS, TOP_K, seed=10 + lane, dtype=dtype)
    ids = numbers(TOKENS, EXPERTS, seed=20 + lane).topk(TOP_K).indices
    x.requires_grad_(), gates.requires_grad_()
    for parameter in experts.parameters():
        parameter.grad_dtype = torch.float64
    y = dispatcher.dispatch(x, ids, gates).apply(experts)
    (y * numbers(TOKENS, HIDDEN, seed=30 + lane, dtype=dtype) / 64).sum().backward()
    return [y.detach(), x.grad, gates.grad], {name: each.grad for name, each in experts.named_parameters()}


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_experts_in_lanes_are_experts(config):
    dispatcher, found = TokenDispatcher(EXPERTS, None), []
    for kind in (Experts, LaneExperts):
        experts = filled(kind, config, dtype=torch.float64)
        found.append(outcome(experts, dispatcher, 0, torch.float64))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_deferred_gradients_of_experts_in_lanes_have_the_same_bits(config):
    experts, later = filled(LaneExperts, config), []
    now = outcome(experts, TokenDispatcher(EXPERTS, None), 0)[1]
    experts.zero_grad()
    experts.weight_grad_hook = later.append
    outcome(experts, TokenDispatcher(EXPERTS, None), 0)
    found = {id(each.weight): each.compute() for each in later}
    weights = {name: each for name, each in experts.named_parameters() if not name.endswith("bias")}
    assert len(found) == len(weights)
    assert all(torch.equal(found[id(weight)], now[name]) for name, weight in weights.items())


def over_ranks(kind, config, dtype, ranks):
    """The outcomes of all lanes, with several experts on each rank."""
    with ProcessGroups(Topology.from_config({"expert": ranks}, dist.get_world_size())) as groups:
        grid = Grid(groups, view="experts")
        dispatcher = TokenDispatcher(EXPERTS, groups["expert_parallel"], by_source=kind is LaneExperts)
        values, gradients = outcome(filled(kind, config, grid, dtype), dispatcher, dist.get_rank(), dtype)
        every = [None] * ranks
        dist.all_gather_object(every, (values, gradients))
    return [values for values, _ in every], {name: torch.cat([own[name] for _, own in every]) for name in gradients}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_experts_over_ranks_have_the_bits_of_one_rank(config, dtype):
    values, gradients = over_ranks(LaneExperts, config, dtype, 2)
    total = None
    for lane, expected in enumerate(values):
        found, own = outcome(filled(LaneExperts, config, dtype=dtype), TokenDispatcher(EXPERTS, None), lane, dtype)
        assert all(map(torch.equal, found, expected))
        total = own if total is None else {name: total[name] + own[name] for name in own}
    assert all(torch.equal(total[name], gradients[name]) for name in total)


@pytest.mark.ranks(2)
def test_experts_that_multiply_all_lanes_together_have_other_bits():
    """So the test above can fail."""
    gradients = over_ranks(Experts, CONFIGS[0], torch.bfloat16, 2)[1]
    found = [
        outcome(filled(Experts, CONFIGS[0], dtype=torch.bfloat16), TokenDispatcher(EXPERTS, None), lane, torch.bfloat16)
        for lane in range(2)
    ]
    total = {name: sum(own[name] for _, own in found) for name in gradients}
    assert not all(torch.equal(total[name], gradients[name]) for name in total)


def test_experts_in_lanes_without_rows_have_gradients_of_zero():
    experts = filled(LaneExperts, CONFIGS[1])
    rows, gates = torch.zeros(0, HIDDEN, requires_grad=True), torch.zeros(0)
    experts(rows, gates, torch.zeros(EXPERTS, 3, dtype=torch.int64)).sum().backward()
    assert all(not parameter.grad.any() for parameter in experts.parameters())


def test_counts_of_other_rows_raise():
    experts = filled(LaneExperts, CONFIGS[0])
    with pytest.raises(ValueError, match=r"counts are \[\[2\], .*\], 3 together, but there are 4 rows"):
        experts(torch.zeros(4, HIDDEN), torch.zeros(4), [2, 0, 0, 1])


@pytest.mark.ranks(2)
def test_norm_after_each_expert_in_lanes_raises():
    with ProcessGroups(Topology.from_config({"expert": 2}, dist.get_world_size())) as groups:
        module = Kind(norm=True)
        with pytest.raises(ValueError, match=r"'mlp' has a norm after each expert, .*; use expert=1 with numerics"):
            experts_like(module, Grid(groups, view="experts"), "mlp", lanes=LaneCounts(data=4))
        experts_like(Kind(norm=True), Grid(None), "mlp", lanes=LaneCounts(data=4))  # one rank has the rows of one lane


def test_capacity_in_lanes_raises():
    layers = layer_set(None, lanes=LaneCounts(data=4))
    with pytest.raises(ValueError, match=r"capacity_factor=1.0 with numerics='canonical': the longest lane"):
        layers.MoE(HIDDEN, INNER, EXPERTS, TOP_K, capacity_factor=1.0)
