"""Dispatch and Experts equal the dense loop: outputs, and the gradients of tokens, gates and every parameter."""

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from par_groups import sharding_of
from par_layers import ExpertConfig, copy_to, initialize, reduce_from
from par_layers.experts.dispatch import TokenDispatcher
from par_layers.experts.experts import Experts
from par_layers.experts.products import Activation
from par_testing import count_collectives

from .routings import ROUTINGS, chosen, live, loop, numbers

H, F = 6, 4
EXACT = 1e-12
"""Tolerance: sums over tokens are in another order."""


def whole_weights(experts, names):
    """The weights of all experts, drawn as those of a rank are, by the names that the loop takes them in."""
    state = dict(experts.named_parameters())
    return [state[name].detach().requires_grad_() if name in state else None for name in names]


def assert_equals_loop(axes, experts, top_k, routing, *, capacity=None, **options):
    tokens_of, among = ROUTINGS[routing]
    activation = options.pop("reference", lambda wide: functional.silu(wide[:, :F]) * wide[:, F:])
    with live(**axes) as (groups, grid):
        p, parts = groups.size("expert_parallel"), groups.size("expert_tensor")
        place = groups.rank("expert_data") * p + groups.rank("expert_parallel")
        whole, mine = Experts(experts, H, F, **options), Experts(experts, H, F, grid=grid, **options)
        for module in (whole, mine):
            initialize(module, seed=3, dtype=torch.float64)
            for name, parameter in module.named_parameters():  # biases begin at zero
                if name.endswith("bias"):
                    full = numbers(*sharding_of(parameter).shape, seed=4)
                    for box in sharding_of(parameter).boxes:
                        box.of(parameter.data).copy_(full[box.slices])
        dispatch = TokenDispatcher(experts, groups.channels("expert_parallel", 1)[0], capacity_factor=capacity)
        tokens = tokens_of(place, p)
        x, gates = numbers(tokens, H, seed=place).requires_grad_(), numbers(tokens, top_k, seed=9).requires_grad_()
        ids = chosen(tokens, experts, top_k, 5 + place, among(experts, p))
        upstream = numbers(tokens, H, seed=20 + place)

        into = (x, gates)
        if parts > 1:
            into = [copy_to(each, groups["expert_tensor"]) for each in into]
        if capacity:
            dispatch.dispatch(x.detach(), ids, gates.detach()).wait()  # the first tells how many tokens there are
        with count_collectives() as counted:
            sent = dispatch.dispatch(into[0], ids, into[1])
            y = sent.combine(mine(*sent.wait()))
            if p > 1:
                assert counted.calls("all_to_all") == (2 if capacity else 3)
            y = y if parts == 1 else reduce_from(y, groups["expert_tensor"])
            y.backward(upstream)
            if p > 1:
                assert counted.calls("all_to_all") == (4 if capacity else 5)

        names = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
        given = whole_weights(whole, names)
        views = [w.transpose(1, 2) if whole.transposed and w.dim() == 3 else w for w in given if w is not None]
        expected = loop(x, ids, gates, [*views, *[None] * (4 - len(views))], activation)
        parameters = [w for w in given if w is not None]
        of_x, of_gates, *of_weights = torch.autograd.grad(expected, [x, gates, *parameters], upstream)
        of_weights = [of_weight.contiguous() for of_weight in of_weights]  # those of transposed ones are not
        say = f"{axes}, {experts} experts, top {top_k}, {routing}, {options}: "
        for what, here, there in (("output", y, expected), ("x", x.grad, of_x), ("gates", gates.grad, of_gates)):
            torch.testing.assert_close(here, there, rtol=0, atol=EXACT, msg=lambda text, what=what: say + what + text)
        for (name, parameter), total in zip(mine.named_parameters(), of_weights, strict=True):
            dist.all_reduce(total)  # in which tensor ranks have the same tokens
            gradient = parameter.grad
            if groups.size("expert_data") > 1:
                dist.all_reduce(gradient, group=groups["expert_data"])
            for box in sharding_of(parameter).boxes:
                torch.testing.assert_close(
                    box.of(gradient),
                    total[box.slices] / parts,
                    rtol=0,
                    atol=EXACT,
                    msg=lambda text, name=name: f"{say}{name}: {text}",
                )


@pytest.mark.ranks(2)
def test_two_ranks_equal_the_loop():
    for routing in ROUTINGS:
        top_k = 1 if "first" in routing else 2
        assert_equals_loop({"expert_parallel": 2}, 8, top_k, routing)
        assert_equals_loop({"expert_tensor": 2}, 8, top_k, routing)
    assert_equals_loop({"expert_parallel": 2}, 2, 1, "uneven")
    assert_equals_loop({"expert_parallel": 2}, 2, 2, "uneven")
    assert_equals_loop({"expert_parallel": 2}, 6, 6, "uneven")


@pytest.mark.ranks(4)
def test_four_ranks_equal_the_loop():
    for routing in ROUTINGS:
        top_k = 1 if "first" in routing else 2
        assert_equals_loop({"expert_parallel": 4}, 8, top_k, routing)
        assert_equals_loop({"expert_parallel": 2, "expert_tensor": 2}, 8, top_k, routing)
        assert_equals_loop({"expert_parallel": 2, "expert_data": 2}, 8, top_k, routing)
    assert_equals_loop({"expert_parallel": 4}, 4, 4, "uneven")


