"""Routers on one device."""

import copy
import pickle

import pytest
import torch
from torch import nn

from par_layers import LoadBalancing, Router, RouterConfig, RouterLosses, update_correction_bias_

from ..helpers import numbers

HIDDEN, EXPERTS, TOP_K, TOKENS = 16, 8, 3, 33


@pytest.mark.parametrize("autocast", [True, False])
def test_scores_of_bf16_are_those_of_fp32(autocast):
    # Rounded to bf16 before softmax, near scores tie, and which of them is chosen is chance.
    router = Router(HIDDEN, EXPERTS, TOP_K, config=RouterConfig(bias=True)).bfloat16()
    wide = copy.deepcopy(router).float()
    x = numbers(TOKENS, HIDDEN, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        routing = router(x)
    expected = wide(x.float())
    assert routing.logits.dtype == routing.scores.dtype == routing.gates.dtype == torch.float32
    assert torch.equal(routing.logits, expected.logits)
    assert torch.equal(routing.ids, expected.ids)
    assert torch.equal(routing.gates, expected.gates)


def test_gradients_of_bf16_are_those_of_fp32_rounded_once_also_if_backward_runs_under_autocast():
    router = Router(HIDDEN, EXPERTS, TOP_K, config=RouterConfig(norm_topk_prob=False)).bfloat16()
    wide = copy.deepcopy(router).float()
    x = numbers(TOKENS, HIDDEN, dtype=torch.bfloat16)
    upstream = numbers(TOKENS, TOP_K, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        router(x).gates.backward(upstream)
    wide(x.float()).gates.backward(upstream)
    assert torch.equal(router.weight.grad, wide.weight.grad.bfloat16())


def test_logits_of_fp64_are_fp64():
    routing = Router(HIDDEN, EXPERTS, TOP_K, config=RouterConfig(correction_bias=True)).double()(
        numbers(TOKENS, HIDDEN)
    )
    assert routing.logits.dtype == routing.gates.dtype == torch.float64


def test_the_bias_of_the_choice_is_no_part_of_the_gates_and_has_no_gradient():
    router = Router(
        HIDDEN, EXPERTS, 1, config=RouterConfig(scoring_func="sigmoid", norm_topk_prob=False, correction_bias=True)
    )
    router.e_score_correction_bias[5] = 10.0
    routing = router(numbers(TOKENS, HIDDEN, dtype=torch.float32))
    assert (routing.ids == 5).all()
    assert torch.equal(routing.gates, routing.scores[:, 5:6])
    assert not router.e_score_correction_bias.requires_grad


@pytest.mark.parametrize("convert", [nn.Module.bfloat16, nn.Module.half, nn.Module.double])
def test_the_bias_of_the_choice_stays_in_fp32_whatever_the_model_is_cast_to(convert):
    model = nn.Sequential(Router(HIDDEN, EXPERTS, TOP_K, config=RouterConfig(correction_bias=True)))
    model[0].e_score_correction_bias.fill_(1.0 + 1e-3)  # bf16 has nothing between 1 and 1.0078
    before = model[0].e_score_correction_bias.clone()
    convert(model)
    assert model[0].e_score_correction_bias.dtype == torch.float32
    assert torch.equal(model[0].e_score_correction_bias, before)


def test_a_bias_that_is_loaded_by_assignment_becomes_fp32():
    router = Router(HIDDEN, EXPERTS, TOP_K, config=RouterConfig(correction_bias=True))
    state = {name: tensor.bfloat16() for name, tensor in router.state_dict().items()}
    router.load_state_dict(state, assign=True)
    assert router.weight.dtype == torch.bfloat16
    assert router.e_score_correction_bias.dtype == torch.float32


def test_nan_scores_give_ids_that_no_expert_has():
    router = Router(HIDDEN, EXPERTS, TOP_K, balance=LoadBalancing(aux_loss_coef=1.0, scope="microbatch"))
    x = numbers(TOKENS, HIDDEN, dtype=torch.float32)
    x[4, 2] = torch.nan
    ids = router(x).ids
    assert (ids[4] == EXPERTS).all()
    assert (torch.cat([ids[:4], ids[5:]]) < EXPERTS).all()


def test_no_tokens_are_routed_nowhere():
    router = Router(
        HIDDEN, EXPERTS, TOP_K, balance=LoadBalancing(aux_loss_coef=1.0, z_loss_coef=1.0, scope="microbatch")
    )
    x = torch.zeros(0, HIDDEN, requires_grad=True)
    routing = router(x)
    assert routing.ids.shape == routing.gates.shape == (0, TOP_K)
    routing.gates.sum().backward()
    assert router.weight.grad.count_nonzero() == 0
    assert RouterLosses(router).take()["aux"] == 0


def test_a_copy_and_a_pickle_have_seen_no_tokens():
    router = Router(HIDDEN, EXPERTS, TOP_K)
    router(numbers(TOKENS, HIDDEN, dtype=torch.float32))
    for other in (copy.deepcopy(router), pickle.loads(pickle.dumps(router))):
        update_correction_bias_(other)
        assert RouterLosses(other).load()[""].sum() == 0
    update_correction_bias_(router)
    assert RouterLosses(router).load()[""].sum() == TOKENS * TOP_K


def test_tensors_without_numbers_are_routed_and_not_counted():
    balance = LoadBalancing(aux_loss_coef=0.1, z_loss_coef=0.1, scope="microbatch")
    router = Router(
        HIDDEN, EXPERTS, TOP_K, balance=balance, config=RouterConfig(correction_bias=True, scoring_func="sigmoid")
    )
    with torch.device("meta"):
        abstract = copy.deepcopy(router).to("meta")
        routing = abstract(torch.zeros(TOKENS, HIDDEN))
    routing.gates.sum().backward()
    assert routing.ids.shape == (TOKENS, TOP_K)
    assert abstract.load.counts is None
    assert RouterLosses(abstract).take() == {}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # the tracer does it itself
def test_a_router_is_compiled_as_one_graph_and_counts_there():
    router = Router(HIDDEN, EXPERTS, TOP_K, balance=LoadBalancing(aux_loss_coef=0.1, scope="microbatch"))
    compiled = torch.compile(lambda x: router(x).gates, backend="aot_eager", fullgraph=True)
    x, upstream = (numbers(TOKENS, count, dtype=torch.float32) for count in (HIDDEN, TOP_K))
    compiled(x).backward(upstream)
    gradient, router.weight.grad = router.weight.grad, None
    once = router.load.counts
    router(x).gates.backward(upstream)
    torch.testing.assert_close(gradient, router.weight.grad, rtol=1e-6, atol=1e-7)  # fp32, other kernels
    assert torch.equal(router.load.counts, 2 * once)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": RouterConfig(n_group=3, topk_group=1)}, "8 experts do not divide into 3 groups"),
        ({"balance": LoadBalancing(bias_update_rate=1e-3)}, r"pass RouterConfig\(correction_bias=True\)"),
    ],
)
def test_router_rejects_options_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        Router(HIDDEN, EXPERTS, TOP_K, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scoring_func": "tanh"}, "scoring_func='tanh': unknown function; pass 'softmax' or 'sigmoid'"),
        ({"topk_group": 2}, "topk_group=2: out of range with n_group=1; pass 1 to 1"),
    ],
)
def test_router_config_rejects_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        RouterConfig(**options)


def test_activations_of_another_shape_are_refused():
    router = Router(HIDDEN, EXPERTS, TOP_K)
    with pytest.raises(ValueError, match=r"x has shape \[3, 15\]: this router needs tokens; pass \[M, 16\]"):
        router(torch.zeros(3, 15))
    with pytest.raises(ValueError, match=r"x has shape \[2, 3, 16\]"):
        router(torch.zeros(2, 3, 16))
    with pytest.raises(ValueError, match=r"mask has shape \[2, 3\]: x has 6 tokens"):
        router(torch.zeros(6, 16), torch.ones(2, 3, dtype=torch.bool))
