"""Capacity, what is refused, hooks of weight gradients, dtypes, and graphs of torch.compile."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from par_layers import (
    Activation,
    ExpertConfig,
    Experts,
    TokenDispatcher,
    grouped_linear,
    grouped_weight_gradient,
    initialize,
)
from par_layers.experts.products import is_one_by_one
from par_layers.experts.rows import assigned

from .routings import chosen, live, loop, numbers

H, F, E = 8, 16, 4


def made(dtype=torch.float64, **options):
    experts = Experts(E, H, F, **options)
    initialize(experts, seed=1, dtype=dtype)
    return experts


def routed(tokens, dtype=torch.float64, *, top_k=2, seed=3):
    x = numbers(tokens, H, seed=seed, dtype=dtype).requires_grad_()
    gates = torch.rand(tokens, top_k, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return x, chosen(tokens, E, top_k, seed), gates.to(torch.promote_types(dtype, torch.float32)).requires_grad_()


def mixed(dispatch, experts, x, ids, gates):
    sent = dispatch.dispatch(x, ids, gates)
    return sent.combine(experts(*sent.wait()))


def gradients(y, *tensors):
    return torch.autograd.grad(y, tensors, torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape))


@pytest.mark.ranks(2)
def test_with_slots_for_all_rows_a_capacity_changes_nothing():
    with live(expert_parallel=2) as (groups, grid):
        group = groups.channels("expert_parallel", 1)[0]
        experts = made(grid=grid)
        x, ids, gates = routed(7, seed=dist.get_rank())
        parameters = [x, gates, *experts.parameters()]
        results = []
        for capacity in (None, float(E)):
            sent = TokenDispatcher(E, group, capacity_factor=capacity).dispatch(x, ids, gates)
            y = sent.combine(experts(*sent.wait()))
            results.append([y, *gradients(y, *parameters)])
            assert sent.dropped is None if capacity is None else sent.dropped.item() == 0
        for plain, slotted in zip(*results, strict=True):
            torch.testing.assert_close(slotted, plain, rtol=0, atol=1e-12)  # other numbers of rows: another order


def test_rows_beyond_a_capacity_are_those_with_the_smallest_gates():
    ids = torch.tensor([[0], [0], [1], [0], [0]])
    gates = torch.tensor([[0.2], [0.9], [0.1], [0.5], [0.5]])
    held, places, dropped = assigned(ids, gates, experts=2, each=3)
    assert held.tolist() == [1, 3, 4, 2, 5, 5]  # of equal gates the earlier token comes first
    assert places.flatten().tolist() == [6, 0, 3, 1, 2]
    assert dropped.item() == 1


def test_a_dropped_row_gives_nothing_and_gets_nothing():
    experts, dispatch = made(), TokenDispatcher(E, None, capacity_factor=0.5)
    x, ids, gates = routed(8)
    sent = dispatch.dispatch(x, ids, gates)
    y = sent.combine(experts(*sent.wait()))
    each = 2  # 0.5 * 8 tokens * 2 / 4 experts
    kept = torch.zeros_like(gates)
    for expert in range(E):
        mine = (ids == expert).nonzero()
        order = gates.detach()[mine[:, 0], mine[:, 1]].argsort(descending=True)[:each]
        kept[mine[order, 0], mine[order, 1]] = 1
    assert sent.dropped.item() == 16 - kept.sum().item() > 0
    expected = loop(x, ids, gates * kept, [experts.gate_up_proj, experts.down_proj, None, None])
    tensors = [x, gates, *experts.parameters()]
    for found, there in zip([y, *gradients(y, *tensors)], [expected, *gradients(expected, *tensors)], strict=True):
        torch.testing.assert_close(found, there, rtol=0, atol=1e-12)


@pytest.mark.ranks(2)
def test_ids_out_of_range_on_one_rank_are_refused_on_every_rank():
    with live(expert_parallel=2) as (groups, _):
        dispatch = TokenDispatcher(E, groups.channels("expert_parallel", 1)[0])
        for wrong in (E, -1):
            x, ids, gates = routed(5)
            if dist.get_rank() == 1:
                ids[3, 1] = wrong
            with pytest.raises(ValueError, match=r"ids of rank 1 are out of range 0 \.\. 3: a router"):
                dispatch.dispatch(x, ids, gates)


def test_what_does_not_fit_is_refused():
    experts, (x, ids, gates) = made(), routed(5)
    for capacity in (0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="it must be positive; pass None to drop no tokens"):
            TokenDispatcher(E, None, capacity_factor=capacity)
    with pytest.raises(ValueError, match="num_experts=0: not a multiple"):
        TokenDispatcher(0, None)
    dispatch = TokenDispatcher(E, None)
    with pytest.raises(ValueError, match=r"they do not fit; pass \[M, h\], \[M, k\] and \[M, k\]"):
        dispatch.dispatch(x, ids[:4], gates)
    with pytest.raises(ValueError, match=r"ids of rank 0 .* out of range 0 \.\. 3"):
        dispatch.dispatch(x, ids + 1, gates)
    with pytest.raises(RuntimeError, match=r"out of range 0 \.\. 3"):
        TokenDispatcher(E, None, capacity_factor=1.0).dispatch(x, ids + 1, gates)
    sent = dispatch.dispatch(x, ids, gates)
    rows, gate, counts = sent.wait()
    with pytest.raises(ValueError, match="10 tokens were received; pass"):
        sent.combine(rows[:9])
    with pytest.raises(ValueError, match="11 together, but there are 10 rows"):
        experts(rows, gate, counts + torch.tensor([1, 0, 0, 0]))
    with pytest.raises(ValueError, match=r"matching routed tokens; pass \[R, 8\] and \[R\]"):
        experts(rows[:, :7], gate, counts)
    with pytest.raises(ValueError, match="counts has 3 elements: this rank has 4 of 4"):
        experts(rows, gate, counts[:3])
    with pytest.raises(ValueError, match="there is no activation 'relu'"):
        Experts(E, H, F, config=ExpertConfig(activation="relu"))
    for activation in ("gelu", Activation(functional.relu, gated=False)):
        with pytest.raises(ValueError, match="has no gate; pass ExpertConfig"):
            Experts(E, H, F, config=ExpertConfig(activation=activation, interleaved=True))
    with pytest.raises(ValueError, match=r"must be \[R, k\], \[E, n, k\] and E"):
        grouped_linear(rows, experts.down_proj, counts)
    with pytest.raises(ValueError, match=r"must be \[R, n\] and \[R, k\]"):
        grouped_weight_gradient(rows[:3], rows, counts)


@pytest.mark.ranks(2)
def test_sizes_that_do_not_divide_are_refused():
    for axes, sizes, match in (
        ({"expert_parallel": 2}, (3, H, F), "num_experts=3: not a multiple of the 2 ranks of 'expert_parallel'"),
        ({"expert_tensor": 2}, (4, H, 5), r"intermediate_size=5: .* 2 ranks of 'expert_tensor'; pass 6"),
    ):
        with live(**axes) as (groups, grid):
            with pytest.raises(ValueError, match=match):
                Experts(*sizes, grid=grid)
            if "expert_parallel" in axes:
                with pytest.raises(ValueError, match="num_experts=3: not a multiple of the 2 ranks"):
                    TokenDispatcher(3, groups.channels("expert_parallel", 1)[0])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"config": ExpertConfig(transposed=True, bias=True, interleaved=True)},
        {"config": ExpertConfig(activation="gelu")},
    ],
)
@pytest.mark.parametrize("tokens", [9, 600], ids=["few rows", "many rows"])
def test_weight_gradients_can_be_put_off(options, tokens):
    now, (x, ids, gates) = made(**options), routed(tokens)
    later, put_off = copy.deepcopy(now), []
    later.weight_grad_hook = put_off.append
    for experts in (now, later):
        x.grad = None
        mixed(TokenDispatcher(E, None), experts, x, ids, gates).square().sum().backward()
    names = [name for name, _ in now.named_parameters() if not name.endswith("bias")]
    assert len(put_off) == 2
    assert all(getattr(later, name).grad is None for name in names)
    for gradient in put_off:
        gradient()
    for (name, here), there in zip(now.named_parameters(), later.parameters(), strict=True):
        assert (here.grad - there.grad).abs().max() <= 1e-12 * here.grad.abs().max(), name  # other products: order


@pytest.mark.parametrize("tokens", [9, 600], ids=["few rows", "many rows"])
def test_a_checkpoint_changes_no_gradient(tokens):
    """Saved tensors of a checkpoint can be asked for once."""
    found = []
    for again in (False, True):
        experts, (x, ids, gates) = made(config=ExpertConfig(bias=True)), routed(tokens)
        dispatch = TokenDispatcher(E, None)
        y = (
            checkpoint(mixed, dispatch, experts, x, ids, gates, use_reentrant=False)
            if again
            else mixed(dispatch, experts, x, ids, gates)
        )
        found.append(gradients(y, x, gates, *experts.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_gelu_without_a_gate_equals_the_loop():
    experts, (x, ids, gates) = made(config=ExpertConfig(activation="gelu")), routed(20)
    assert [name for name, _ in experts.named_parameters()] == ["up_proj", "down_proj"]
    y = mixed(TokenDispatcher(E, None), experts, x, ids, gates)
    expected = loop(x, ids, gates, [experts.up_proj, experts.down_proj, None, None], functional.gelu)
    tensors = [x, gates, *experts.parameters()]
    for found, there in zip([y, *gradients(y, *tensors)], [expected, *gradients(expected, *tensors)], strict=True):
        torch.testing.assert_close(found, there, rtol=0, atol=1e-12)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("dtype", "exact"), [(torch.float32, 2e-6), (torch.bfloat16, 4e-2)], ids=str)
def test_other_dtypes_are_as_near_as_they_can_be(dtype, exact):
    """Relative to the largest number; each product and activation is rounded once to 2**-24 or 2**-9."""
    with live(expert_parallel=2) as (groups, grid):
        dispatch = TokenDispatcher(E, groups.channels("expert_parallel", 1)[0])
        for tokens in (6, 600):
            x, ids, gates = routed(tokens, dtype, seed=dist.get_rank())
            experts = made(dtype, grid=grid)
            wide = copy.deepcopy(experts).double()
            found = mixed(dispatch, experts, x, ids, gates)
            there = mixed(dispatch, wide, x.double(), ids, gates.double())
            assert found.dtype == dtype
            pairs = [
                (found, there),
                *zip(
                    gradients(found, x, gates, *experts.parameters()),
                    gradients(there, x, gates, *wide.parameters()),
                    strict=True,
                ),
            ]
            for mine, exactly in pairs:
                assert (mine.double() - exactly.double()).abs().max() <= exact * exactly.abs().max()


def test_products_of_autocast_are_in_its_dtype():
    experts, (x, ids, gates) = made(torch.float32), routed(8, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = mixed(TokenDispatcher(E, None), experts, x, ids, gates)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert all(tensor.grad.dtype == torch.float32 for tensor in (x, gates, *experts.parameters()))


def test_products_of_no_rows_and_of_experts_without_are_zero():
    weight = numbers(3, 4, 8, seed=1, dtype=torch.float32)
    for dtype in (torch.float32, torch.float64):
        rows, matrices = numbers(2, 8, seed=2, dtype=dtype), weight.to(dtype)
        for counts in ([0, 2, 0], torch.tensor([0, 2, 0])):
            torch.testing.assert_close(grouped_linear(rows, matrices, counts), rows @ matrices[1].t())
            found = grouped_weight_gradient(rows[:, :4].contiguous(), rows, counts)
            assert not found[[0, 2]].any()
            torch.testing.assert_close(found[1], rows[:, :4].t() @ rows)
        assert grouped_linear(rows[:0], matrices, [0, 0, 0]).shape == (0, 4)
        assert not grouped_weight_gradient(rows[:0, :4], rows[:0], [0, 0, 0]).any()


def test_a_grouped_product_is_differentiated():
    rows, weight = numbers(7, 3, seed=1).requires_grad_(), numbers(2, 5, 3, seed=2).requires_grad_()
    torch.autograd.gradcheck(lambda rows, weight: grouped_linear(rows, weight, [3, 4]), (rows, weight))


def test_the_choice_of_the_way_depends_on_sizes_alone():
    assert is_one_by_one(256 * 4, 4, "cpu")
    assert not is_one_by_one(255 * 4, 4, "cpu")
    assert not is_one_by_one(4096 * 4, 4, "cuda")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # and looks where graphs begin
def test_between_graphs_of_compile_it_is_the_same():
    """Without a capacity; with one there is one graph, which the tests of whole layers look at."""
    experts, (x, ids, gates) = made(), routed(12)
    dispatch = TokenDispatcher(E, None)

    def run(x, ids, gates):
        return mixed(dispatch, experts, x * 2, ids, gates) + x

    y, compiled = run(x, ids, gates), torch.compile(run, backend="aot_eager")(x, ids, gates)
    tensors = [x, gates, *experts.parameters()]
    for here, there in zip([y, *gradients(y, *tensors)], [compiled, *gradients(compiled, *tensors)], strict=True):
        assert torch.equal(here, there)