def clamped(wide):
    gate, up = wide[:, 0::2].clamp(max=7), wide[:, 1::2].clamp(-7, 7)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


@pytest.mark.ranks(4)
def test_biases_interleaved_and_transposed_weights_equal_the_loop():
    gpt_oss = {"config": ExpertConfig(activation="clamped_swiglu", bias=True, interleaved=True, transposed=True)}
    for axes in ({"expert_parallel": 4}, {"expert_parallel": 2, "expert_tensor": 2}):
        assert_equals_loop(axes, 8, 2, "uneven", reference=clamped, **gpt_oss)
        assert_equals_loop(axes, 8, 2, "one rank has none", config=ExpertConfig(bias=True))
        assert_equals_loop(axes, 8, 2, "one rank has none", config=ExpertConfig(transposed=True))
    own = Activation(lambda wide: wide[:, :F] * wide[:, F:].exp())
    assert_equals_loop(
        {"expert_parallel": 4}, 8, 2, "uneven", config=ExpertConfig(activation=own), reference=own.forward
    )


def test_a_gradient_of_the_gradient_is_refused():
    experts, dispatch = Experts(4, H, F), TokenDispatcher(4, None)
    initialize(experts, seed=3, dtype=torch.float64)
    x, gates = numbers(5, H, seed=1).requires_grad_(), numbers(5, 2, seed=2).requires_grad_()
    sent = dispatch.dispatch(x, chosen(5, 4, 2, 5, range(4)), gates)
    y = sent.combine(experts(*sent.wait()))
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("capacity", [None, 0.6])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("tokens", "is_cast"), [(13, False), (13, True), (600, False), (0, False)])
def test_through_gives_the_bits_of_its_pieces(capacity, bias, tokens, is_cast):
    dispatch, experts = (
        TokenDispatcher(4, None, capacity_factor=capacity),
        Experts(4, 8, 16, config=ExpertConfig(bias=bias, transposed=bias)),
    )
    initialize(experts, seed=3)
    ids, upstream = chosen(tokens, 4, 2, 5), torch.randn(tokens, 8)
    results = []
    for is_through in (True, False):
        torch.manual_seed(1)
        x, gates = torch.randn(tokens, 8, requires_grad=True), torch.rand(tokens, 2, requires_grad=True)
        experts.zero_grad()
        with torch.autocast("cpu", enabled=is_cast):
            sent = dispatch.dispatch(x, ids, gates)
            y = sent.apply(experts) if is_through else sent.combine(experts(*sent.wait()))
        y.backward(upstream.to(y.dtype))
        results.append([y.detach(), x.grad, gates.grad, *(parameter.grad for parameter in experts.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.ranks(2)
def test_with_a_capacity_ranks_may_have_any_number_of_tokens():
    """Slots are a multiple of the highest number; an exchange more tells of it, where it is not that of last time."""
    top_k, experts = 2, 4
    with live(expert_parallel=2) as (groups, grid):
        dispatch = TokenDispatcher(experts, groups.channels("expert_parallel", 1)[0], capacity_factor=1.0)
        free = TokenDispatcher(experts, dispatch.group)
        module = Experts(experts, H, F, grid=grid)
        initialize(module, seed=3, dtype=torch.float64)
        rank = dist.get_rank()
        #       tokens of each rank, exchanges
        cases = (((6, 6), 3), ((6, 6), 2), ((6, 1), 2), ((0, 6), 2), ((2, 9), 3), ((3, 9), 2), ((0, 0), 3), ((4, 4), 3))
        for seed, (of_ranks, calls) in enumerate(cases):
            tokens = of_ranks[rank]
            x, gates = numbers(tokens, H, seed=seed), torch.rand(tokens, top_k, dtype=torch.float64) + 0.1
            ids = torch.arange(tokens * top_k).remainder(experts).view(tokens, top_k)  # even: no slot is too few
            found = []
            for each, expected in ((dispatch, calls), (free, 3)):
                mine = x.clone().requires_grad_()
                module.zero_grad()
                with count_collectives() as counted:
                    sent = each.dispatch(mine, ids, gates)
                    y = sent.combine(module(*sent.wait()))
                    assert counted.calls("all_to_all") == expected, of_ranks
                    y.square().sum().backward()
                found.append([y, mine.grad, module.gate_up_proj.grad, module.down_proj.grad])
                assert sent.dropped is None if each is free else sent.dropped == 0
            for here, there in zip(*found, strict=True):
                torch.testing.assert_close(here, there, rtol=0, atol=EXACT)
        x, ids = numbers(2 - rank, H, seed=rank), torch.zeros(2 - rank, 1, dtype=torch.int64)
        crowded = dispatch.dispatch(x, ids, torch.ones(2 - rank, 1))
        assert crowded.dropped == 1 - rank  # two tokens are the most, for which each expert has one slot of a rank
        crowded.wait()
