"""What a layer of experts is said to cost is what is counted: bytes of exchanges, and bytes that are saved."""

from fractions import Fraction

import pytest
import torch
import torch.distributed as dist

from par_layers import Experts, ExpertSplit, MoEShape, TokenDispatcher, copy_to, initialize, moe_cost, reduce_from
from par_testing import count_collectives, saved_bytes

from .routings import chosen, live, numbers

H, F, TOKENS = 8, 12, 16


def made(groups, grid, experts, dtype, *, capacity=None, **options):
    module = Experts(experts, H, F, grid=grid, **options)
    initialize(module, seed=1, dtype=dtype)
    return TokenDispatcher(experts, groups.channels("expert_parallel", 1)[0], capacity_factor=capacity), module


def even(tokens, experts, top_k):
    """Ids of which every expert has as many."""
    return torch.arange(tokens * top_k).remainder(experts).view(tokens, top_k)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("dtype", "capacity"), [(torch.float64, None), (torch.bfloat16, None), (torch.float32, 0.75)], ids=str
)
def test_a_uniform_routing_sends_what_is_said(dtype, capacity):
    shape = MoEShape(
        tokens=TOKENS,
        hidden_size=H,
        intermediate_size=F,
        num_experts=8,
        top_k=2,
        element_size=dtype.itemsize,
        capacity_factor=capacity,
    )
    with live(expert_parallel=4) as (groups, grid):
        dispatch, experts = made(groups, grid, 8, dtype, capacity=capacity)
        x = numbers(TOKENS, H, seed=dist.get_rank(), dtype=dtype).requires_grad_()
        gates = torch.rand(TOKENS, 2).requires_grad_()
        ids = even(TOKENS, 8, 2)
        dispatch.dispatch(
            x.detach(), ids, gates.detach()
        ).wait()  # with a capacity the first tells the number of tokens
        with count_collectives() as counted:
            sent = dispatch.dispatch(x, ids, gates)
            sent.combine(experts(*sent.wait())).sum().backward()
        said = moe_cost(shape, ExpertSplit(parallel=4))
        assert counted.calls() == said.collectives == (4 if capacity else 5)
        assert counted.bytes() * Fraction(3, 4) == said.send == said.receive
        assert said.imbalance == 1


@pytest.mark.ranks(4)
def test_a_measured_routing_sends_what_is_said():
    p, experts, top_k = 4, 8, 2
    split = ExpertSplit(parallel=p)
    with live(expert_parallel=p) as (groups, grid):
        dispatch, module = made(groups, grid, experts, torch.float64)
        rank = dist.get_rank()
        ids = chosen(TOKENS, experts, top_k, seed=rank, among=[0, 1, 2, 5])
        mine = torch.bincount(ids.flatten(), minlength=experts)
        routing = [torch.empty_like(mine) for _ in range(p)]
        dist.all_gather(routing, mine)
        routing = torch.stack(routing)
        x, gates = numbers(TOKENS, H, seed=rank).requires_grad_(), torch.rand(TOKENS, top_k).double().requires_grad_()
        with count_collectives() as counted:
            sent = dispatch.dispatch(x, ids, gates)
            rows, *rest = sent.wait()
            sent.combine(module(rows, *rest)).sum().backward()
        shape = MoEShape(
            tokens=TOKENS, hidden_size=H, intermediate_size=F, num_experts=experts, top_k=top_k, element_size=8
        )
        said = moe_cost(shape, split, routing.tolist(), rank=rank)
        home = int(mine.view(p, -1)[rank].sum())  # what a rank sends to itself is counted, but does not travel
        own = Fraction(experts * 8, p) + home * (2 * (8 * H + 16) + 2 * 8 * H)
        assert counted.bytes() == said.send + own
        every = [moe_cost(shape, split, routing.tolist(), rank=each) for each in range(p)]
        assert sum(each.send for each in every) == sum(each.receive for each in every)
        totals = routing.view(p, p, -1).sum((0, 2))
        assert said.imbalance == Fraction(int(totals.max()) * p, int(totals.sum()))
        assert said.dispatch == (len(rows) - home) * (8 * H + 16)
        assert moe_cost(shape, split, routing.tolist()) == every[int(totals.argmax())]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_experts_save_what_is_said(dtype):
    for axes, imbalance in (({"expert_parallel": 2}, 1), ({"expert_parallel": 2}, 2), ({"expert_tensor": 2}, 1)):
        with live(**axes) as (groups, grid):
            dispatch, experts = made(groups, grid, 8, dtype)
            p, rank = groups.size("expert_parallel"), groups.rank("expert_parallel")
            ids = even(TOKENS, 8 // imbalance, 2)  # with half of the experts all rows come to the first rank
            x, gates = numbers(TOKENS, H, seed=1, dtype=dtype), torch.rand(TOKENS, 2, dtype=torch.float32)
            sent = dispatch.dispatch(x.requires_grad_(), ids, gates.requires_grad_())
            rows, gate, counts = sent.wait()
            saved = saved_bytes(lambda: experts(rows, gate, counts), ignore=experts.parameters())  # noqa: B023
            sent.combine(rows).sum().backward()
            shape = MoEShape(
                tokens=TOKENS, hidden_size=H, intermediate_size=F, num_experts=8, top_k=2, element_size=dtype.itemsize
            )
            said = moe_cost(shape, ExpertSplit(parallel=p, tensor=groups.size("expert_tensor")), imbalance=imbalance)
            assert said.imbalance == imbalance
            assert saved == (said.saved if rank == 0 or imbalance == 1 else 0)


@pytest.mark.ranks(2)
def test_experts_that_are_cut_reduce_what_is_said():
    with live(expert_tensor=2) as (groups, grid):
        dispatch, experts = made(groups, grid, 8, torch.float64)
        x, gates = numbers(TOKENS, H, seed=1).requires_grad_(), numbers(TOKENS, 2, seed=2).requires_grad_()
        tensor = groups["expert_tensor"]
        with count_collectives() as counted:
            sent = dispatch.dispatch(copy_to(x, tensor), even(TOKENS, 8, 2), copy_to(gates, tensor))
            reduce_from(sent.combine(experts(*sent.wait())), tensor).sum().backward()
        shape = MoEShape(tokens=TOKENS, hidden_size=H, intermediate_size=F, num_experts=8, top_k=2, element_size=8)
        said = moe_cost(shape, ExpertSplit(tensor=2))
        assert counted.received() * 8 == said.tensor
        assert said.send == said.receive == said.collectives == 0


def test_a_layer_of_671_billion_parameters_costs_what_others_computed():
    """DeepSeek-V3-like, 64 ranks, 4096 tokens in bf16: 462 MB an exchange, 1.85 GB a layer, 738 MB kept."""
    shape = MoEShape(
        tokens=4096, hidden_size=7168, intermediate_size=2048, num_experts=256, top_k=8, num_shared_experts=1
    )
    said = moe_cost(shape, ExpertSplit(parallel=64))
    assert 462e6 < said.dispatch < 463e6
    assert 1.84e9 < said.receive < 1.86e9
    assert 9.7e12 < said.flops < 9.8e12
    assert 738e6 < said.saved < 739e6
    assert said.host_syncs == 1
    assert moe_cost(shape, ExpertSplit(parallel=64), imbalance=1.5).saved == said.saved * 3 / 2


def test_costs_of_sizes_that_do_not_fit_are_refused():
    shape = MoEShape(tokens=4, hidden_size=8, intermediate_size=6, num_experts=6, top_k=2)
    with pytest.raises(ValueError, match="6 experts of 6 features do not divide by 4 and 1 ranks"):
        moe_cost(shape, ExpertSplit(parallel=4))
    with pytest.raises(ValueError, match="the routing has 1 rows of"):
        moe_cost(shape, ExpertSplit(parallel=2), [[4, 4, 0, 0, 0, 0]])
    with pytest.raises(ValueError, match="imbalance=3"):
        moe_cost(shape, ExpertSplit(parallel=2), imbalance=3)
    with pytest.raises(ValueError, match="top_k=7: there are 6 experts; pass 1 to 6"):
        MoEShape(tokens=4, hidden_size=8, intermediate_size=6, num_experts=6, top_k=7)
    with pytest.raises(ValueError, match="sharded experts receive all tokens"):
        ExpertSplit(tensor=2, joined=2)
